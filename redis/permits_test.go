package redis

import (
	"context"
	"errors"
	mathrand "math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testtier"
)

// Permits are granted up to the limit, and the first waiter is served first, however many permits it wants.
func TestPermits(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	a, b := s.open(t), s.open(t)
	two := mustAcquire(t, a, taking(request("n", time.Minute, false), 2, 4))
	one := mustAcquire(t, b, taking(request("n", time.Minute, true), 1, 4))
	if two.Permits != 2 || two.Limit != 4 || two.Kind != backend.KindPermits {
		t.Errorf("grant: %+v", two)
	}
	_, err := b.Acquire(within(t, 30*time.Second), taking(request("n", time.Minute, false), 2, 4))
	var refused *backend.HeldError
	if !errors.As(err, &refused) || refused.Holder != "test/n" || refused.RetryAfter <= 0 ||
		refused.RetryAfter > time.Minute {
		t.Errorf("too many: %v", err)
	}
	big := inLine(t, a, b, taking(request("n", time.Minute, true), 4, 4), 1)
	held(t, a, taking(request("n", time.Minute, false), 1, 4), "a small request that would pass a big one")
	small := inLine(t, a, a, taking(request("n", time.Minute, true), 1, 4), 2)
	small2 := inLine(t, a, b, taking(request("n", time.Minute, true), 3, 4), 3)
	last := inLine(t, a, b, taking(request("n", time.Minute, true), 1, 4), 4)
	mustRelease(t, a, two)
	held(t, a, taking(request("n", time.Minute, false), 1, 4), "some are free, and a big request waits for them")
	mustRelease(t, b, one)
	g := <-big
	mustRelease(t, b, g)
	g1, g2 := <-small, <-small2
	info, err := a.Look(within(t, 30*time.Second), "n")
	if err != nil || len(info.Holders) != 2 || info.Holders[0].Permits+info.Holders[1].Permits != 4 ||
		info.Waiters != 1 {
		t.Errorf("1 and 3 of 4, and one waits: %+v, %v", info, err)
	}
	notYet(t, last, "more permits than there are")
	mustRelease(t, a, g1)
	mustRelease(t, b, <-last)
	if err := a.Release(within(t, 30*time.Second), g1); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("second release: %v", err)
	}
	mustRelease(t, b, g2)
	nothingLeft(t, s)
}

// The permits of a dead holder are free after its TTL, for a waiter and for an attempt.
func TestHolderOfPermitsDies(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	a, b := s.open(t), s.open(t)
	const ttl = 500 * time.Millisecond
	living := mustAcquire(t, a, taking(request("n", time.Minute, false), 1, 3))
	for _, wait := range []bool{true, false} {
		dead := mustAcquire(t, b, taking(request("n", ttl, false), 2, 3))
		var g backend.Grant
		if wait {
			g = mustAcquire(t, a, taking(request("n", time.Minute, true), 2, 3))
		} else {
			eventually(t, "the permits come back", func() (ok bool) {
				var err error
				g, err = a.Acquire(within(t, 30*time.Second), taking(request("n", time.Minute, false), 2, 3))
				return err == nil
			})
		}
		if now := backend.SystemClock().Now(); now < dead.SentAt.Add(ttl) {
			t.Errorf("wait %v: granted %v before the end of the first hold", wait, dead.SentAt.Add(ttl).Sub(now))
		}
		if answer := b.Renew(
			within(t, 30*time.Second), []backend.Grant{dead},
		)[0]; !errors.Is(answer.Err, backend.ErrNotHeld) {
			t.Errorf("wait %v: renewed under a rival: %v", wait, answer.Err)
		}
		mustRelease(t, a, g)
	}
	if answer := a.Renew(within(t, 30*time.Second), []backend.Grant{living})[0]; answer.Err != nil {
		t.Error(answer.Err)
	}
	mustRelease(t, a, living)
	nothingLeft(t, s)
}

