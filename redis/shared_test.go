package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testtier"
)

// reading turns r into a request for a shared hold.
func reading(r backend.Request) backend.Request {
	r.Kind = backend.KindShared
	return r
}

// taking turns r into a request for n permits of limit.
func taking(r backend.Request, n, limit int) backend.Request {
	r.Kind, r.Permits, r.Limit = backend.KindPermits, n, limit
	return r
}

// held makes an attempt that must find the name held.
func held(t *testing.T, d *Driver, r backend.Request, when string) {
	t.Helper()
	r.Wait = false
	if g, err := d.Acquire(within(t, 30*time.Second), r); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("%s: an attempt = %+v, %v, want ErrHeld", when, g, err)
	}
}

// mismatched makes an attempt and a wait, which must both find the name with another use.
func mismatched(t *testing.T, d *Driver, r backend.Request, when string) {
	t.Helper()
	for _, wait := range []bool{false, true} {
		r.Wait = wait
		if g, err := d.Acquire(within(t, 30*time.Second), r); !errors.Is(err, backend.ErrLimitMismatch) {
			t.Errorf("%s: wait %v: %+v, %v, want ErrLimitMismatch", when, wait, g, err)
		}
	}
}

// inLine starts an Acquire and returns when n wait.
func inLine(t *testing.T, looker, d *Driver, r backend.Request, n int) <-chan backend.Grant {
	t.Helper()
	got := make(chan backend.Grant, 1)
	r.Wait = true
	go func() {
		defer close(got)
		g, err := d.Acquire(within(t, 30*time.Second), r)
		if err != nil {
			t.Error(err)
			return
		}
		got <- g
	}()
	awaitWaiters(t, looker, r.Name, n)
	return got
}

func awaitWaiters(t *testing.T, looker *Driver, name string, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d wait for %s", n, name), func() bool {
		info, err := looker.Look(context.Background(), name)
		return err == nil && info.Waiters == n
	})
}

// notYet fails if a waiter has its grant while it must not.
func notYet(t *testing.T, got <-chan backend.Grant, when string) {
	t.Helper()
	select {
	case g := <-got:
		t.Errorf("%s: granted %+v", when, g)
	default:
	}
}

func nothingLeft(t *testing.T, s *testServer) {
	t.Helper()
	admin := s.admin(t)
	eventually(t, "nothing is left", func() bool { return len(keys(t, admin)) == 0 })
}

// Readers hold together. A waiting writer stops later readers and then has the name alone; after it, all readers up to
// the next writer are granted together.
func TestReadersAndWriters(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	a, b := s.open(t), s.open(t)
	r1 := mustAcquire(t, a, reading(request("n", time.Minute, false)))
	r2 := mustAcquire(t, b, reading(request("n", time.Minute, true)))
	if r1.Kind != backend.KindShared || r1.Token != 0 {
		t.Errorf("grant: %+v", r1)
	}
	held(t, b, request("n", time.Minute, false), "a writer beside readers")
	w1 := inLine(t, a, b, request("n", time.Minute, true), 1)
	held(t, a, reading(request("n", time.Minute, false)), "a reader that would pass a writer")
	r3 := inLine(t, a, a, reading(request("n", time.Minute, true)), 2)
	r4 := inLine(t, a, b, reading(request("n", time.Minute, true)), 3)
	w2 := inLine(t, a, a, request("n", time.Minute, true), 4)
	r5 := inLine(t, a, b, reading(request("n", time.Minute, true)), 5)

	mustRelease(t, a, r1)
	held(t, a, request("n", time.Minute, false), "one reader is left")
	notYet(t, w1, "a writer beside a reader")
	mustRelease(t, b, r2)
	g := <-w1
	held(t, a, reading(request("n", time.Minute, false)), "a reader beside a writer")
	mustRelease(t, b, g)
	g3, g4 := <-r3, <-r4
	info, err := a.Look(within(t, 30*time.Second), "n")
	if err != nil || !info.Held || len(info.Holders) != 2 || info.Waiters != 2 {
		t.Errorf("two readers hold and two wait: %+v, %v", info, err)
	}
	for _, h := range info.Holders {
		if h.Kind != backend.KindShared || h.Owner != "test/n" || h.ExpiresIn <= 0 || h.ExpiresIn > time.Minute ||
			!slices.Contains([]string{g3.HoldID, g4.HoldID}, h.HoldID) {
			t.Errorf("holder: %+v", h)
		}
	}
	mustRelease(t, b, g4)
	mustRelease(t, a, g3)
	g = <-w2
	mustRelease(t, a, g)
	mustRelease(t, b, <-r5)
	nothingLeft(t, s)
}

