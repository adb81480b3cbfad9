package redis

// This file gives back what calls may have left in the server and nobody waits for any more: an attempt without an
// answer, a place whose caller's context ended, a hold that replicas did not confirm.
//
// The difficulty is order. A removal must not reach the server before the request that it removes, or the request takes
// the name afterwards and keeps it for a TTL. Redis runs the commands of one connection in order and promises nothing
// across connections, and after a fault the next request travels on another one. So an outcome carries what tells that
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
	// Attempts of one call; a later one takes the place of the oldest.
	maxUnknown = 4
	// For one call. What the server has not answered by then ends with its TTL, and the core asks for the release of an
	// unknown outcome in any case.
	tidyTime = 10 * time.Second
)

// outcome is an attempt of which it is not known what it left in the server. It is written once, before tidy gets it.
type outcome struct {
	keys redisscript.Keys
	// What the attempt asked for: it is in the server as a hold, as a place in the queue, or not at all.
	hold redisscript.Hold

	// The step, if its caller left before it ended: a line still owns it. Its done is signalled once.
	left *step
	// Closed by the line when the server has run what the failed connection carried, or never will. nil: nothing to
	// wait for.
	drained <-chan struct{}
}

// outcomeOf returns what is not known of the attempt for h whose step ended with f. A step that was left may not be
// read before its end: the line writes to it until then.
func outcomeOf(keys redisscript.Keys, h redisscript.Hold, s *step, f *redisconn.Failure) outcome {
	if f.Left { // the rest of s is a line's, until its end
		return outcome{keys: keys, hold: h, left: s}
	}
	return outcome{keys: keys, hold: h, drained: s.drained}
}

// arrived waits until the server has run what was sent, or never will. It is false if ctx ended first: removing then
// would be in vain, or worse, too early.
func (o *outcome) arrived(ctx context.Context) bool {
	drained := o.drained
	if o.left != nil {
		select {
		case <-o.left.done:
			drained = o.left.drained
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

// giveUp starts to tidy up what attempts may have left, and returns the error of the call: err, as an unknown outcome
// if there is anything to tidy up. It does not wait for the removals, since a call has to return within its context. An
// outcome is unknown although a removal is on its way: until that is answered, the name may be held for the caller
// without its knowledge.
func (d *Driver) giveUp(left []outcome, err error) error {
	if len(left) == 0 {
		return err
	}
	d.tidy(left)
	if errors.Is(err, backend.ErrUnknown) {
		return err
	}
	return &redisconn.Failure{Cause: err, Sent: true}
}

// tidy removes in the background what attempts may have left. All outcomes are awaited before the first removal,
// because removing one that is still under way would leave what comes after it, and no two connections keep an order.
//
// An attempt delivered after that can be handed the lock in one of two ways. As an offer it is declined at once, since
// its nonce is abandoned; as a hold it lasts one TTL. The same holds for a connection of a client that is not the
// driver's own, see New.
//
// The goroutine belongs to the gate: Close waits for it, and it ends after tidyTime.
func (d *Driver) tidy(left []outcome) {
	for _, o := range left {
		d.waiting.ended.Note(o.hold.Nonce)
	}
	d.gate.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, tidyTime)
		defer cancel()
		for _, o := range left {
			if !o.arrived(ctx) {
				return
			}
		}
		for _, o := range left {
			// A removal is repeated until it is answered: it names its attempt, so that doing it twice does nothing
			// more.
			for n := 1; ; n++ {
				_, _, err := d.batch.do(ctx, newStep(redisscript.Cancel, o.keys, o.hold.Value()))
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
