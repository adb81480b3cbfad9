package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/stallmeter"
)

// asks returns a request of the kind of u.
func (u use) asks(name string, wait bool) backend.Request {
	r := request(name, wait)
	r.Kind, r.Permits, r.Limit = u.Kind, u.Permits, u.Limit
	r.TTL = 30 * time.Second // without renewals the TTL must be enough for a slow machine
	return r
}

func mustRelease(t testing.TB, d *Driver, grants ...backend.Grant) {
	t.Helper()
	for _, g := range grants {
		if err := d.Release(t.Context(), g); err != nil {
			t.Error(err)
		}
	}
}

// crash ends the lease of a request's key, as if its client had died one TTL ago.
func crash(t testing.TB, d *Driver, r backend.Request) {
	t.Helper()
	if _, err := d.service.client.Revoke(t.Context(), leaseUnder(t, d, r)); err != nil {
		t.Fatal(err)
	}
}

// mustGet waits until a started acquire has got its hold.
func mustGet(t testing.TB, done <-chan outcome) backend.Grant {
	t.Helper()
	select {
	case o := <-done:
		if o.err != nil {
			t.Fatal(o.err)
		}
		return o.grant
	case <-time.After(time.Minute):
		t.Fatal("a waiter did not get in within a minute")
	}
	panic("not reached")
}

func mustWait(t testing.TB, what string, done <-chan outcome) {
	t.Helper()
	select {
	case o := <-done:
		t.Fatalf("%s got %+v, %v", what, o.grant, o.err)
	default:
	}
}

