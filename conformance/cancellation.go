package conformance

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

var cancellationClauses = []Clause{
	{
		ID: "C1", Group: "cancellation", Slug: "ended-context-leaves-no-trace", run: endedContextLeavesNoTrace,
		Rule: "a call with an ended context returns that context's error and has no effect",
	},
	{
		ID: "C2", Group: "cancellation", Slug: "waiter-returns-with-its-context", run: waiterReturnsWithItsContext,
		Rule: "a waiter returns when its context is cancelled or its deadline passes, with the context's error in the chain",
	},
	{
		ID: "C3", Group: "cancellation", Slug: "cancelled-waiter-leaves-the-queue",
		run: cancelledWaiterLeavesTheQueue,
		Rule: "500 ms after its context ended, a waiter has left the queue: " +
			"the waiters behind it acquire the lock without delay",
	},
	{
		ID: "C4", Group: "cancellation", Slug: "cancel-races-with-grant", run: cancelRacesWithGrant,
		Rule: "if the context ends at the moment of the grant, Acquire either reports the hold or leaves no hold",
	},
	{
		ID: "C5", Group: "cancellation", Slug: "silence-ends-with-the-context", needs: needLink,
		run:  silenceEndsWithTheContext,
		Rule: "while the network does not respond, every method returns when its context ends",
	},
}

// grace bounds the time for which a method may go on after its context ended: the contract says 50 ms, and machines
// are busy. A method that ignores the context is far later.
const grace = time.Second

func endedContextLeavesNoTrace(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for _, wait := range []bool{false, true} {
		r := t.request(name)
		r.Wait = wait
		if _, err := a.Acquire(ended, r); !errors.Is(err, context.Canceled) || errors.Is(err, backend.ErrHeld) {
			t.Errorf("acquire (wait %v) with an ended context = %v, want context.Canceled", wait, err)
		}
	}
	pause(t.Context(), 50*time.Millisecond)
	t.mustBeFree(b, name, "after acquires with an ended context")
	g := t.take(a, t.request(name), "of a free name")
	if r := t.renewIn(ended, a, g); !errors.Is(r.Err, context.Canceled) || errors.Is(r.Err, backend.ErrNotHeld) {
		t.Errorf("renewal with an ended context = %v, want context.Canceled", r.Err)
	}
	t.mustBeHeld(b, name, "after a renewal with an ended context")
	t.release(a, g, "by the holder")
}

func waiterReturnsWithItsContext(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	for _, kind := range []error{context.Canceled, context.DeadlineExceeded} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if errors.Is(kind, context.Canceled) {
			cancel()
			ctx, cancel = context.WithCancel(t.Context())
			time.AfterFunc(200*time.Millisecond, cancel)
		}
		r := t.request(name)
		r.Wait = true
		_, err := b.Acquire(ctx, r)
		cancel()
		if !errors.Is(err, kind) || errors.Is(err, backend.ErrHeld) {
			t.Errorf("waiter whose context ended = %v, want %v in the chain", err, kind)
		}
	}
	began := time.Now()
	ctx := t.within(300 * time.Millisecond)
	r := t.request(name)
	r.Wait = true
	if _, err := b.Acquire(ctx, r); err == nil {
		t.Errorf("a waiter was granted a name that another request holds")
	}
	if late := time.Since(began) - 300*time.Millisecond; late > grace {
		t.Latef("a waiter returned %v after its context ended", late)
	}
	t.release(a, g, "by the holder")
}

func cancelledWaiterLeavesTheQueue(t *trial) {
	a, b, c := t.client(), t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cancelled := t.wait(ctx, b, t.request(name))
	t.queued(a, name, 1)
	behind := t.wait(t.within(20*slack), c, t.request(name))
	t.queued(a, name, 2)
	cancel()
	if !cancelled.ended(slack) {
		t.FatalLatef("a cancelled waiter did not return")
	}
	if cancelled.err == nil {
		t.Fatal("a cancelled waiter was granted a name that another request holds")
	}
	pause(t.Context(), 500*time.Millisecond)
	if inspector, ok := backend.As[backend.Inspector](a); ok && t.desc.Capabilities.Has(backend.CapInspect) {
		if info, err := inspector.Look(t.within(slack), name); err == nil && info.Waiters > 1 {
			t.Latef("%d waiters are queued 500 ms after one of two was cancelled", info.Waiters)
		}
	}
	t.release(a, g, "by the holder")
	next := t.got(behind, promptly, "behind a cancelled waiter")
	t.release(c, next, "by the waiter behind")
	t.mustBeFree(a, name, "after the last waiter")
}

func cancelRacesWithGrant(t *trial) {
	const rounds = 200
	a, b := t.client(), t.client()
	name := t.name()
	granted := 0
	g := t.take(a, t.request(name), "of a free name")
	began := time.Now()
	for range rounds {
		if time.Since(began) > 5*slack { // a slow machine runs fewer rounds
			break
		}
		ctx, cancel := context.WithCancel(t.Context())
		r := t.request(name)
		w := t.wait(ctx, b, r)
		pause(t.Context(), rand.N(2*time.Millisecond))
		go func() {
			pause(t.Context(), rand.N(time.Millisecond))
			cancel()
		}()
		t.release(a, g, "while the waiter is cancelled")
		<-w.done
		cancel()
		if w.err == nil {
			granted++
			t.release(b, w.grant, "by the waiter that was granted the lock")
		} else if !errors.Is(w.err, context.Canceled) {
			t.Errorf("cancelled waiter = %v, want context.Canceled", w.err)
		}
		t.releaseUnknown(b, w.err, r)
		// A cancelled request may still be in flight, and is removed once it has arrived: now, or behind this hold.
		var ok bool
		if g, ok = t.takenWithin(a, name, promptly, "after a cancel that raced with the grant"); !ok {
			return
		}
	}
	t.release(a, g, "after the last round")
	t.Logf("%d of %d waiters were granted the lock", granted, rounds)
}

func silenceEndsWithTheContext(t *trial) {
	// Short TTLs, since delayed messages still arrive later.
	for what, call := range map[string]func(ctx context.Context, d backend.Driver, g backend.Grant) error{
		"Acquire": func(ctx context.Context, d backend.Driver, _ backend.Grant) error {
			_, err := d.Acquire(ctx, t.brief(t.name()))
			return err
		},
		"Acquire with Wait": func(ctx context.Context, d backend.Driver, _ backend.Grant) error {
			r := t.brief(t.name())
			r.Wait = true
			_, err := d.Acquire(ctx, r)
			return err
		},
		"Renew": func(ctx context.Context, d backend.Driver, g backend.Grant) error {
			return t.renewIn(ctx, d, g).Err
		},
		"Release": func(ctx context.Context, d backend.Driver, g backend.Grant) error { return d.Release(ctx, g) },
	} {
		d, link := t.linked()
		g := t.take(d, t.brief(t.name()), "of a free name")
		link.Hold(fault.Both)
		const bound = 200 * time.Millisecond
		ctx, cancel := context.WithTimeout(t.Context(), bound)
		began := time.Now()
		err := call(ctx, d, g)
		if late := time.Since(began) - bound; late > grace {
			t.Latef("%s returned %v after its context ended", what, late)
		}
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s over a silent link = %v, want context.DeadlineExceeded in the chain", what, err)
		}
		if errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("%s over a silent link = %v, which the driver cannot know", what, err)
		}
		began = time.Now()
		if _ = closeWithin(d, bound); time.Since(began) > bound+grace {
			t.Latef("Close returned %v after its context ended, over a silent link", time.Since(began)-bound)
		}
	}
}
