package conformance

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

var identityClauses = []Clause{
	{
		ID: "D13", Group: "core", Slug: "same-request-elsewhere-contends", run: sameRequestElsewhereContends,
		Rule: "a repeated request id returns the same hold through the same client; " +
			"through another client it contends, and its HeldError has SameRequest set",
	},
	{
		ID: "D14", Group: "core", Slug: "release-ends-with-its-context", needs: needLink,
		run: releaseEndsWithItsContext,
		Rule: "Do and Release return within a second of the end of their context, " +
			"whatever the TTL and the network; the release continues",
	},
	{
		ID: "D15", Group: "core", Slug: "grants-that-are-over", run: grantsThatAreOver,
		Rule: "Acquire releases a grant that has expired on arrival, " +
			"and after three of them returns an error that states the reason",
	},
	{
		ID: "D16", Group: "core", Slug: "attempts-have-keys-of-their-own", run: attemptsHaveKeysOfTheirOwn,
		Rule: "each attempt has its own request id, whatever the caller's id, " +
			"so that a late release does not end a later hold",
	},
}

// recording records a driver's acquire requests.
type recording struct {
	backend.Driver

	mu       sync.Mutex // protects the following field
	requests []backend.Request
}

func (d *recording) Unwrap() backend.Driver { return d.Driver }

func (d *recording) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	d.mu.Lock()
	d.requests = append(d.requests, r)
	d.mu.Unlock()
	return d.Driver.Acquire(ctx, r)
}

func (d *recording) asked() []backend.Request {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]backend.Request(nil), d.requests...)
}

func sameRequestElsewhereContends(t *trial) {
	long := func(o *fencelock.Options) { o.TTL = t.long() }
	if t.desc.Capabilities.Has(backend.CapFencing) {
		t.fencing = true
	}
	one, two := t.core(t.client(), long), t.core(t.client(), long)
	name, id := t.name(), fencelock.RequestID(backend.NewRequestID())
	first, err := one.Acquire(t.within(ample), name, id)
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	_, err = two.TryAcquire(t.within(ample), name, id)
	t.meetsItsFormerLife("an attempt with the request id of another client's hold", err, t.Errorf)
	const wait, look = time.Second, 500 * time.Millisecond // after a wait, the core looks for the holder for that time
	for range 3 {
		began := time.Now()
		_, err = two.Acquire(t.within(ample), name, id, fencelock.WaitAtMost(wait))
		held := (*fencelock.HeldError)(nil)
		if !errors.As(err, &held) || held.HoldID != "" || time.Since(began) < wait+look {
			break // otherwise the look may have had no time
		}
	}
	t.meetsItsFormerLife("a wait with the request id of another client's hold", err, t.Latef)
	_, err = two.TryAcquire(t.within(ample), name)
	if held := (*fencelock.HeldError)(nil); !errors.As(err, &held) || held.SameRequest {
		t.Errorf("an attempt with an id of its own = %v, want a *HeldError without SameRequest", err)
	}
	if err := first.Err(); err != nil {
		t.Errorf("the hold, after another client came with its request id = %v", err)
	}
	again, err := one.Acquire(t.within(ample), name, id)
	if err != nil {
		t.Fatalf("the same request through the same client = %v, want the same hold", err)
	}
	if again.Token() != first.Token() {
		t.Errorf("the same request through the same client: token %v, want %v as before", again.Token(), first.Token())
	}
	var lost *fencelock.LostError
	if err := first.Err(); !errors.As(err, &lost) || lost.Reason != fencelock.ReasonReplaced {
		t.Errorf("the earlier lease of the hold = %v, want it lost as replaced", err)
	}
	_ = first.Release(t.within(slack))
	t.mustBeHeld(t.client(), name, "after the release of a lease that was replaced")
	if err := again.Release(t.within(slack)); err != nil {
		t.Errorf("Release = %v", err)
	}
	next, err := two.TryAcquire(t.within(ample), name, id)
	if err != nil {
		t.Fatalf("the same request through another client, after the release = %v, want a grant", err)
	}
	if t.fencing && next.Token() <= first.Token() {
		t.Violatedf("another client's hold with the same request id: token %v after %v", next.Token(), first.Token())
	}
	if err := next.Release(t.within(slack)); err != nil {
		t.Errorf("Release = %v", err)
	}
}