// A name has one kind and limit while it has holders or waiters, and is free for any other use afterwards.
func TestKindsDoNotMix(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, other := s.open(t), s.open(t)
	writer := func() backend.Request { return request("n", time.Minute, false) }
	reader := func() backend.Request { return reading(request("n", time.Minute, false)) }
	permit := func(limit int) backend.Request { return taking(request("n", time.Minute, false), 1, limit) }

	g := mustAcquire(t, d, permit(1))
	for _, queue := range []bool{false, true} {
		var next <-chan backend.Grant
		if queue {
			next = inLine(t, d, other, permit(1), 1)
		}
		mismatched(t, other, writer(), "a writer beside permits")
		mismatched(t, other, reader(), "a reader beside permits")
		mismatched(t, other, permit(2), "another limit")
		again := writer()
		again.Fresh = false
		mismatched(t, other, again, "a writer that may have been here")
		mustRelease(t, d, g)
		if queue {
			g = <-next
			mustRelease(t, other, g)
		}
		g = mustAcquire(t, d, permit(1))
	}
	mustRelease(t, d, g)

	for _, first := range []backend.Request{writer(), reader()} {
		g := mustAcquire(t, d, first)
		mismatched(t, other, permit(3), "permits beside "+first.Kind.String())
		next := inLine(t, d, other, writer(), 1)
		mismatched(t, other, permit(3), "permits beside a waiter and "+first.Kind.String())
		mustRelease(t, d, g)
		mustRelease(t, other, <-next)
		mustRelease(t, d, mustAcquire(t, d, permit(3)))
	}
	nothingLeft(t, s)

	// Dead clients do not count.
	mustAcquire(t, other, taking(request("n", 200*time.Millisecond, false), 1, 5))
	eventually(t, "the name is free for another use", func() bool {
		g, err := d.Acquire(within(t, 30*time.Second), writer())
		if err != nil {
			if !errors.Is(err, backend.ErrLimitMismatch) {
				t.Error(err)
			}
			return false
		}
		mustRelease(t, d, g)
		return true
	})
	k := redisscript.KeysOf("fencelock:", "n")
	ghost := redisscript.Hold{
		PX: time.Minute, Permits: 1, Limit: 5, Client: "ghost", Nonce: "1", Request: "r", Owner: "o",
	}
	push := `redis.call('ZADD', KEYS[1], 0, '#', 1, ARGV[1])`
	for _, r := range []backend.Request{writer(), reader(), permit(2)} {
		for _, wait := range []bool{false, true} {
			if err := s.admin(t).Eval(context.Background(), push, []string{k.Queue}, ghost.Value()).Err(); err != nil &&
				err.Error() != "redis: nil" {
				t.Fatal(err)
			}
			r.Wait, r.RequestID = wait, backend.NewRequestID()
			mustRelease(t, d, mustAcquire(t, d, r))
		}
	}
	nothingLeft(t, s)
}

