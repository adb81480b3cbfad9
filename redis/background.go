package redis

import (
	"context"
	"time"

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

	underway <-chan struct{} // if not nil, it says when the server has run what was sent, or never will
}

// underway returns what outcome.underway is for a step that ended with f.
func (s *step) underway(f *redisconn.Failure) <-chan struct{} {
	if f.Left { // the rest of s is a flight's
		return s.done
	}
	return s.drained
}

// tidy removes in the background what attempts may have left. It waits for a step that is under way, since removing
// first would leave what comes after, and no two connections keep an order; one delivered still later is either handed a lock, and declines it, or holds the
// lock for one TTL.
func (d *Driver) tidy(left []outcome) {
	for _, o := range left {
		d.waiting.abandon(o.hold.Nonce)
	}
	d.gate.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, tidyTime)
		defer cancel()
		for _, o := range left {
			if o.underway != nil {
				select {
				case <-o.underway:
				case <-ctx.Done():
					return
				}
			}
		}
		for _, o := range left {
			for n := 1; ; n++ {
				s := newStep(redisscript.Cancel, o.keys, o.hold.Value())
				err := d.batch.do(ctx, s)
				if err == nil {
					s.free()
					break
				}
				if redisconn.FailureOf(err).Fatal || !redisconn.Pause(ctx, n) {
					return
				}
			}
		}
	})
}
