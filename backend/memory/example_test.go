package memory_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend/memory"
)

// Two drivers on one store behave as two processes on one service.
func ExampleStore() {
	ctx := context.Background()
	store := memory.NewStore(nil)
	first, err := fencelock.ForCorrectness(store.Driver(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer first.Close(ctx)
	second, err := fencelock.ForCorrectness(store.Driver(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer second.Close(ctx)

	lease, err := first.Acquire(ctx, "reports/daily")
	if err != nil {
		log.Fatal(err)
	}
	_, err = second.TryAcquire(ctx, "reports/daily")
	fmt.Println(errors.Is(err, fencelock.ErrHeld))
	if err := lease.Release(ctx); err != nil {
		log.Fatal(err)
	}
	_, err = second.TryAcquire(ctx, "reports/daily")
	fmt.Println(err)
	// Output:
	// true
	// <nil>
}
