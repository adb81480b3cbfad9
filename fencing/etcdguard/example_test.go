package etcdguard_test

import (
	"context"
	"errors"
	"log"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/etcdguard"
)

// The caller's operations are carried out in the transaction of the check, or not at all.
func Example() {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"localhost:2379"}})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	guard, err := etcdguard.New(client, nil)
	if err != nil {
		log.Fatal(err)
	}
	claim := fencing.Claim{Resource: "config", Token: 33} // lease.Token()
	_, err = guard.Do(context.Background(), claim, nil, clientv3.OpPut("config/a", "1"), clientv3.OpDelete("config/b"))
	if errors.Is(err, fencing.ErrStale) {
		log.Print("somebody else holds the lock by now: ", err)
	}
}
