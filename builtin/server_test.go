package builtin_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
)

// These tests check a real server beyond the clauses of the conformance suite.

func attached(t *testing.T, n *node) *builtin.Driver {
	d := builtin.Attach(n.attach, nil)
	t.Cleanup(func() { _ = d.Close(context.Background()) })
	return d
}

func request(name string, ttl time.Duration) backend.Request {
	return backend.Request{Name: name, Owner: "test", RequestID: backend.NewRequestID(), TTL: ttl}
}

func take(t *testing.T, d *builtin.Driver, r backend.Request) backend.Grant {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	g, err := d.Acquire(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}

func TestExtendMovesAHold(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d, other := attached(t, n), attached(t, n)
	r := request("x", 20*time.Second)
	r.Lost = func(loss backend.Loss) { t.Errorf("the hold was lost: %v", loss.Reason) }
	g := take(t, d, r)
	longer := g
	longer.TTL = time.Minute
	renewal := d.Renew(t.Context(), []backend.Grant{longer})[0]
	if renewal.Err != nil || renewal.TTL != time.Minute || renewal.SentAt < g.SentAt {
		t.Fatalf("renewal with another TTL: %+v", renewal)
	}
	info, err := other.Look(t.Context(), "x")
	if err != nil || len(info.Holders) != 1 || info.Holders[0].Token != g.Token || info.Holders[0].ExpiresIn < 30*time.Second {
		t.Errorf("the holder is %+v, %v; want the same token and the long TTL", info, err)
	}
	if err := d.Renew(t.Context(), []backend.Grant{longer})[0].Err; err != nil {
		t.Errorf("renewal on the new session: %v", err)
	}
	// A renewal for a shorter TTL does not shorten the hold.
	renewal = d.Renew(t.Context(), []backend.Grant{g})[0]
	if renewal.Err != nil || renewal.TTL != g.TTL {
		t.Errorf("renewal with less than before: %+v", renewal)
	}
	if info, err := other.Look(t.Context(), "x"); err != nil || len(info.Holders) != 1 || info.Holders[0].ExpiresIn < 30*time.Second {
		t.Errorf("after a renewal with less the holder is %+v, %v; want it for the longer time", info, err)
	}
	if err := d.Release(t.Context(), longer); err != nil {
		t.Errorf("release: %v", err)
	}
	if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("renewal with the first TTL after the release: %v, want ErrNotHeld", err)
	}
	if _, err := other.Acquire(t.Context(), request("x", time.Minute)); err != nil {
		t.Errorf("a renewal of what was released made a hold: %v", err)
	}
}

// The same request from another client takes over the hold, and the first client is notified.
func TestRequestOfAnotherClient(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	a, b, c := attached(t, n), attached(t, n), attached(t, n)
	told := make(chan backend.Reason, 8)
	r := request("x", time.Minute)
	r.Lost = func(loss backend.Loss) { told <- loss.Reason }
	first := take(t, a, r)
	again := r
	again.Lost = nil
	second := take(t, b, again)
	if second.Token != first.Token {
		t.Errorf("token %v, want %v as before", second.Token, first.Token)
	}
	select {
	case reason := <-told:
		if reason != backend.ReasonEvicted {
			t.Errorf("reason %q", reason)
		}
	case <-time.After(patience):
		t.Error("the first client was not notified that another client has its hold")
	}
	if err := b.Release(t.Context(), second); err != nil {
		t.Errorf("release: %v", err)
	}
	take(t, c, request("x", time.Minute))
}

