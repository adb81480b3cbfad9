package memory

import (
	"context"
	"errors"
	"iter"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Watch yields what happens to a name from now on, or since any revision of the store whose later events are among the
// 4096 kept. It needs no goroutine of its own. Events are read from the store when the loop asks for them, so a loop
// that is slow holds nothing up; one so slow that events of its name are gone meanwhile gets backend.ErrCompacted. A
// since that the store has not reached is backend.ErrInvalidOption.
//
// Holds that ended by Store.Evict are reported as released, with backend.ReasonEvicted as the reason; Store.Wipe ends
// the watch with backend.ErrHistoryLost. If the store cannot be reached when the watch starts, that is its end; later
// it waits for the store to come back and misses nothing.
func (d *Driver) Watch(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		if err := d.watch(ctx, name, since, yield); err != nil {
			yield(backend.Change{}, callError("watch", name, err))
		}
	}
}

// watch returns nil if the loop was left. It does not count as waiting: the body of the loop may call Close.
func (d *Driver) watch(ctx context.Context, name string, since uint64, yield func(backend.Change, error) bool) error {
	bell := make(chan struct{}, 1)
	w := &watch{name: name, push: func() {
		d.net.reply(func() {
			select {
			case bell <- struct{}{}:
			default:
			}
		})
	}}
	defer d.store.unwatch(w)
	for first := true; ; first = false {
		conn := d.net.connection()
		// A message may be delivered late: it has variables of its own.
		var n news
		seen := since
		err := d.look(ctx, func(backend.Instant) { n = d.store.read(d, w, seen) })
		if end := d.alive(ctx); end != nil {
			return end
		}
		// The bell may get lost.
		poll := time.After(d.store.jitter(name, time.Second))
		switch {
		case err == nil && n.err != nil:
			return n.err
		case err == nil:
			for _, e := range n.events {
				if !yield(e, nil) {
					return nil
				}
				if end := d.alive(ctx); end != nil {
					return end
				}
			}
			since = n.upTo
		case first || !errors.Is(err, backend.ErrUnavailable) && !errors.Is(err, backend.ErrUnknown):
			return err
		default:
			if end := d.pause(ctx, poll); end != nil {
				return end
			}
			continue
		}
		if n.more {
			continue
		}
		select {
		case <-bell:
		case <-conn:
		case <-poll:
		case <-ctx.Done():
			return ctx.Err()
		case <-d.gate.Closing().Done():
			return backend.ErrClosed
		}
	}
}
