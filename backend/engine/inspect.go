package engine

import (
	"cmp"
	"context"
	"errors"
	"iter"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Look is backend.Inspector's.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	s, err := read(ctx, d, func(ctx context.Context, from Inspector) (backend.State, error) {
		return from.Look(ctx, name)
	})
	return s, d.callError(verbLook, name, err)
}

// read is one read-only exchange, with the part T of the service.
func read[T, A any](ctx context.Context, d *Driver, step func(context.Context, T) (A, error)) (answer A, err error) {
	part, ok := d.service.(T)
	if !ok {
		return answer, backend.ErrUnsupported
	}
	if err := d.begin(ctx); err != nil {
		return answer, err
	}
	defer d.gate.Leave()
	answer, _, _, err = hedged(ctx, d, func(ctx context.Context, _ bool) (A, error) { return step(ctx, part) })
	return answer, d.readError(ctx, err)
}

// List is backend.Lister's. It reads page by page, and does not call the driver while the loop's body runs.
func (d *Driver) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return ListAfter(ctx, d, prefix, "")
}

// ListAfter is backend.Pager's, for drivers over a service whose pages begin after a name. It is not a method, since a
// Driver over other services is not a backend.Pager.
func ListAfter(ctx context.Context, d *Driver, prefix, first string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		seen := map[string]bool{} // a name may move from one page to the next
		for after := first; ; {
			var next string
			page, err := read(ctx, d, func(ctx context.Context, from Inspector) (page []backend.State, err error) {
				page, next, err = from.Names(ctx, prefix, after)
				return page, err
			})
			if err != nil {
				yield(backend.State{}, d.callError(verbList, prefix, err))
				return
			}
			for _, s := range page {
				if s.Held && !seen[s.Name] && !yield(s, nil) {
					return
				}
				seen[s.Name] = true
			}
			if after = next; after == "" {
				return
			}
		}
	}
}

// ForceRelease is backend.ForceReleaser's.
func (d *Driver) ForceRelease(ctx context.Context, r backend.ForceRequest) error {
	return d.callError(verbForce, r.Name, d.force(ctx, r))
}

func (d *Driver) force(ctx context.Context, r backend.ForceRequest) error {
	forcer, ok := d.service.(Forcer)
	if !ok {
		return backend.ErrUnsupported
	}
	if err := kit.ValidateForce(d.Describe(), &r); err != nil {
		return err
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	n, _, err := exchange(ctx, d, func(ctx context.Context) (int, error) { return forcer.Force(ctx, r) })
	if err == nil && n == 0 {
		err = &backend.NotHeldError{Name: r.Name}
	} else if err == nil {
		d.settleIn(r.Name, lookInterval)
	}
	return err
}

// Watch is backend.Watcher's. It has no goroutine: changes are read when the loop asks for them.
func (d *Driver) Watch(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		if err := d.watch(ctx, name, since, yield); err != nil {
			yield(backend.Change{}, d.callError(verbWatch, name, err))
		}
	}
}

// watch returns nil if the loop was left. It is not counted in while the body of the loop runs, which may call Close.
//
// It reads when it is woken, and once in lookInterval or as often as the feed says. A service that cannot be reached
// ends the watch if it was never reached.
func (d *Driver) watch(ctx context.Context, name string, since uint64, yield func(backend.Change, error) bool) error {
	if changes, ok := d.service.(Changes); ok {
		return d.follow(ctx, changes, name, since, yield)
	}
	feeds, ok := d.service.(Feeds)
	if !ok {
		return backend.ErrUnsupported
	}
	woken := make(chan struct{}, 1)
	feed := feeds.Feed(name, func() { wake(woken) })
	defer feed.Stop()
	every := lookInterval
	if polled, ok := feed.(Polled); ok {
		every = polled.Every()
	}
	w := &waiter{d: d, woken: woken, first: &backend.Request{TTL: 3 * every}}
	last := since
	for first := true; ; first = false {
		since := last // an exchange may outlive the loop
		changes, err := read(ctx, d, func(ctx context.Context, _ Feeds) ([]backend.Change, error) {
			return feed.Read(ctx, since)
		})
		if ended := d.ended(ctx); ended != nil {
			return ended
		}
		if err != nil && (first || !errors.Is(err, backend.ErrUnavailable)) {
			return err
		}
		for _, c := range changes {
			if !yield(c, nil) {
				return nil
			}
			last = c.Revision
			if ended := d.ended(ctx); ended != nil {
				return ended
			}
		}
		if err := w.wait(ctx, &attempt{}, Position{}); err != nil {
			return err
		}
	}
}

// follow is watch for a service that sends changes as they happen. The call is counted in while it waits for them.
func (d *Driver) follow(
	ctx context.Context, changes Changes, name string, since uint64, yield func(backend.Change, error) bool,
) error {
	if err := backend.ValidateName(name); err != nil {
		return err
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	inside := true
	defer func() {
		if inside {
			d.gate.Leave()
		}
	}()
	bound, free := d.gate.Bind(ctx)
	defer free()
	for change, err := range changes.Changes(bound, name, since) {
		if ended := d.ended(ctx); ended != nil {
			return ended
		}
		if err != nil {
			return d.readError(ctx, d.stepError(bound, err))
		}
		inside = false
		d.gate.Leave()
		if !yield(change, nil) {
			return nil
		}
		if err := d.begin(ctx); err != nil {
			return err
		}
		inside = true
	}
	return cmp.Or(d.ended(ctx), backend.ErrUnavailable)
}
