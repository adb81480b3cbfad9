package etcd_test

import (
	"context"
	"fmt"
	"log"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/etcd"
)

// New uses an existing client of the program, and never closes it.
func ExampleNew() {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"localhost:2379"}})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	driver := etcd.New(client, &etcd.Options{KeyPrefix: "shop/locks/"})
	defer driver.Close(context.Background())

	d := driver.Describe()
	fmt.Println(d.Name, d.Capabilities&backend.CapFencing)
	// Output: etcd fencing
}

// Open makes the client, too. The tokens of the driver fence the writes of a holder that was paused.
func ExampleOpen() {
	ctx := context.Background()
	driver, err := etcd.Open(ctx, "etcd://localhost:2379")
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
