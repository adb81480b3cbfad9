package redis

// This file gives back leftovers, what the server may still keep and nobody waits for any more: of a try without an
// answer, a place whose caller's context ended, a hold that replicas did not confirm.
//
// The difficulty is order. A removal must not reach the server before the request that it removes, or the request takes
// the name afterwards and keeps it for a TTL. Redis runs the commands of one connection in order and promises nothing
// across connections, and after a fault the next request travels on another one. So a leftover carries what tells that
// the old connection has delivered everything: the end of its step, and Drained.

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// Bounds of what is tidied up.
const (
	// Of one attempt; a later one takes the place of the oldest.
	maxLeftovers = 4
	// For what one call has left. What the server has not answered by then ends with its TTL, and the core asks for the
	// release of an unknown outcome in any case.
	tidyTime = 10 * time.Second
)

// leftover is what the server may still keep of a try that has ended. It is written once, before tidy gets it.
type leftover struct {
	keys redisscript.Keys
	// What the try asked for: it is in the server as a hold, as a place in the queue, or not at all.
	hold redisscript.Hold

	// The step, if its caller left before it ended: a line still owns it. Its done is signalled once.
	left *step
	// Closed by the line when the server has run what the failed connection carried, or never will. nil: nothing to
	// wait for.
	drained <-chan struct{}
}

// leftoverOf returns what the try for h may have left whose step ended with f. A step that was left may not be read
// before its end: the line writes to it until then.
func leftoverOf(keys redisscript.Keys, h redisscript.Hold, s *step, f *redisconn.Failure) leftover {
	if f.Left { // the rest of s is a line's, until its end
		return leftover{keys: keys, hold: h, left: s}
	}
	return leftover{keys: keys, hold: h, drained: s.Drained}
}

// arrived waits until the server has run what was sent, or never will. It is false if ctx ended first: removing then
// would be in vain, or worse, too early.
func (l *leftover) arrived(ctx context.Context) bool {
	drained := l.drained
	if l.left != nil {
		select {
		case <-l.left.done:
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
// removal is on its way: until that is answered, the name may be held for the caller without its knowledge.
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

// tidy removes leftovers in the background. All are awaited before the first removal, because removing one that is
// still under way would leave what comes after it, and no two connections keep an order.
//
// A try delivered after that can be handed the lock in one of two ways. As an offer it is declined at once, since its
// nonce is abandoned; as a hold it lasts one TTL. The same holds for a connection of a client that is not the driver's
// own, see New.
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
			// A removal is repeated until it is answered: it names its try, so that doing it twice does nothing more.
			for n := 1; ; n++ {
				_, _, err := d.lines.do(ctx, newStep(redisscript.Cancel, l.keys, l.hold.Value()))
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
