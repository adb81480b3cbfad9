package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/builtin/embedded"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM) // Close works with an ended ctx
	defer stop()
	// A durable lock server in this process. Elsewhere: fencelock.Open(ctx, "etcd://…", fencelock.Correctness, nil).
	server, err := embedded.Start(ctx, embedded.Options{DataDir: "locks"})
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close(ctx)
	locks, err := fencelock.ForCorrectness(server.Driver(nil), nil) // a driver that cannot fence does not compile here
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)

	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
		// The lease is renewed in the background, and ctx ends before another client can acquire the lock. The store
		// that receives the result must check the token.
		fmt.Println("alone with", lease.Name(), "- it has a token:", lease.Token() > 0)
		return ctx.Err()
	})
	if err != nil {
		log.Fatal(err)
	}
}