func (t *trial) meetsItsFormerLife(what string, err error, report func(string, ...any)) {
	var held *fencelock.HeldError
	switch {
	case err == nil:
		t.Violatedf("%s was granted", what)
	case !errors.As(err, &held):
		report("%s = %v, want a *HeldError", what, err)
	case !held.SameRequest:
		report("%s = %v, want HeldError.SameRequest to be set", what, err)
	}
}

func releaseEndsWithItsContext(t *trial) {
	const most = time.Second + grace
	d, link := t.linked()
	c := t.core(d, func(o *fencelock.Options) { o.TTL = t.long() })
	names := []string{t.name(), t.name()}
	lease, err := c.Acquire(t.within(ample), names[0])
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var began time.Time
	done := make(chan error, 1)
	go func() {
		defer t.during(ctx, "Do", names[1])()
		done <- c.Do(ctx, names[1], func(context.Context, *fencelock.Lease) error {
			link.Drop(fault.Both)
			began = time.Now()
			cancel()
			return nil
		})
	}()
	select {
	case <-done:
		if took := time.Since(began); took > most {
			t.Latef("Do returned %v after its context ended, over a silent link with a TTL of %v", took, t.long())
		}
	case <-t.within(4 * slack).Done():
		t.Latef("Do has not returned %v after its context ended, over a silent link with a TTL of %v", 4*slack, t.long())
	}
	const limit = 200 * time.Millisecond
	began = time.Now()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = lease.Release(t.within(limit))
	}()
	select {
	case <-ended:
		if took := time.Since(began) - limit; took > most {
			t.Latef("Release returned %v after its context ended, over a silent link with a TTL of %v", took, t.long())
		}
	case <-t.within(4 * slack).Done():
		t.Latef("Release has not returned %v after its context ended, over a silent link with a TTL of %v", 4*slack, t.long())
	}
	link.Pass()
	for _, name := range names {
		t.opensWithin(t.client(), name, 5*slack, "after the link came back")
	}
}

// late returns grants that have already ended.
type late struct {
	recording
}

func (d *late) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	g, err := d.recording.Acquire(ctx, r)
	g.SentAt = g.SentAt.Add(-2 * g.TTL)
	return g, err
}

func grantsThatAreOver(t *trial) {
	d := &late{recording{Driver: t.client()}}
	c := t.core(d, func(o *fencelock.Options) { o.TTL = t.long() })
	name := t.name()
	_, err := c.Acquire(t.within(4*slack), name)
	if err == nil {
		t.Fatalf("Acquire returned a grant that had expired")
	}
	if errors.Is(err, fencelock.ErrHeld) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Acquire whose grants had all expired = %v, want an error that says so", err)
	}
	for _, word := range []string{"SentAt", "TTL"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("Acquire whose grants had all expired = %v, without %s", err, word)
		}
	}
	if n := len(d.asked()); n > 3 {
		t.Errorf("Acquire whose grants had all expired, tried %d times, want three at most", n)
	}
	t.opensWithin(t.client(), name, promptly+slack, "after grants that had expired")
}

func attemptsHaveKeysOfTheirOwn(t *trial) {
	d := &recording{Driver: t.client()}
	c := t.core(d, func(o *fencelock.Options) { o.TTL = t.long() })
	name, id := t.name(), backend.NewRequestID()
	for range 2 {
		lease, err := c.Acquire(t.within(ample), name, fencelock.RequestID(id))
		if err != nil {
			t.Fatalf("Acquire = %v", err)
		}
		if err := lease.Release(t.within(slack)); err != nil {
			t.Errorf("Release = %v", err)
		}
	}
	lease, err := c.Acquire(t.within(ample), name, fencelock.RequestID(id))
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	asked, keys := d.asked(), map[string]bool{}
	for _, r := range asked {
		if r.RequestID == id || keys[r.RequestID] {
			t.Errorf("an attempt used the request id of another attempt, or the caller's id")
		}
		keys[r.RequestID] = true
		if r.HoldID != backend.HoldID(id) {
			t.Errorf("HoldID = %q, want %q, which every client derives from that id", r.HoldID, backend.HoldID(id))
		}
	}
	// Requests of earlier attempts may arrive late.
	for _, r := range asked[:len(asked)-1] {
		if err := d.Release(t.within(slack), r.Grant()); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("a release of an earlier attempt that comes late = %v, want ErrNotHeld", err)
		}
	}
	t.mustBeHeld(t.client(), name, "after late releases of earlier attempts")
	if err := lease.Release(t.within(slack)); err != nil {
		t.Errorf("Release = %v", err)
	}
}
