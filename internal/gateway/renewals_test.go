package gateway

import (
	"context"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// roaming is a service with holds that another replica can renew. Renewals wait until the expected number of them is in
// progress.
type roaming struct {
	keeping
	spares bool            // Expire keeps holds, since another replica has renewed them
	under  *sync.WaitGroup // nil: renewals do not wait
}

func (r *roaming) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	if r.under != nil {
		r.under.Done()
		r.under.Wait()
	}
	return r.keeping.Renew(ctx, grants)
}

func (r *roaming) Expire(ctx context.Context, g backend.Grant) error {
	if r.spares {
		return &backend.NotHeldError{Name: g.Name}
	}
	return r.Release(ctx, g)
}

// Two concurrent renewals of a hold that is new to the replica renew one hold, which lives as long as its client renews
// it.
func TestRenewalsSideBySide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		first, second := &roaming{keeping{store.Driver()}, true, nil}, &roaming{keeping{store.Driver()}, false, nil}
		one, two := newDoor(t, first), newDoor(t, second)
		held := one.granted(one.post(acquireX, `{"ownerId":"a","ttlMillis":5000}`))
		renew := func() {
			if got := two.post("/v1/locks/x/renew", `{"lockToken":"`+held.LockToken+`"}`); got.status != http.StatusOK {
				t.Errorf("a renewal: %d %s", got.status, got.text)
			}
		}
		time.Sleep(time.Second)
		second.under = &sync.WaitGroup{}
		second.under.Add(2)
		var both sync.WaitGroup
		both.Go(renew)
		both.Go(renew)
		both.Wait()
		second.under = nil
		for range 5 {
			time.Sleep(3 * time.Second)
			renew()
		}
		two.refuses(two.post(acquireX, `{"ownerId":"b","ttlMillis":5000}`), http.StatusConflict, codeHeld)
	})
}

// Only the same replica remembers a finished request. Through another replica, the same request acquires again if the
// lock is free, with a greater fencing token, and never if the lock is held.
func TestADoneRequestAtAnotherReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		one := newDoor(t, &roaming{keeping{store.Driver()}, false, nil})
		two := newDoor(t, &roaming{keeping{store.Driver()}, false, nil})
		ask := acquireOf("a", `,"requestId":"req-1"`)
		first := one.granted(one.post(acquireX, ask))
		if same := two.granted(two.post(acquireX, ask)); same.LockToken != first.LockToken {
			t.Errorf("the same request got %+v after %+v", same, first)
		}
		one.is(one.post("/v1/locks/x/release", released(first)), http.StatusOK, `{"status":"RELEASED","lockKey":"x"}`)
		one.refuses(one.post(acquireX, ask), http.StatusConflict, codeDone)
		three := newDoor(t, &roaming{keeping{store.Driver()}, false, nil})
		other := three.granted(three.post(acquireX, acquireOf("b", "")))
		three.refuses(three.post(acquireX, ask), http.StatusConflict, codeHeld)
		three.is(three.post("/v1/locks/x/release", released(other)), http.StatusOK, `{"status":"RELEASED","lockKey":"x"}`)
		again := three.granted(three.post(acquireX, ask))
		if again.LockToken == first.LockToken || again.FencingToken <= other.FencingToken {
			t.Errorf("the request of before got %+v after %+v and %+v", again, first, other)
		}
		three.refuses(three.post("/v1/locks/x/renew", released(first)), http.StatusConflict, codeExpired)
	})
}

// lasting is a service that keeps holds beyond their TTL until Expire ends them. Expire waits for the test.
type lasting struct {
	roaming
	expire chan struct{}
}

func (l *lasting) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	ttl := r.TTL
	r.TTL *= 10
	grant, err := l.keeping.Acquire(ctx, r)
	grant.TTL = ttl
	return grant, err
}

func (l *lasting) Expire(ctx context.Context, g backend.Grant) error {
	<-l.expire
	return l.roaming.Expire(ctx, g)
}

// A renewal that arrives while the replica ends the hold waits until the hold has ended, and fails. Otherwise the hold
// could end after a successful renewal.
func TestARenewalWaitsForTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lasting{roaming{keeping{memory.NewStore(&memory.Options{Clock: backend.GoClock()}).Driver()}, false, nil},
			make(chan struct{})}
		d := newDoor(t, l)
		held := d.granted(d.post(acquireX, `{"ownerId":"a","ttlMillis":5000}`))
		time.Sleep(6 * time.Second)
		answers := make(chan reply, 1)
		go func() { answers <- d.post("/v1/locks/x/renew", released(held)) }()
		synctest.Wait()
		close(l.expire)
		d.refuses(<-answers, http.StatusConflict, codeExpired)
		synctest.Wait()
		d.granted(d.post(acquireX, `{"ownerId":"b","ttlMillis":5000}`))
	})
}

// A hold that a renewal moves here from another replica counts for its client, and may exceed the quota.
func TestHoldsThatComeCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		one := newDoor(t, &roaming{keeping{store.Driver()}, true, nil})
		g, err := New(Options{Driver: &roaming{keeping{store.Driver()}, false, nil}, Key: testKey, Limits: Limits{ClientHolds: 1}})
		if err != nil {
			t.Fatal(err)
		}
		two := &door{t, g}
		x := one.granted(one.post(acquireX, acquireOf("a", "")))
		y := one.granted(one.post("/v1/locks/y/acquire", acquireOf("a", "")))
		for _, l := range []Lock{x, y} {
			if got := two.post("/v1/locks/"+l.LockKey+"/renew", released(l)); got.status != http.StatusOK {
				t.Errorf("a renewal: %d %s", got.status, got.text)
			}
		}
		two.refuses(two.post("/v1/locks/z/acquire", acquireOf("a", "")), http.StatusTooManyRequests, codeQuota)
		for _, l := range []Lock{x, y} {
			two.is(two.post("/v1/locks/"+l.LockKey+"/release", released(l)), 200, `{"status":"RELEASED","lockKey":"`+l.LockKey+`"}`)
		}
		two.granted(two.post("/v1/locks/z/acquire", acquireOf("a", "")))
	})
}
