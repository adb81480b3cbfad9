package conformance

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

// besideClauses require that no call of a client delays another call.
var besideClauses = []Clause{
	{
		ID: "C6", Group: "cancellation", Slug: "a-wait-holds-nobody-up", run: aWaitHoldsNobodyUp,
		Rule: "while acquires of a client wait, every other method of the same client returns promptly",
	},
	{
		ID: "C7", Group: "cancellation", Slug: "a-call-that-hangs-holds-nobody-up", needs: needLink,
		run: aCallThatHangsHoldsNobodyUp,
		Rule: "while one call of a client hangs on a link that does not respond, " +
			"every other method of the same client returns when its own context ends",
	},
}

// methods returns a call of every method of d that works without other calls. The grant is a valid hold of d; the
// calls' own holds have the short TTL.
func (t *trial) methods(d backend.Driver, g backend.Grant) map[string]func(context.Context) error {
	acquire := func(ctx context.Context, wait bool) (backend.Grant, error) {
		r := t.brief(t.name())
		r.Wait = wait
		return d.Acquire(ctx, r)
	}
	calls := map[string]func(context.Context) error{
		"Acquire without Wait": func(ctx context.Context) error {
			_, err := acquire(ctx, false)
			return err
		},
		"Acquire with Wait": func(ctx context.Context) error {
			_, err := acquire(ctx, true)
			return err
		},
		"Renew": func(ctx context.Context) error { return t.renewIn(ctx, d, g).Err },
		"Acquire and Release": func(ctx context.Context) error {
			got, err := acquire(ctx, false)
			return errors.Join(err, d.Release(ctx, got))
		},
		"Release of what is not held": func(ctx context.Context) error {
			if err := d.Release(ctx, t.request(g.Name).Grant()); !errors.Is(err, backend.ErrNotHeld) {
				return err
			}
			return nil
		},
	}
	caps := t.desc.Capabilities
	if p, ok := backend.As[backend.Pinger](d); ok {
		calls["Ping"] = p.Ping
	}
	if i, ok := backend.As[backend.Inspector](d); ok && caps.Has(backend.CapInspect) {
		calls["Look"] = func(ctx context.Context) error {
			_, err := i.Look(ctx, g.Name)
			return err
		}
	}
	if l, ok := backend.As[backend.Lister](d); ok && caps.Has(backend.CapList) {
		calls["List"] = func(ctx context.Context) error {
			for _, err := range l.List(ctx, g.Name) {
				return err
			}
			return ctx.Err()
		}
	}
	if f, ok := backend.As[backend.ForceReleaser](d); ok && caps.Has(backend.CapForceRelease) {
		calls["ForceRelease of a free name"] = func(ctx context.Context) error {
			err := f.ForceRelease(ctx, backend.ForceRequest{Name: t.name(), Reason: "conformance"})
			if errors.Is(err, backend.ErrNotHeld) {
				return nil
			}
			return err
		}
	}
	if m, ok := backend.As[backend.MultiAcquirer](d); ok && caps.Has(backend.CapMultiAcquire) {
		calls["AcquireAll"] = func(ctx context.Context) error {
			_, err := m.AcquireAll(ctx, []backend.Request{t.brief(t.name()), t.brief(t.name())})
			return err
		}
	}
	return calls
}

func aWaitHoldsNobodyUp(t *trial) {
	d, other := t.client(), t.client()
	name := t.name()
	front := t.take(other, t.request(name), "of a free name")
	mine := t.take(d, t.request(t.name()), "of a free name")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	const waiters = 3
	for range waiters {
		t.wait(ctx, d, t.request(name))
	}
	t.queued(other, name, waiters)
	var all sync.WaitGroup
	for what, call := range t.methods(d, mine) {
		all.Go(func() {
			if err := call(t.within(ample)); err != nil {
				t.Errorf("%s while acquires of the same client wait = %v", what, err)
			}
		})
	}
	if !endWithin(&all, ample+slack) {
		t.FatalLatef("calls did not return while acquires of the same client wait: %s", t.underWay())
	}
	cancel()
	t.release(d, mine, "by the client whose acquires waited")
	t.release(other, front, "by the holder")
}

// endWithin reports whether all ends within d.
func endWithin(all *sync.WaitGroup, d time.Duration) bool {
	ended := make(chan struct{})
	go func() {
		all.Wait()
		close(ended)
	}()
	return (&waiter{done: ended}).ended(d)
}

func aCallThatHangsHoldsNobodyUp(t *trial) {
	const bound = 200 * time.Millisecond
	var clients sync.WaitGroup
	for _, hanging := range []string{"Acquire without Wait", "Acquire with Wait", "Renew", "Release", "Look"} {
		d, link := t.linked()
		kept, leaves := t.take(d, t.brief(t.name()), "of a free name"), t.take(d, t.brief(t.name()), "of a free name")
		clients.Go(func() {
			calls := t.methods(d, kept)
			hang := calls[hanging]
			if hanging == "Release" {
				hang = func(ctx context.Context) error { return d.Release(ctx, leaves) }
			}
			if hang == nil {
				return
			}
			link.Hold(fault.Both)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var hung, all sync.WaitGroup
			hung.Go(func() { _ = hang(ctx) })
			pause(ctx, bound/4)
			for what, call := range calls {
				all.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), bound)
					defer cancel()
					began := time.Now()
					_ = call(ctx)
					if late := time.Since(began) - bound; late > grace {
						t.Latef("%s returned %v after its context ended, while %s of the same client hangs", what, late, hanging)
					}
				})
			}
			if !endWithin(&all, bound+slack) {
				t.Latef("calls did not return with their contexts while %s of the same client hangs: %s", hanging,
					t.underWay())
			}
			cancel()
			hung.Wait()
		})
	}
	clients.Wait()
}
