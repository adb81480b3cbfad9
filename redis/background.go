package redis

// This file removes leftovers from the server: a try without an answer, a place in the queue after its caller's context
// ended, and a hold that replicas did not confirm.
//
// The difficulty is order. A removal must not reach the server before the request that it removes, or the request takes
// the name afterwards and keeps it for a TTL. Redis runs the commands of one connection in order and gives no order
// across connections, and after a fault the next request uses another connection. So a leftover carries two signals
// that the old connection has delivered everything: the end of its step, and Drained.

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// Bounds of the clean-up.
const (
	// Of one attempt; a later one takes the place of the oldest.
	maxLeftovers = 4
	// For the leftovers of one call. Leftovers that remain after it end with their TTL, and the core releases an
	// unknown outcome in any case.
	tidyTime = 10 * time.Second
)

// leftover is a possible hold or place of a try that has ended. It is written once, before tidy gets it.
type leftover struct {
	keys redisscript.Keys
	// The hold that the try asked for: in the server it is a hold, a place in the queue, or absent.
	hold redisscript.Hold

	// The step, if its caller left before it ended: a line still owns it. Its done is signalled once.
	left *lines.Step
	// Closed by the line when the server has run all commands of the failed connection, or never will. nil: no need to
	// wait.
	drained <-chan struct{}
}

// leftoverOf returns the possible leftover of the try for h after its step ended with f. A step that its caller left
// may not be read before its end: the line writes to it until then.
func leftoverOf(keys redisscript.Keys, h redisscript.Hold, s *lines.Step, f *redisconn.Failure) leftover {
	if f.Left { // the rest of s is a line's, until its end
		return leftover{keys: keys, hold: h, left: s}
	}
	return leftover{keys: keys, hold: h, drained: s.Drained}
}

// arrived waits until the server has run the step, or never will. It returns false if ctx ended first: a removal would
// then fail, or, worse, come too early.
func (l *leftover) arrived(ctx context.Context) bool {
	drained := l.drained
	if l.left != nil {
		select {
		case <-l.left.Done():
			drained = l.left.Drained
		case <-ctx.Done():
			return false
		}
	}
	if drained == nil {
		return true
	}
	select {
	case <-drained:
		return true
	case <-ctx.Done():
		return false
	}
}

// giveUp starts to tidy up leftovers, and returns the error of the call: err, as an unknown outcome if there are any.
// It does not wait for the removals, since a call has to return within its context. An outcome is unknown although a
// removal is on its way: until the removal is answered, the name may be held for the caller without its knowledge.
func (d *Driver) giveUp(leftovers []leftover, err error) error {
	if len(leftovers) == 0 {
		return err
	}
	d.tidy(leftovers)
	if errors.Is(err, backend.ErrUnknown) {
		return err
	}
	return &redisconn.Failure{Cause: err, Sent: true}
}

// tidy removes leftovers in the background. It awaits all of them before the first removal, because a removal of one
// that is still under way would not catch it, and no two connections keep an order.
//
// A try delivered later can be handed the lock in one of two ways. An offer is declined immediately, since its nonce is
// abandoned; a hold lasts one TTL. The same applies to a connection of a client that the driver does not own, see New.
//
// The goroutine belongs to the gate: Close waits for it, and it ends after tidyTime.
func (d *Driver) tidy(leftovers []leftover) {
	for _, l := range leftovers {
		d.waiting.ended.Note(l.hold.Nonce)
	}
	d.gate.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, tidyTime)
		defer cancel()
		for _, l := range leftovers {
			if !l.arrived(ctx) {
				return
			}
		}
		for _, l := range leftovers {
			// A removal is repeated until it is answered. It names its try, so a second removal has no effect.
			for n := 1; ; n++ {
				_, _, err := d.lines.Do(ctx, lines.NewStep(redisscript.Cancel, l.keys, l.hold.Value()))
				if err == nil {
					break
				}
				if redisconn.FailureOf(err).Fatal || !redisconn.Pause(ctx, n) {
					return
				}
			}
		}
	})
}
