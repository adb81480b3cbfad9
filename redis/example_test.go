package redis_test

import (
	"context"
	"fmt"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/redis"
)

// A driver on an existing client of the program.
func ExampleNew() {
	client := goredis.NewClient(&goredis.Options{
		Addr:                  "localhost:6379",
		MaxRetries:            -1,
		ContextTimeoutEnabled: true,
	})
	defer client.Close()
	driver := redis.New(client, &redis.Options{KeyPrefix: "shop:locks:"})
	defer driver.Close(context.Background())

	d := driver.Describe()
	fmt.Println(d.Name, d.Capabilities)
	// Output: redis shared,permits,min-hold,metadata,inspect,list,force-release,multi-acquire
}

// A driver without the core, as a conformance test uses it. Programs pass it to package fencelock, which renews the
// grant and reports its loss.
func ExampleOpen() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	driver, err := redis.Open(ctx, "redis://localhost:6379/0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer driver.Close(ctx)

	grant, err := driver.Acquire(ctx, backend.Request{
		Name: "reports/daily", Owner: "host-1", RequestID: backend.NewRequestID(), Fresh: true,
		TTL: 10 * time.Second, Wait: true,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer driver.Release(ctx, grant)
	fmt.Println("held for", grant.TTL)
}