func wantHolders(t testing.TB, d *Driver, name string, waiters int, want ...backend.Grant) {
	t.Helper()
	info, err := d.Look(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	same := len(info.Holders) == len(want) && info.Waiters == waiters && info.Held == (len(want) > 0)
	for i, g := range want {
		if !same {
			break
		}
		h := info.Holders[i]
		same = h.HoldID == g.HoldID && h.Kind == g.Kind && h.Permits == g.Permits && h.Token == g.Token &&
			h.ExpiresIn > 0 && h.ExpiresIn <= g.TTL
	}
	if !same {
		t.Errorf("%s: %+v; want %d waiters and the holders %+v", name, info, waiters, want)
	}
}

// keysOf returns all keys below a name.
func keysOf(t testing.TB, d *Driver, name string) []string {
	t.Helper()
	resp, err := d.service.client.Get(t.Context(), dirOf(name), clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, kv := range resp.Kvs {
		keys = append(keys, string(kv.Key))
	}
	return keys
}

func TestKinds(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	for name, run := range map[string]func(*testing.T, *containers.EtcdServer){
		"shared": sharedHolds, "permits": permits, "foreign keys": foreignKeysBesideEveryKind, "mix": kindsDoNotMix,
		"contention": contentionOfAllKinds,
	} {
		t.Run(name, func(t *testing.T) { run(t, server) })
	}
}

func sharedHolds(t *testing.T, server *containers.EtcdServer) {
	one, two, three := newDriver(t, server.Addr()), newDriver(t, server.Addr()), newDriver(t, server.Addr())

	t.Run("a waiting writer stops new readers and gets in when the old ones ended", func(t *testing.T) {
		const name = "catalog"
		first := mustAcquire(t, one, sharing().asks(name, false))
		crashes := sharing().asks(name, true)
		second := mustAcquire(t, two, crashes)
		wantHolders(t, three, name, 0, first, second)

		writing := acquireLater(t, three, exclusively().asks(name, true))
		if _, err := one.Acquire(t.Context(), sharing().asks(name, false)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("a reader behind a waiting writer = %v, want ErrHeld", err)
		}
		third := acquireLater(t, one, sharing().asks(name, true))
		fourth := acquireLater(t, one, sharing().asks(name, true))
		wantHolders(t, three, name, 3, first, second)
		mustRelease(t, one, first)
		wantHolders(t, three, name, 3, second)
		crash(t, two, crashes)
		writer := mustGet(t, writing)
		wantHolders(t, one, name, 2, writer)
		mustWait(t, "a reader beside a writer", third)
		mustRelease(t, three, writer)
		together := []backend.Grant{mustGet(t, third), mustGet(t, fourth)}
		wantHolders(t, three, name, 0, together...)

		last := uint64(0)
		for _, g := range append([]backend.Grant{first, second, writer}, together...) {
			if g.Token.Order() <= last || g.Token.Exclusive() != (g.Kind == backend.KindExclusive) {
				t.Errorf("%v hold with token %v after %d", g.Kind, g.Token, last)
			}
			last = g.Token.Order()
		}
		mustRelease(t, one, together...)
		if keys := keysOf(t, one, name); len(keys) > 0 {
			t.Errorf("left: %q", keys)
		}
	})

	t.Run("readers behind a writer that leaves get in beside the holder", func(t *testing.T) {
		const name = "left"
		held := mustAcquire(t, one, sharing().asks(name, false))
		ctx, leave := context.WithCancel(t.Context())
		r := exclusively().asks(name, true)
		left := make(chan error, 1)
		go func() {
			_, err := two.Acquire(ctx, r)
			left <- err
		}()
		eventually(t, "the writer waits", func() bool { return len(keysOf(t, one, name)) == 2 })
		readers := []<-chan outcome{
			acquireLater(t, three, sharing().asks(name, true)), acquireLater(t, one, sharing().asks(name, true)),
		}
		mustWait(t, "a reader behind a writer", readers[0])
		leave()
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Errorf("the cancelled writer = %v", err)
		}
		wantHolders(t, two, name, 0, held, mustGet(t, readers[0]), mustGet(t, readers[1]))
	})

	t.Run("watchers are notified of a reader's crash", func(t *testing.T) {
		const name = "watched"
		start, err := one.Look(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		stays := mustAcquire(t, one, sharing().asks(name, false))
		crashes := sharing().asks(name, false)
		goes := mustAcquire(t, two, crashes)
		crash(t, two, crashes)
		mustRelease(t, one, stays)
		writer := mustAcquire(t, three, exclusively().asks(name, true))
		type told struct {
			typ   backend.ChangeType
			token fencing.Token
		}
		want := []told{
			{backend.ChangeAcquired, stays.Token}, {backend.ChangeAcquired, goes.Token},
			{backend.ChangeExpired, goes.Token},
			{backend.ChangeReleased, stays.Token}, {backend.ChangeAcquired, writer.Token},
		}
		var got []told
		for e, err := range three.Watch(t.Context(), name, start.Revision) {
			if err != nil {
				t.Fatal(err)
			}
			if got = append(got, told{e.Type, e.Token}); len(got) == len(want) {
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("told %v, want %v", got, want)
		}
	})
}

// A forced release ends holds in transactions that the server allows, and the waiter is granted after the last one.
func TestAllReadersAreForcedAwayHoweverMany(t *testing.T) {
	t.Parallel()
	for args, server := range map[string]*containers.EtcdServer{
		"": containers.Etcd(t), "--max-txn-ops 9": containers.Etcd(t, containers.Args("--max-txn-ops", "9")),
	} {
		t.Run("server"+args, func(t *testing.T) {
			one, two, three := newDriver(t, server.Addr()), newDriver(t, server.Addr()), newDriver(t, server.Addr())
			const name, readers = "crowd", 103 // one transaction ends 50
			start, err := one.Look(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			var victims []backend.Grant
			for range readers {
				victims = append(victims, mustAcquire(t, one, sharing().asks(name, false)))
			}
			writing := acquireLater(t, two, exclusively().asks(name, true))
			if err := three.ForceRelease(t.Context(), backend.ForceRequest{Name: name, Reason: "moved"}); err != nil {
				t.Fatal(err)
			}
			writer := mustGet(t, writing)
			for i, renewal := range one.Renew(t.Context(), victims) {
				notHeld := (*backend.NotHeldError)(nil)
				if !errors.As(renewal.Err, &notHeld) || notHeld.Reason != backend.ReasonForceReleased {
					t.Fatalf("renewal of reader %d = %v, want force-released", i, renewal.Err)
				}
			}
			count := map[backend.ChangeType]int{}
			for e, err := range one.Watch(t.Context(), name, start.Revision) {
				if err != nil {
					t.Fatal(err)
				}
				if count[e.Type]++; e.Token == writer.Token {
					break
				}
				if e.Type == backend.ChangeForceReleased && e.Reason != "moved" {
					t.Errorf("the reason is %q", e.Reason)
				}
			}
			if count[backend.ChangeForceReleased] != readers || count[backend.ChangeAcquired] != readers+1 {
				t.Errorf("told %v of %d readers", count, readers)
			}
		})
	}
}

func permits(t *testing.T, server *containers.EtcdServer) {
	one, two, three := newDriver(t, server.Addr()), newDriver(t, server.Addr()), newDriver(t, server.Addr())

	t.Run("a big request is not passed by small ones, and a crash gives permits back", func(t *testing.T) {
		const name = "gpu"
		held := mustAcquire(t, one, taking(1, 4).asks(name, false))
		crashes := taking(2, 4).asks(name, false)
		more := mustAcquire(t, two, crashes)
		wantHolders(t, three, name, 0, held, more)
		if _, err := three.Acquire(t.Context(), taking(2, 4).asks(name, false)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("two permits where one is left = %v, want ErrHeld", err)
		}
		big := acquireLater(t, three, taking(4, 4).asks(name, true))
		if _, err := three.Acquire(t.Context(), taking(1, 4).asks(name, false)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("the last permit, which a bigger request waits for = %v, want ErrHeld", err)
		}
		small := acquireLater(t, one, taking(1, 4).asks(name, true))
		wantHolders(t, three, name, 2, held, more)
		mustRelease(t, one, held)
		wantHolders(t, three, name, 2, more)
		mustWait(t, "a small request behind a big one", small)
		crash(t, two, crashes)
		all := mustGet(t, big)
		wantHolders(t, two, name, 1, all)
		mustRelease(t, three, all)
		wantHolders(t, two, name, 0, mustGet(t, small))
	})

	t.Run("one release lets in as many as fit", func(t *testing.T) {
		const name = "batch"
		held := mustAcquire(t, one, taking(4, 4).asks(name, false))
		var waiting []<-chan outcome
		for _, d := range []*Driver{one, two, three, one, two} {
			waiting = append(waiting, acquireLater(t, d, taking(1, 4).asks(name, true)))
		}
		mustRelease(t, one, held)
		var in []backend.Grant
		for _, done := range waiting[:4] {
			in = append(in, mustGet(t, done))
		}
		wantHolders(t, two, name, 1, in...)
		mustWait(t, "the fifth of four", waiting[4])
		mustRelease(t, three, in[2])
		mustGet(t, waiting[4])
	})

	for _, limit := range []int{1, 3, 12} {
		t.Run(fmt.Sprintf("waiters for one of %d are notified, and need not look", limit), func(t *testing.T) {
			name := fmt.Sprint("told/", limit)
			var held []backend.Grant
			for range limit {
				held = append(held, mustAcquire(t, one, taking(1, limit).asks(name, false)))
			}
			rand.Shuffle(limit, func(i, j int) { held[i], held[j] = held[j], held[i] })
			const waiters, look = 12, 500 * time.Millisecond // a waiter that was not woken looks later
			end := stallmeter.Late(t)
			var waiting []<-chan outcome
			for i := range waiters {
				waiting = append(waiting,
					acquireLater(t, []*Driver{two, three}[i%2], taking(1, limit).asks(name, true)))
			}
			for i, done := range waiting {
				mustRelease(t, one, held[i]) // any driver may release it
				held = append(held, mustGet(t, done))
				for _, later := range waiting[i+1:] {
					mustWait(t, "one that waits behind the next", later)
				}
			}
			end(waiters*look,
				fmt.Sprintf("%d grants, each of which would come with a look after %v,", waiters, look))
			mustRelease(t, one, held[waiters:]...)
		})
	}

	t.Run("a waiter whose key is deleted queues again", func(t *testing.T) {
		const name = "deleted"
		held := mustAcquire(t, one, taking(2, 2).asks(name, false))
		r := taking(1, 2).asks(name, true)
		done := acquireLater(t, two, r)
		if _, err := one.service.client.Delete(t.Context(), string(keyOf(t, one, r).Key)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the waiter stands in the queue again", func() bool { return len(keysOf(t, one, name)) == 2 })
		mustRelease(t, one, held)
		if g := mustGet(t, done); g.Token.Order() <= held.Token.Order() {
			t.Errorf("token %v after %v", g.Token, held.Token)
		}
	})

	t.Run("a reply that got lost can be asked for again", func(t *testing.T) {
		const name = "lost reply"
		addr, link := server.NewLink(t)
		far := newDriver(t, addr)
		mustRelease(t, far, mustAcquire(t, far, exclusively().asks("warm", false)))
		held := mustAcquire(t, one, taking(1, 4).asks(name, false))
		for _, wait := range []bool{false, true} {
			r := taking(2, 4).asks(name, wait)
			link.Hold(fault.Replies)
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			_, err := far.Acquire(ctx, r)
			cancel()
			if !errors.Is(err, backend.ErrUnknown) {
				t.Errorf("acquire without an answer (wait %v) = %v, want ErrUnknown", wait, err)
			}
			link.Pass()
			r.Fresh = false
			g := mustAcquire(t, far, r)
			wantHolders(t, two, name, 0, held, g)
			again := mustAcquire(t, far, r)
			if again.Token != g.Token {
				t.Errorf("sent again it has token %v, not %v", again.Token, g.Token)
			}
			mustRelease(t, far, again)
		}
	})
}

// Neither foreign keys beside the driver's nor the trace of a ForceRelease block a request.
func foreignKeysBesideEveryKind(t *testing.T, server *containers.EtcdServer) {
	d := newDriver(t, server.Addr())
	for i, c := range []use{exclusively(), sharing(), taking(1, 2)} {
		name := fmt.Sprint("beside ", i)
		dir := dirOf(name)
		for _, key := range []string{
			"", "!", "foreign", "forced", "+", "+foreign", "+shared/foreign", "+permits/foreign", "+permits/2/foreign",
			"+permits/2/1/" + backend.NewRequestID(), "+permits/7/1/" + backend.NewRequestID(),
			backend.NewRequestID(), "~",
		} {
			if _, err := d.service.client.Put(t.Context(), dir+key, "foreign"); err != nil {
				t.Fatal(err)
			}
		}
		for _, wait := range []bool{false, true} {
			r := c.asks(name, wait)
			g := mustAcquire(t, d, r)
			wantHolders(t, d, name, 0, g)
			r.Fresh = false
			if again := mustAcquire(t, d, r); again.Token != g.Token {
				t.Errorf("%v, sent again, has token %v, not %v", c.Kind, again.Token, g.Token)
			}
			if c.Kind != backend.KindExclusive {
				beside := mustAcquire(t, d, c.asks(name, wait))
				wantHolders(t, d, name, 0, g, beside)
				mustRelease(t, d, beside)
			}
			all := c
			all.Permits = c.Limit
			if c.Kind == backend.KindShared {
				all = exclusively()
			}
			if _, err := d.Acquire(t.Context(), all.asks(name, false)); !errors.Is(err, backend.ErrHeld) {
				t.Errorf("beside %v, %v = %v, want ErrHeld", c.Kind, all.Kind, err)
			}
			next := acquireLater(t, d, all.asks(name, true))
			behind := acquireLater(t, d, c.asks(name, true))
			wantHolders(t, d, name, 2, g)
			mustRelease(t, d, g)
			mustRelease(t, d, mustGet(t, next))
			mustRelease(t, d, mustGet(t, behind))
		}
	}
}

// A request that is incompatible with the use of a name is refused, and leaves no key.
func kindsDoNotMix(t *testing.T, server *containers.EtcdServer) {
	d := newDriver(t, server.Addr())
	all := []use{exclusively(), sharing(), taking(1, 2), taking(1, 3)}
	for i, used := range all {
		name := fmt.Sprint("used ", i)
		held := mustAcquire(t, d, used.asks(name, false))
		full := used
		full.Permits = used.Limit // so that it has to wait
		if used.Kind == backend.KindShared {
			full = exclusively()
		}
		waiting := acquireLater(t, d, full.asks(name, true))
		before := keysOf(t, d, name)
		for _, asked := range all {
			want, mixes := backend.ErrLimitMismatch, asked.Limit == used.Limit
			if mixes {
				want = backend.ErrHeld
			}
			for _, fresh := range []bool{true, false} {
				r := asked.asks(name, false)
				r.Fresh = fresh
				if _, err := d.Acquire(t.Context(), r); !errors.Is(err, want) {
					t.Errorf("%+v in use, %+v = %v, want %v", used, asked, err, want)
				}
				if r.Wait = true; mixes {
					continue
				}
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				_, err := d.Acquire(ctx, r)
				if cancel(); !errors.Is(err, want) {
					t.Errorf("%+v in use, waiting for %+v = %v, want %v", used, asked, err, want)
				}
			}
		}
		if after := keysOf(t, d, name); !slices.Equal(before, after) {
			t.Errorf("%+v in use: %q before and %q after what was refused", used, before, after)
		}
		mustRelease(t, d, held)
		mustRelease(t, d, mustGet(t, waiting))
	}
}

func TestPermitsOutOfRangeAreRefused(t *testing.T) {
	t.Parallel()
	d := New(nil, nil) // it sends no request
	for _, c := range []use{
		taking(0, 2), taking(3, 2), taking(-1, 2), taking(0, 0),
		{backend.KindShared, 1, 2}, {backend.KindExclusive, 0, 2},
	} {
		var invalid *backend.InvalidError
		if _, err := d.Acquire(t.Context(), c.asks("x", false)); !errors.As(err, &invalid) ||
			invalid.What != "permits" {
			t.Errorf("%+v = %v, want an *InvalidError", c, err)
		}
	}
}

// witness sees every hold, from after its grant until before its release.
type witness struct {
	mu     sync.Mutex
	held   map[use]int
	last   fencing.Token // the last token of an exclusive hold
	grants int
}

func (w *witness) sees(t testing.TB, c use, g backend.Grant) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.grants++
	w.held[c]++
	taken, kinds := 0, map[use]bool{}
	for h, n := range w.held {
		if n > 0 {
			taken += n * h.Permits
			kinds[use{Kind: h.Kind, Limit: h.Limit}] = true
		}
	}
	if len(kinds) > 1 || taken > c.Limit || c.Kind == backend.KindExclusive && w.held[c] > 1 {
		t.Errorf("%+v was granted: now there are %v", c, w.held)
	}
	if c.Kind == backend.KindExclusive {
		if g.Token <= w.last {
			t.Errorf("exclusive token %v after %v", g.Token, w.last)
		}
		w.last = g.Token
	}
}

func (w *witness) forgets(c use) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.held[c]--
}

// All clients want one name, in every kind and with different limits, and many of their contexts end.
func contentionOfAllKinds(t *testing.T, server *containers.EtcdServer) {
	const name, workers, rounds = "wanted", 12, 40
	uses := [][]use{
		{exclusively(), sharing(), sharing()}, {taking(1, 3), taking(2, 3), taking(3, 3)}, {taking(1, 2), taking(2, 2)},
	}
	drivers := append(sameKeys(t, 2, server.Addr()), newDriver(t, server.Addr())) // two with the same keys
	seen := &witness{held: map[use]int{}}
	var work sync.WaitGroup
	for n := range workers {
		work.Go(func() {
			random := rand.New(rand.NewPCG(7, uint64(n)))
			d := drivers[n%len(drivers)]
			for round := range rounds {
				choice := uses[round/5%len(uses)] // most requests have the same use, for a while
				if random.IntN(10) == 0 {
					choice = uses[random.IntN(len(uses))]
				}
				c := choice[random.IntN(len(choice))]
				r := c.asks(name, random.IntN(5) > 0)
				r.TTL = 30 * time.Second
				r.Fresh = random.IntN(2) == 0
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				if random.IntN(3) == 0 {
					ctx, cancel = context.WithTimeout(t.Context(), rand.N(20*time.Millisecond))
				}
				g, err := d.Acquire(ctx, r)
				cancel()
				switch {
				case err == nil:
					seen.sees(t, c, g)
					if random.IntN(2) == 0 {
						time.Sleep(rand.N(2 * time.Millisecond)) // the time of the work under the lock
					}
					seen.forgets(c)
					mustRelease(t, d, g)
				case errors.Is(err, backend.ErrUnknown):
					if err := d.Release(t.Context(), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
						t.Error(err)
					}
				case !errors.Is(err, backend.ErrHeld) && !errors.Is(err, backend.ErrLimitMismatch) &&
					!errors.Is(err, context.DeadlineExceeded):
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	t.Logf("%d grants in %d attempts", seen.grants, workers*rounds)
	eventually(t, "nothing is left", func() bool { return len(keysOf(t, drivers[0], name)) == 0 })
}
