package zookeeper_test

import (
	"context"
	"fmt"
	"log"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/zookeeper"
)

// New connects with the first call. The driver has its sessions, one for each TTL.
func ExampleNew() {
	driver := zookeeper.New([]string{"localhost:2181"}, &zookeeper.Options{KeyPrefix: "/shop/locks"})
	defer driver.Close(context.Background())

	d := driver.Describe()
	fmt.Println(d.Name, d.Capabilities&backend.CapFencing)
	// Output: zookeeper fencing
}

// Open reads a URL and asks the servers before it returns. The tokens of the driver fence the writes of a holder that
// was paused.
func ExampleOpen() {
	ctx := context.Background()
	driver, err := zookeeper.Open(ctx, "zk://localhost:2181?prefix=/shop/locks")
	if err != nil {
		log.Fatal(err)
	}
	locks, err := fencelock.ForCorrectness(driver, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)
	err = locks.Do(ctx, "reports/daily", func(ctx context.Context, lease *fencelock.Lease) error {
		fmt.Println(lease.Token())
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
}