// A release hands over to all readers that are first in the queue.
func TestWriterHandsOverToReaders(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	g := mustAcquire(t, d, request("n", time.Minute, true))
	one := inLine(t, d, d, reading(request("n", time.Minute, true)), 1)
	two := inLine(t, d, d, reading(request("n", time.Minute, true)), 2)
	mustRelease(t, d, g)
	if err := d.Release(within(t, 30*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("second release: %v", err)
	}
	mustRelease(t, d, <-one)
	mustRelease(t, d, <-two)
	nothingLeft(t, s)
}

// When a writer stops waiting, the readers behind it are granted.
func TestCancelledWriterLetsReadersIn(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, other := s.open(t), s.open(t)
	g := mustAcquire(t, d, reading(request("n", time.Minute, true)))
	for what, leave := range map[string]func(*Driver, backend.Request, context.CancelFunc){
		"cancelled": func(_ *Driver, _ backend.Request, cancel context.CancelFunc) { cancel() },
		"released by its id": func(d *Driver, r backend.Request, _ context.CancelFunc) {
			mustRelease(t, d, r.Grant())
		},
		"forgotten by a client": func(d *Driver, _ backend.Request, _ context.CancelFunc) {
			d.Close(context.Background())
		},
	} {
		ctx, cancel := context.WithCancel(context.Background())
		gone := make(chan error, 1)
		before := calls(t, s.admin(t), "hdel") // each look executes one
		writer := s.open(t)
		w := request("n", time.Minute, true)
		go func() {
			_, err := writer.Acquire(ctx, w)
			gone <- releasedIfUnknown(d, w, err)
		}()
		awaitWaiters(t, d, "n", 1)
		reader := inLine(t, d, other, reading(request("n", time.Minute, true)), 2)
		eventually(t, "the first looks of both have passed, and the next ones are far", func() bool {
			return calls(t, s.admin(t), "hdel")-before >= 2
		})
		end := stallmeter.Late(t)
		leave(writer, w, cancel)
		mustRelease(t, other, <-reader)
		end(time.Second, what+": the reader's entry") // earlier than its next look
		cancel()
		<-gone
		awaitWaiters(t, d, "n", 0)
	}
	mustRelease(t, d, g)
	nothingLeft(t, s)
}

// A reader dies beside a live reader: the writer waits only for the live one.
func TestReaderDies(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	d, other := s.open(t), s.open(t)
	const ttl = 500 * time.Millisecond
	dead := mustAcquire(t, other, reading(request("n", ttl, false)))
	living := mustAcquire(t, d, reading(request("n", time.Minute, false)))
	w := inLine(t, d, other, request("n", time.Minute, true), 1)
	eventually(t, "the dead one is gone", func() bool {
		info, err := d.Look(context.Background(), "n")
		return err == nil && len(info.Holders) == 1
	})
	if now := backend.SystemClock().Now(); now < dead.SentAt.Add(ttl) {
		t.Errorf("gone %v before its time", dead.SentAt.Add(ttl).Sub(now))
	}
	answers := d.Renew(within(t, 30*time.Second), []backend.Grant{dead, living})
	var lost *backend.NotHeldError
	if !errors.As(answers[0].Err, &lost) || lost.Reason != backend.ReasonExpired || answers[1].Err != nil {
		t.Errorf("renewals: %+v", answers)
	}
	if err := other.Release(within(t, 30*time.Second), dead); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("released after its time: %v", err)
	}
	notYet(t, w, "a writer beside a living reader")
	mustRelease(t, d, living)
	g := <-w

	// All readers die; the writer's own client notices.
	mustRelease(t, other, g)
	end := stallmeter.Late(t)
	mustAcquire(t, other, reading(request("n", ttl, false)))
	mustAcquire(t, other, reading(request("n", ttl+100*time.Millisecond, false)))
	g = mustAcquire(t, d, request("n", time.Minute, true))
	if took := end(
		ttl+500*time.Millisecond+slack, "the writer's wait for readers that end",
	); took < ttl+100*time.Millisecond {
		t.Errorf("the writer waited %v in all, less than the readers' time", took)
	}
	mustRelease(t, d, g)
	nothingLeft(t, s)
}

