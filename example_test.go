package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strings"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend/memory"
)

// open returns two clients of one lock service, as two processes would have.
func open(o *fencelock.Options) (a, b *fencelock.Client) {
	store := memory.NewStore(nil)
	a, err1 := fencelock.ForCorrectness(store.Driver(), o)
	b, err2 := fencelock.ForCorrectness(store.Driver(), o)
	if err := errors.Join(err1, err2); err != nil {
		log.Fatal(err)
	}
	return a, b
}

func ExampleClient_Do() {
	ctx := context.Background()
	locks, _ := open(nil)
	defer locks.Close(ctx)
	err := locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
		fmt.Println("held", lease.Name(), lease.Token().Exclusive())
		return ctx.Err()
	})
	fmt.Println(err)
	// Output:
	// held accounts/42 true
	// <nil>
}

func ExampleShared() {
	ctx := context.Background()
	a, b := open(nil)
	one, _ := a.Acquire(ctx, "catalog", fencelock.Shared())
	two, _ := b.Acquire(ctx, "catalog", fencelock.Shared())
	_, err := a.TryAcquire(ctx, "catalog")
	fmt.Println("two readers; a writer:", errors.Is(err, fencelock.ErrHeld))
	_ = errors.Join(one.Release(ctx), two.Release(ctx))
	writer, err := a.TryAcquire(ctx, "catalog")
	fmt.Println(writer.Name(), err)
	// Output:
	// two readers; a writer: true
	// catalog <nil>
}

func ExamplePermits() {
	ctx := context.Background()
	a, b := open(nil)
	_, err := a.Acquire(ctx, "gpu-pool", fencelock.Permits(2, 3))
	fmt.Println("2 of 3:", err)
	_, err = b.TryAcquire(ctx, "gpu-pool", fencelock.Permits(2, 3))
	fmt.Println("2 more:", errors.Is(err, fencelock.ErrHeld))
	_, err = b.TryAcquire(ctx, "gpu-pool", fencelock.Permits(1, 4))
	fmt.Println("of another limit:", errors.Is(err, fencelock.ErrLimitMismatch))
	// Output:
	// 2 of 3: <nil>
	// 2 more: true
	// of another limit: true
}

func ExampleHierarchical() {
	ctx := context.Background()
	a, b := open(nil)
	_, _ = a.Acquire(ctx, "eu/orders", fencelock.Hierarchical())
	for _, name := range []string{"eu", "eu/orders/7", "eu/stock"} {
		_, err := b.TryAcquire(ctx, name, fencelock.Hierarchical())
		fmt.Println(name, "is held:", errors.Is(err, fencelock.ErrHeld))
	}
	// Output:
	// eu is held: true
	// eu/orders/7 is held: true
	// eu/stock is held: false
}

func ExampleReentrant() {
	ctx := context.Background()
	locks, _ := open(nil)
	// audit can be called alone, and from under the lock.
	audit := func(ctx context.Context) error {
		return locks.Do(ctx, "ledger", func(_ context.Context, lease *fencelock.Lease) error {
			fmt.Println("audit with token", lease.Token())
			return nil
		}, fencelock.Reentrant())
	}
	err := locks.Do(ctx, "ledger", func(ctx context.Context, lease *fencelock.Lease) error {
		fmt.Println("post with token", lease.Token())
		return audit(ctx)
	})
	fmt.Println(err)
	// Output:
	// post with token 2
	// audit with token 2
	// <nil>
}

func ExampleClient_AcquireAll() {
	ctx := context.Background()
	a, b := open(nil)
	accounts, err := a.AcquireAll(ctx, []string{"account/2", "account/1"})
	fmt.Println(len(accounts), "accounts", err)
	_, err = b.TryAcquireAll(ctx, []string{"account/1", "account/3"})
	fmt.Println("one of them is held:", errors.Is(err, fencelock.ErrHeld))
	_, err = b.TryAcquire(ctx, "account/3") // it is still free
	fmt.Println(err, accounts.Release(ctx))
	// Output:
	// 2 accounts <nil>
	// one of them is held: true
	// <nil> <nil>
}

func ExampleClient_Lead() {
	ctx, stop := context.WithCancel(context.Background())
	candidate, observer := open(&fencelock.Options{Owner: "replica 3"})
	err := candidate.Lead(ctx, "scheduler", func(ctx context.Context, lease *fencelock.Lease) error {
		leader, err := observer.Leader(ctx, "scheduler")
		fmt.Println(leader.Owner, "leads:", leader.Token == lease.Token(), err)
		stop() // otherwise Lead continues until ctx ends
		<-ctx.Done()
		return ctx.Err()
	})
	fmt.Println(err)
	// Output:
	// replica 3 leads: true <nil>
	// fencelock: lead "scheduler": context canceled
}

func ExampleOptions_order() {
	ctx := context.Background()
	locks, _ := open(&fencelock.Options{Order: strings.Compare})
	err := locks.Do(ctx, "b", func(ctx context.Context, _ *fencelock.Lease) error {
		return locks.Do(ctx, "a", func(context.Context, *fencelock.Lease) error { return nil })
	})
	fmt.Println(errors.Is(err, fencelock.ErrDeadlock))
	fmt.Println(err)
	// Output:
	// true
	// fencelock: acquire "a": waiting would deadlock: "a" stands before "b", which is held, in the order of locks
}

// A store that cannot check tokens gets ten seconds for the last writes of a dead holder.
func ExampleOptions_lockDelay() {
	locks, err := fencelock.ForEfficiency(memory.New(nil), &fencelock.Options{
		TTL: 10 * time.Second, LockDelay: 10 * time.Second,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(context.Background())
	// The name is free immediately after a release, and 20 s after the last renewal of a dead holder.
}

func ExampleClient_Watch() {
	ctx := context.Background()
	a, b := open(nil)
	before, _ := b.Look(ctx, "stock/1")
	_, _ = a.Acquire(ctx, "stock/1")
	_ = b.ForceRelease(ctx, "stock/1", "pod 7f9c is gone")
	n := 0
	for change, err := range b.Watch(ctx, "stock/1", fencelock.Since(before.Revision)) {
		fmt.Println(change.Type, change.Reason, err)
		if n++; n == 2 {
			break
		}
	}
	// Output:
	// acquired  <nil>
	// force-released pod 7f9c is gone <nil>
}
