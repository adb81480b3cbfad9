package builtin_test

import (
	"context"
	"fmt"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/builtin"
)

// Three servers, started with "fencelock serve" on three machines.
func ExampleNew() {
	driver := builtin.New([]string{"a.example:7480", "b.example:7480", "c.example:7480"}, nil)
	locks, err := fencelock.ForCorrectness(driver, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locks.Close(context.Background())
	fmt.Println(locks.Describe().Name)
	// Output: builtin
}
