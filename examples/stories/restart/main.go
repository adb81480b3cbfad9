// Command restart lets a job meet its own former life.
//
//	go run ./examples/stories/restart
//	go run ./examples/stories/restart -unsafe
//
// Tier: correctness. A job of a workflow engine has an id that survives restarts, and uses it as RequestID. Its first
// process stands still in the middle of its work, and the engine starts a second one with the same id. The id makes a
// repeat within one client idempotent. For another client it opens no lock: the second process is a contender like any
// other, and HeldError.SameRequest says that its own former life holds the lock. When that has lost
// its lease, the second gets the lock, with a greater token; and when the first goes on after all, the guard refuses
// its write.
//
// If the id alone moved the hold, both would have the same token and nonce, and no guard could tell them apart. With
// -unsafe both lives write with one token.
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/fencing"
)

const (
	name = "jobs/7"
	id   = "workflow-4711-step-3-attempt-1"
)

func main() { story.Main(tell) }

func tell(ctx context.Context, s *story.Story) error {
	var guard fencing.Memory // stands for the database that both lives write to
	total := 0
	add := func(claim fencing.Claim) error {
		return guard.Do(ctx, claim, func() error { total += 10; return nil })
	}

	former, err := s.Open(ctx, fencelock.Correctness, "first life")
	if err != nil {
		return err
	}
	again, err := s.Open(ctx, fencelock.Correctness, "second life")
	if err != nil {
		return err
	}
	// Long enough for the second life to find it held.
	short := fencelock.TTL(max(10*time.Second, story.ShortTTL(former)))
	// NoRenew stands for a process that stands still: it does not renew its lease.
	first, err := former.Acquire(ctx, name, fencelock.RequestID(id), fencelock.NoRenew(), short)
	if err != nil {
		return err
	}
	s.Tell("the first life has the lock, with token %v, and stands still before it writes", first.Token())

	_, err = again.TryAcquire(ctx, name, fencelock.RequestID(id), short)
	var held *fencelock.HeldError
	if !errors.As(err, &held) {
		return fmt.Errorf("the second life was answered %w; want a *HeldError", err)
	}
	s.Tell("the second life asks with the same id: held by %q, SameRequest: %t", held.Holder, held.SameRequest)
	if !held.SameRequest {
		return errors.New("the second life did not recognise the first")
	}

	second, err := again.Acquire(ctx, name, fencelock.RequestID(id), short)
	if err != nil {
		return err
	}
	s.Tell("it waits until the first life has lost the lock (%v), and has it with token %v",
		first.Err(), second.Token())
	if second.Token() <= first.Token() || first.Err() == nil {
		return fmt.Errorf("both lives hold the lock: tokens %v and %v, %w", first.Token(), second.Token(), first.Err())
	}
	if err := add(second.Claim(name)); err != nil {
		return err
	}
	s.Tell("the second life writes; the total is %d", total)

	late := first.Claim(name)
	if s.Unsafe {
		late = second.Claim(name) // as if the hold moved with its id
	}
	err = add(late)
	s.Tell("the first life goes on and writes with token %v: %v; the total is %d", late.Token, err, total)
	if refused := errors.Is(err, fencing.ErrStale); refused == s.Unsafe {
		return fmt.Errorf("the late write was answered %w", err)
	}
	return second.Release(ctx)
}
