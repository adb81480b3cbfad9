package redis

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const (
	maxUnknown = 4                // attempts of one call that are tidied up after; later ones replace earlier ones
	tidyTime   = 10 * time.Second // after that the TTL, or the core, does the rest
)

// outcome is an attempt of which it is not known what it left.
type outcome struct {
	keys redisscript.Keys
	hold redisscript.Hold // or place

	left    *step           // if not nil, its end is to be awaited
	drained <-chan struct{} // if not nil, it says when the server has run what was sent, or never will
}

// outcomeOf returns what is not known of the attempt for h whose step ended with f.
func outcomeOf(keys redisscript.Keys, h redisscript.Hold, s *step, f *redisconn.Failure) outcome {
	if f.Left { // the rest of s is a line's, until its end
		return outcome{keys: keys, hold: h, left: s}
	}
	return outcome{keys: keys, hold: h, drained: s.drained}
}

// arrived waits until the server has run what was sent, or never will. It is false if ctx ended.
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

// giveUp starts to tidy up what attempts may have left, and returns err, as ErrUnknown if there are any.
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

// tidy removes in the background what attempts may have left. It waits for a step that is under way, also on a
// connection that has failed, since removing first would leave what comes after, and no two connections keep an order.
// One delivered still later is either handed a lock, and declines it, or holds the lock for one TTL; so is one on a
// connection of a client that is not the driver's own, see New.
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