// All keys of a name are evicted: every hold of it is lost, and a later hold restores no earlier one.
func TestEvictedShares(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	for _, r := range []backend.Request{
		reading(request("n", time.Minute, false)), taking(request("p", time.Minute, false), 2, 4),
	} {
		lost := mustAcquire(t, d, r)
		k := redisscript.KeysOf("fencelock:", r.Name)
		if err := admin.Del(context.Background(), k.Lock).Err(); err != nil {
			t.Fatal(err)
		}
		again := r
		again.RequestID = backend.NewRequestID()
		if r.Kind == backend.KindPermits {
			again.Permits = 4
		}
		g := mustAcquire(t, d, again)
		answer := d.Renew(within(t, 30*time.Second), []backend.Grant{lost})[0]
		var notHeld *backend.NotHeldError
		if !errors.As(answer.Err, &notHeld) || notHeld.Reason != backend.ReasonEvicted {
			t.Errorf("%v: renewed what was evicted: %v", r.Kind, answer.Err)
		}
		if err := d.Release(within(t, 30*time.Second), lost); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("%v: released what was evicted: %v", r.Kind, err)
		}
		if err := admin.Del(context.Background(), k.Lock).Err(); err != nil {
			t.Fatal(err)
		}
		// The leftovers of a name do not prevent another use.
		mustRelease(t, d, mustAcquire(t, d, request(r.Name, time.Minute, true)))
		if err := d.Release(within(t, 30*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("%v: released what was evicted: %v", r.Kind, err)
		}
	}
	nothingLeft(t, s)
}

// Every key lives as long as the longest hold, and no longer.
func TestSharesHaveTheirTime(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	for _, kind := range []func(backend.Request) backend.Request{
		reading, func(r backend.Request) backend.Request { return taking(r, 1, 3) },
	} {
		long := mustAcquire(t, d, kind(request("n", time.Minute, false)))
		short := mustAcquire(t, d, kind(request("n", 5*time.Second, true)))
		most := long.TTL + time.Millisecond // servers count from the next whole millisecond
		for _, g := range []backend.Grant{short, long} {
			if answer := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0]; answer.Err != nil ||
				answer.TTL != g.TTL {
				t.Errorf("renewed: %+v", answer)
			}
			if left := pttl(t, admin, "n"); left > most || left < long.TTL-5*time.Second {
				t.Errorf("%v left of %v", left, long.TTL)
			}
		}
		for _, key := range keys(t, admin) {
			if left, err := admin.PTTL(context.Background(), key).Result(); err != nil || left <= 0 || left > most {
				t.Errorf("%s: %v left, %v", key, left, err)
			}
		}
		mustRelease(t, d, long)
		mustRelease(t, d, short)
		nothingLeft(t, s)
	}
}

// Shared holds and permits are idempotent by request id: a repetition by any client gets the same share.
func TestSharesAreIdempotent(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	a, b := s.open(t), s.open(t)
	for _, r := range []backend.Request{
		reading(request("n", time.Minute, false)), taking(request("n", time.Minute, false), 2, 3),
	} {
		for _, wait := range []bool{false, true} {
			r.Fresh, r.Wait = false, wait
			first := mustAcquire(t, a, r)
			second := mustAcquire(t, b, r)
			if info, err := a.Look(within(t, 30*time.Second), "n"); err != nil || len(info.Holders) != 1 ||
				info.Holders[0].Permits != r.Permits || info.Holders[0].Kind != r.Kind {
				t.Errorf("%v: %+v, %v", r.Kind, info, err)
			}
			if err := a.Expire(within(t, 30*time.Second), first); !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("%v: a hold that two drivers were granted expires: %v", r.Kind, err)
			}
			mustRelease(t, a, second)
			if err := a.Expire(within(t, 30*time.Second), mustAcquire(t, a, r)); err != nil {
				t.Errorf("%v: expire: %v", r.Kind, err)
			}
			third := mustAcquire(t, a, r)
			mustRelease(t, b, r.Grant())
			if err := a.Release(within(t, 30*time.Second), third); !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("%v: release after release by request: %v", r.Kind, err)
			}
		}
		// The same is true for places in the queue.
		block := r
		block.RequestID, block.Permits, block.Wait = backend.NewRequestID(), r.Limit, false
		if r.Kind == backend.KindShared {
			block = request("n", time.Minute, false)
		}
		g := mustAcquire(t, a, block)
		r.Wait = true
		ctx, cancel := context.WithCancel(context.Background())
		gone := make(chan error, 1)
		go func() {
			_, err := a.Acquire(ctx, r)
			gone <- err
		}()
		awaitWaiters(t, a, "n", 1)
		first := s.open(t)
		second := make(chan backend.Grant, 1)
		go func() { second <- mustAcquire(t, first, r) }()
		eventually(t, "the place has its new owner", func() bool { return placeOf(t, s, r).Client == first.service.identity })
		awaitWaiters(t, a, "n", 1)
		cancel()
		<-gone
		mustRelease(t, a, g)
		mustRelease(t, first, <-second)
		nothingLeft(t, s)
	}
}

