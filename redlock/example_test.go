package redlock_test

import (
	"context"
	"log"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/redlock"
)

func ExampleNew() {
	var clients []goredis.UniversalClient
	for _, addr := range []string{"10.0.0.1:6379", "10.0.0.2:6379", "10.0.0.3:6379"} {
		clients = append(clients, goredis.NewClient(&goredis.Options{Addr: addr}))
	}
	locks, err := fencelock.ForEfficiency(redlock.New(clients, &redlock.Options{MaxTTL: time.Minute}), nil)
	if err != nil {
		log.Fatal(err)
	}
	err = locks.Do(context.Background(), "reports/nightly", func(ctx context.Context, lease *fencelock.Lease) error {
		return ctx.Err() // the work; a rare second run must only waste time
	})
	if err != nil {
		log.Print(err)
	}
}