func TestForceReleaseReachesTheLease(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	locks, err := fencelock.ForCorrectness(attached(t, n), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer locks.Close(context.Background())
	lease, err := locks.Acquire(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	if err := attached(t, n).ForceRelease(t.Context(), backend.ForceRequest{Name: "x", Reason: "maintenance"}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-lease.Context().Done():
	case <-time.After(patience):
		t.Fatal("the lease lives on")
	}
	var lost *fencelock.LostError
	if !errors.As(context.Cause(lease.Context()), &lost) || lost.Reason != fencelock.ReasonForceReleased {
		t.Errorf("the cause is %v, want that it was force-released", context.Cause(lease.Context()))
	}
}

// A slow consumer gets all events, as long as the server keeps them.
func TestSlowWatcherMissesNothing(t *testing.T) {
	t.Parallel()
	n := startNodeIn(t, "") // without a disk, so that it is fast
	d := attached(t, n)
	const rounds = 2200 // two events each: more than the driver keeps for a slow caller, fewer than the server keeps
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	info, err := d.Look(ctx, "x")
	if err != nil || info.Revision == 0 {
		t.Fatalf("the first look shows %+v, %v; want a revision from which to watch", info, err)
	}
	var done atomic.Bool
	worker := attached(t, n)
	go func() {
		defer done.Store(true)
		for range rounds {
			g, err := worker.Acquire(ctx, request("x", time.Minute))
			if err == nil {
				err = worker.Release(ctx, g)
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	}()
	events, want := 0, backend.ChangeAcquired
	var last uint64
	for e, err := range d.Watch(ctx, "x", info.Revision) {
		if err != nil {
			t.Fatalf("after %d events: %v", events, err)
		}
		if events == 0 {
			eventually(t, "all is done while one event is looked at", done.Load)
		}
		if e.Type != want || e.Revision <= last {
			t.Fatalf("event %d is %+v after revision %d, want %v", events, e, last, want)
		}
		want = map[backend.ChangeType]backend.ChangeType{
			backend.ChangeAcquired: backend.ChangeReleased, backend.ChangeReleased: backend.ChangeAcquired,
		}[want]
		last = e.Revision
		if events++; events == 2*rounds {
			break
		}
	}
	if events != 2*rounds {
		t.Errorf("%d events, want %d", events, 2*rounds)
	}
}

// A watch continues across a restart of the server, without a gap.
func TestWatchSurvivesARestart(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d, worker := attached(t, n), attached(t, n)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	seen := make(chan backend.Change, 64)
	go func() {
		defer close(seen)
		for e, err := range d.Watch(ctx, "x", 0) {
			if err != nil {
				return
			}
			seen <- e
		}
	}()
	var g backend.Grant
	for len(seen) == 0 { // a watch does not report its beginning
		g = take(t, worker, request("x", time.Minute))
		if err := worker.Release(ctx, g); err != nil {
			t.Fatal(err)
		}
	}
	n.stop(t)
	n.start(t)
	final := request("x", time.Minute)
	final.Owner = "after the restart"
	var err error
	eventually(t, "the server takes locks again", func() bool {
		_, err = worker.Acquire(ctx, final)
		return err == nil
	})
	var last uint64
	for e := range seen {
		if e.Revision <= last {
			t.Errorf("revision %d after %d", e.Revision, last)
		}
		if last = e.Revision; e.Owner == final.Owner {
			return
		}
	}
	t.Error("the watch ended before the changes after the restart")
}

func TestTTLIsTheServersMatter(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d := builtin.New([]string{n.addr()}, nil)
	defer d.Close(context.Background())
	r := request("x", 48*time.Hour) // within the bound that the driver applies before it knows the server
	if _, err := d.Acquire(t.Context(), r); !errors.Is(err, backend.ErrInvalidTTL) {
		t.Errorf("TTL beyond the server's bounds: %v, want ErrInvalidTTL", err)
	}
	if d.Describe().MaxTTL != time.Hour || d.Describe().TokenSpace == "" {
		t.Errorf("Describe = %+v after the first contact", d.Describe())
	}
	if err := d.Describe().ValidateTTL(r.TTL); !errors.Is(err, backend.ErrInvalidTTL) {
		t.Errorf("the driver does not know better now: %v", err)
	}
}

// Many callers share one stream.
func TestManyCallers(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d := builtin.New([]string{n.addr()}, nil)
	defer d.Close(context.Background())
	const callers, rounds = 64, 20
	errs := make(chan error, callers)
	for i := range callers {
		go func() {
			errs <- func() error {
				for range rounds {
					r := request(fmt.Sprintf("x/%d", i%8), time.Minute)
					r.Wait = true
					g, err := d.Acquire(t.Context(), r)
					if err == nil {
						err = d.Release(t.Context(), g)
					}
					if err != nil {
						return err
					}
				}
				return nil
			}()
		}()
	}
	for range callers {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// A client cannot expire a hold that has moved to another client.
func TestExpireSparesMovedHolds(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	one, two := attached(t, n), attached(t, n)
	g := take(t, one, request("x", 10*time.Second))
	if r := two.Renew(t.Context(), []backend.Grant{g})[0]; r.Err != nil {
		t.Fatal(r.Err)
	}
	if err := one.Expire(t.Context(), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("expiry of what has wandered: %v", err)
	}
	if s, err := two.Look(t.Context(), "x"); err != nil || !s.Held {
		t.Fatalf("after an expiry elsewhere: %+v, %v", s, err)
	}
	if err := two.Expire(t.Context(), g); err != nil {
		t.Errorf("expiry: %v", err)
	}
	if s, err := two.Look(t.Context(), "x"); err != nil || s.Held {
		t.Errorf("after the expiry: %+v, %v", s, err)
	}
	if err := two.Expire(t.Context(), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("expiry of what is over: %v", err)
	}
}