// placeOf returns the place of r in the queue.
func placeOf(t *testing.T, s *testServer, r backend.Request) redisscript.Hold {
	t.Helper()
	admin, k := s.admin(t), redisscript.KeysOf("fencelock:", r.Name)
	places, err := admin.LRange(context.Background(), k.Queue, 0, -1).Result()
	if r.Kind == backend.KindPermits {
		places, err = admin.ZRange(context.Background(), k.Queue, 0, -1).Result()
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range places {
		if h, ok := redisscript.ParseHold(v); ok && h.Request == r.RequestID {
			return h
		}
	}
	return redisscript.Hold{}
}

// The minimum of a shared hold keeps writers out and lets readers in; that of permits keeps these permits.
func TestMinimumOfShares(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	r := reading(request("n", 200*time.Millisecond, false))
	r.MinHold = 600 * time.Millisecond
	start := time.Now()
	g := mustAcquire(t, d, r)
	mustRelease(t, d, g)
	if err := d.Release(within(t, 30*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("second release: %v", err)
	}
	mustRelease(t, d, mustAcquire(t, d, reading(request("n", time.Minute, false))))
	info, err := d.Look(within(t, 30*time.Second), "n")
	if err != nil || info.Held {
		t.Errorf("closed, and held by nobody: %+v, %v", info, err)
	}
	mustRelease(t, d, mustAcquire(t, d, request("n", time.Minute, true)))
	if took := time.Since(start); took < r.MinHold {
		t.Errorf("open to a writer after %v", took)
	}

	p := taking(request("n", 200*time.Millisecond, false), 2, 3)
	p.MinHold = 600 * time.Millisecond
	start = time.Now()
	g = mustAcquire(t, d, p)
	mustRelease(t, d, mustAcquire(t, d, taking(request("n", time.Minute, false), 1, 3)))
	w := inLine(t, d, d, taking(request("n", time.Minute, true), 2, 3), 1)
	mustRelease(t, d, g)
	mustRelease(t, d, <-w)
	if took := time.Since(start); took < p.MinHold {
		t.Errorf("permits came back after %v", took)
	}
	nothingLeft(t, s)
}

// The reply or the push is lost: the caller still gets its share, and only one.
func TestLostMessagesOfShares(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	d, link := s.linked(t)
	other := s.open(t)
	for _, kind := range []func(backend.Request) backend.Request{
		reading, func(r backend.Request) backend.Request { return taking(r, 2, 3) },
	} {
		mustRelease(t, d, mustAcquire(t, d, kind(request("warm-up", 10*time.Second, true))))
		for _, wait := range []bool{false, true} {
			link.Drop(fault.Replies)
			time.AfterFunc(300*time.Millisecond, link.Pass)
			g := mustAcquire(t, d, kind(request("n", time.Minute, wait)))
			if info, err := other.Look(within(t, 30*time.Second), "n"); err != nil || len(info.Holders) != 1 {
				t.Errorf("one share: %+v, %v", info, err)
			}
			mustRelease(t, d, g)
		}
		block := kind(request("n", time.Minute, false))
		if block.Kind == backend.KindShared {
			block = request("n", time.Minute, false)
		}
		g := mustAcquire(t, other, block)
		next := inLine(t, other, d, kind(request("n", time.Minute, true)), 1)
		link.Drop(fault.Replies)
		mustRelease(t, other, g)
		eventually(t, "the share is handed over", func() bool {
			info, err := other.Look(context.Background(), "n")
			return err == nil && info.Held && info.Waiters == 0
		})
		link.Pass()
		mustRelease(t, d, <-next)
	}
	nothingLeft(t, s)
}

// Foreign keys of other types at the driver's keys cause an error, and their data does not change.
func TestForeignKeysBesideShares(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	ctx := within(t, 20*time.Second)
	k := redisscript.KeysOf("fencelock:", "n")
	fill := map[string]func(key string) error{
		"hash": func(key string) error { return admin.HSet(ctx, key, "field", "value").Err() },
		"set":  func(key string) error { return admin.SAdd(ctx, key, "field").Err() },
	}
	for what, fill := range fill {
		for _, key := range []string{k.Lock, k.Queue} {
			if err := fill(key); err != nil {
				t.Fatal(err)
			}
			before, err := admin.Dump(ctx, key).Result()
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range []backend.Request{
				reading(request("n", time.Minute, false)), reading(request("n", time.Minute, true)),
				taking(request("n", time.Minute, false), 1, 2), taking(request("n", time.Minute, true), 1, 2),
			} {
				if _, err := d.Acquire(ctx, r); !errors.Is(err, backend.ErrMisconfigured) {
					t.Errorf("%s at %s, %v, wait %v: %v", what, key, r.Kind, r.Wait, err)
				}
				if err := d.Release(ctx, r.Grant()); !errors.Is(err, backend.ErrMisconfigured) {
					t.Errorf("%s at %s, %v: released: %v", what, key, r.Kind, err)
				}
			}
			if after, err := admin.Dump(ctx, key).Result(); err != nil || after != before {
				t.Errorf("%s at %s was changed: %v", what, key, err)
			}
			admin.Del(ctx, key)
		}
	}
	nothingLeft(t, s)
}