// Clients with different uses of a name race for it: the first one decides the use, and all holders have that use.
func TestMismatchRace(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	var drivers []*Driver
	for range 4 {
		drivers = append(drivers, s.open(t))
	}
	var mu sync.Mutex
	users := map[string]int{} // of the name, by use
	enter := func(use string, by int) {
		mu.Lock()
		defer mu.Unlock()
		users[use] += by
		for other, n := range users {
			if other != use && n > 0 && by > 0 {
				t.Errorf("used as %s and as %s at once", use, other)
			}
		}
	}
	uses := map[string]func(backend.Request) backend.Request{
		"lock":      func(r backend.Request) backend.Request { return r },
		"permits/2": func(r backend.Request) backend.Request { return taking(r, 1, 2) },
		"permits/3": func(r backend.Request) backend.Request { return taking(r, 2, 3) },
	}
	var mismatches, grants atomic.Int64
	var wg sync.WaitGroup
	for use, kind := range uses {
		for i, d := range drivers {
			wg.Go(func() {
				for range 50 {
					g, err := d.Acquire(within(t, 30*time.Second), kind(request("n", time.Minute, i%2 == 0)))
					switch {
					case err == nil:
						grants.Add(1)
						enter(use, 1)
						enter(use, -1)
						mustRelease(t, d, g)
					case errors.Is(err, backend.ErrLimitMismatch):
						mismatches.Add(1)
					case !errors.Is(err, backend.ErrHeld):
						t.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	if grants.Load() == 0 || mismatches.Load() == 0 {
		t.Errorf("%d grants and %d mismatches: no race", grants.Load(), mismatches.Load())
	}
	nothingLeft(t, s)
}

// Readers, writers and holders of permits acquire, wait, cancel and release at any moment: concurrent holds are always
// compatible, and no key remains at the end.
func TestSharesUnderRace(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	drivers := []*Driver{s.open(t), s.open(t), s.open(t)}
	const limit = 5
	var readers, writers, permits atomic.Int64
	check := func() {
		r, w, p := readers.Load(), writers.Load(), permits.Load()
		if w > 1 || w > 0 && r > 0 || p > limit {
			t.Errorf("at once: %d readers, %d writers, %d permits", r, w, p)
		}
	}
	var granted [3]atomic.Int64
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			d := drivers[i%len(drivers)]
			for n := range 40 {
				r := request("rw", time.Minute, mathrand.N(4) > 0)
				counter, by := &writers, int64(1)
				switch i % 3 {
				case 1:
					r, counter = reading(r), &readers
				case 2:
					by = int64(1 + mathrand.N(limit))
					r = taking(r, int(by), limit)
					r.Name, counter = "permits", &permits
				}
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
				if n%3 == 0 {
					time.AfterFunc(mathrand.N(5*time.Millisecond), cancel)
				}
				g, err := d.Acquire(ctx, r)
				cancel()
				if err != nil {
					if !errors.Is(err, backend.ErrHeld) && !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
					settle(t, d, err, r)
					continue
				}
				granted[r.Kind].Add(1)
				counter.Add(by)
				check()
				counter.Add(-by)
				if err := d.Release(within(t, 20*time.Second), g); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for kind := range granted {
		if granted[kind].Load() == 0 {
			t.Errorf("no grant of kind %v", backend.Kind(kind))
		}
	}
	nothingLeft(t, s)
}

// Waiters for permits whose clients are dead are skipped if they have no subscriber, and removed if they do not look.
func TestGoneWaitersForPermits(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	k := redisscript.KeysOf("fencelock:", "n")
	ghost := redisscript.Hold{
		PX: time.Minute, Permits: 2, Limit: 2, Client: "ghost", Nonce: "1", Request: "r", Owner: "o",
	}
	ahead := `return redis.call('ZADD', KEYS[1], 0.5, ARGV[1])`

	g := mustAcquire(t, d, taking(request("n", time.Minute, false), 1, 2))
	next := inLine(t, d, d, taking(request("n", time.Minute, true), 2, 2), 1)
	if err := admin.Eval(context.Background(), ahead, []string{k.Queue}, ghost.Value()).Err(); err != nil {
		t.Fatal(err)
	}
	awaitWaiters(t, d, "n", 2)
	mustRelease(t, d, g)
	mustRelease(t, d, <-next)
	nothingLeft(t, s)
}

// Keys of a name with permits are deleted by hand: holders lose at most the deleted holds, and the name is usable
// again when they have ended.
func TestDeletedKeysOfPermits(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	k := redisscript.KeysOf("fencelock:", "n")
	g := mustAcquire(t, d, taking(request("n", time.Minute, false), 1, 2))
	if err := admin.Del(context.Background(), k.Queue).Err(); err != nil {
		t.Fatal(err)
	}
	// Without a subscription it would look first, and find that the name has another use.
	subscribe(t, d)
	next := inLine(t, d, d, request("n", time.Minute, true), 1) // no key shows that its kind does not belong here
	if answer := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0]; answer.Err != nil {
		t.Error(answer.Err)
	}
	notYet(t, next, "a lock beside permits")
	mustRelease(t, d, g)
	mustRelease(t, d, <-next)
	nothingLeft(t, s)
}
