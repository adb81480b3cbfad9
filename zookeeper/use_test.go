package zookeeper_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/zookeeper"
)

// as changes what a request asks for.
func as(r backend.Request, kind backend.Kind, permits, limit int) backend.Request {
	r.Kind, r.Permits, r.Limit = kind, permits, limit
	return r
}

func writer(name string, wait bool) backend.Request {
	return as(request(name, wait), backend.KindExclusive, 0, 0)
}

func reader(name string, wait bool) backend.Request {
	return as(request(name, wait), backend.KindShared, 0, 0)
}

func some(name string, wait bool, permits, limit int) backend.Request {
	return as(request(name, wait), backend.KindPermits, permits, limit)
}

func release(t testing.TB, d backend.Driver, g backend.Grant) {
	t.Helper()
	if err := d.Release(soon(t, 20*time.Second), g); err != nil {
		t.Errorf("Release of %v = %v", g.Kind, err)
	}
}

// stands waits until as many hold and wait for a name.
func stands(t testing.TB, d *zookeeper.Driver, name string, holders, waiters int) backend.State {
	t.Helper()
	var last backend.State
	for ctx := soon(t, 20*time.Second); ; time.Sleep(10 * time.Millisecond) { // no event announces it
		info, err := d.Look(ctx, name)
		if err == nil && len(info.Holders) == holders && info.Waiters == waiters {
			return info
		}
		if err != nil {
			t.Fatalf("Holder = %v, after %+v; want %d holders and %d waiters", err, last, holders, waiters)
		}
		last = info
	}
}

// TestKinds runs what the suite does not ask, all on one server.
func TestKinds(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T, *containers.ZooKeeperServer)
	}{
		{"queue-over-kinds", queueOverKinds},
		{"kinds-never-overlap", kindsNeverOverlap},
		{"refused-attempts-refuse-nobody", refusedAttemptsRefuseNobody},
		{"one-name-is-in-use-for-one-thing", oneNameIsInUseForOneThing},
		{"grant-meets-cancel", grantMeetsCancel},
		{"dead-holders-give-back", deadHoldersGiveBack},
		{"force-release-ends-all-holds", forceReleaseEndsAllHolds},
		{"force-release-amid-change", forceReleaseAmidChange},
		{"any-of-the-permits-wakes", anyOfThePermitsWakes},
		{"attempts-that-meet", attemptsThatMeet},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, server) })
	}
}

// queueOverKinds lets requests arrive one after the other, at two clients in turn, and looks who holds together.
func queueOverKinds(t *testing.T, server *containers.ZooKeeperServer) {
	drivers := []*zookeeper.Driver{driver(t, server.Addr()), driver(t, server.Addr())}
	const exclusive, shared, permits = backend.KindExclusive, backend.KindShared, backend.KindPermits
	type asked struct {
		kind     backend.Kind
		n, limit int
	}
	for name, test := range map[string]struct {
		arrive []asked
		groups []int // how many of them hold together, in turn
	}{
		"readers-and-writers": {
			[]asked{
				{kind: shared}, {kind: shared}, {kind: exclusive}, {kind: shared}, {kind: exclusive},
				{kind: exclusive}, {kind: shared},
			},
			[]int{2, 1, 1, 1, 1, 1},
		},
		"permits": {
			[]asked{
				{permits, 2, 4}, {permits, 1, 4}, {permits, 4, 4}, {permits, 1, 4}, {permits, 3, 4}, {permits, 4, 4},
			},
			[]int{2, 1, 2, 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			type result struct {
				g   backend.Grant
				err error
			}
			results := make([]chan result, len(test.arrive))
			left := len(test.arrive)
			for i, a := range test.arrive {
				results[i] = make(chan result, 1)
				go func() {
					g, err := drivers[i%2].Acquire(soon(t, time.Minute), as(request(name, true), a.kind, a.n, a.limit))
					results[i] <- result{g, err}
				}()
				stands(t, drivers[0], name, min(i+1, test.groups[0]), max(0, i+1-test.groups[0]))
			}
			next, last := 0, uint64(0)
			for _, size := range test.groups {
				left -= size
				info := stands(t, drivers[0], name, size, left)
				var group []backend.Grant
				for i := range size {
					got := <-results[next+i]
					if got.err != nil {
						t.Fatalf("request %d: %v", next+i, got.err)
					}
					h, a := info.Holders[i], test.arrive[next+i]
					if h.HoldID != got.g.HoldID || h.Kind != a.kind || h.Permits != a.n || h.Token != got.g.Token {
						t.Errorf("holder %d is %+v, want that of %+v", next+i, h, got.g)
					}
					if got.g.Token.Exclusive() != (a.kind == exclusive) || got.g.Token.Order() <= last {
						t.Errorf("token %v of %v after %d", got.g.Token, a.kind, last)
					}
					last = got.g.Token.Order()
					group = append(group, got.g)
				}
				for i, g := range group {
					if a := test.arrive[next]; left > 0 {
						_, err := drivers[1].Acquire(soon(t, 20*time.Second),
							as(request(name, false), a.kind, a.n, a.limit))
						if !errors.Is(err, backend.ErrHeld) {
							t.Errorf("an attempt behind %d who wait = %v, want ErrHeld", left, err)
						}
					}
					stands(t, drivers[0], name, size-i, left) // one who goes lets nobody in before the others have gone
					release(t, drivers[(next+i)%2], g)
				}
				next += size
			}
			stands(t, drivers[0], name, 0, 0)
		})
	}
}

// monitor knows who holds a name, and complains about holds that exclude each other.
type monitor struct {
	mu      sync.Mutex // protects the following fields
	holds   map[string]backend.Grant
	last    fencing.Token // of a writer
	count   map[backend.Kind]int
	refused map[error]int
}

func (m *monitor) enter(g backend.Grant) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	used := g.Permits
	for _, other := range m.holds {
		used += other.Permits
		if other.Limit != g.Limit || g.Kind == backend.KindExclusive || other.Kind == backend.KindExclusive {
			return fmt.Errorf("%v, %d of %d, beside %v, %d of %d",
				g.Kind, g.Permits, g.Limit, other.Kind, other.Permits, other.Limit)
		}
	}
	if used > g.Limit {
		return fmt.Errorf("%d permits of %d are held by %d", used, g.Limit, len(m.holds)+1)
	}
	if g.Kind == backend.KindExclusive {
		if g.Token <= m.last {
			return fmt.Errorf("token %v after %v", g.Token, m.last)
		}
		m.last = g.Token
	}
	m.holds[g.RequestID] = g
	m.count[g.Kind]++
	return nil
}

// refuse counts which of errs a call has failed with.
func (m *monitor) refuse(errs []error, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range errs {
		if errors.Is(err, e) {
			m.refused[e]++
		}
	}
}

// complete tells whether every kind was granted and every error has been seen.
func (m *monitor) complete() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.count) == 3 && len(m.refused) == 3
}

func (m *monitor) leave(g backend.Grant) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.holds, g.RequestID)
}

// kindsNeverOverlap lets clients ask for everything at once, with attempts, waits, and waits that end.
func kindsNeverOverlap(t *testing.T, server *containers.ZooKeeperServer) {
	const clients, workers, rounds = 3, 4, 20
	admin := newAdmin(t, server.Addr())
	m := &monitor{holds: map[string]backend.Grant{}, count: map[backend.Kind]int{}, refused: map[error]int{}}
	refusals := []error{backend.ErrHeld, backend.ErrLimitMismatch, context.DeadlineExceeded}
	round := func(d *zookeeper.Driver) error {
		r := [](func(string, bool) backend.Request){
			writer, reader, reader,
			func(name string, wait bool) backend.Request { return some(name, wait, 1+rand.IntN(3), 3) },
			func(name string, wait bool) backend.Request { return some(name, wait, 1+rand.IntN(3), 3) },
			func(name string, wait bool) backend.Request { return some(name, wait, 1, 2) },
		}[rand.IntN(6)]("all", rand.IntN(3) > 0)
		patience := 20 * time.Second
		if rand.IntN(4) == 0 {
			patience = rand.N(30 * time.Millisecond)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		g, err := d.Acquire(ctx, r)
		switch {
		case err == nil:
		case errors.Is(err, backend.ErrUnknown) && ctx.Err() != nil:
			if err := d.Release(soon(t, 20*time.Second), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
				return fmt.Errorf("release of an unknown outcome: %w", err)
			}
			return nil
		case errors.Is(err, backend.ErrHeld) && !r.Wait, errors.Is(err, backend.ErrLimitMismatch),
			ctx.Err() != nil && patience < time.Second:
			m.refuse(refusals, err)
			return nil
		default:
			return fmt.Errorf("acquire: %w", err)
		}
		if err := m.enter(g); err != nil {
			return err
		}
		time.Sleep(rand.N(3 * time.Millisecond)) // it is held
		m.leave(g)
		if err := d.Release(soon(t, 20*time.Second), g); err != nil {
			return fmt.Errorf("release: %w", err)
		}
		return nil
	}
	asLongAs := soon(t, 30*time.Second) // what is asked for is drawn
	var all sync.WaitGroup
	for range clients {
		d := driver(t, server.Addr())
		for range workers {
			all.Go(func() {
				for n := 0; n < rounds || !m.complete() && asLongAs.Err() == nil; n++ {
					if err := round(d); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	all.Wait()
	d := driver(t, server.Addr())
	release(t, d, take(t, d, writer("all", true)))
	stands(t, d, "all", 0, 0)
	for deadline := soon(t, 20*time.Second); ; {
		left, err := admin.ephemerals("/fencelock")
		if err == nil && len(left) == 0 {
			break
		}
		if err != nil || deadline.Err() != nil {
			t.Fatalf("left behind: %q, %v", left, err)
		}
	}
	t.Logf("%v were granted, and refused with %v", m.count, m.refused)
	if !m.complete() {
		t.Errorf("granted %v and refused with %v; want every kind and every error", m.count, m.refused)
	}
}

// refusedAttemptsRefuseNobody lets writers try while one reader holds. Other readers hold beside it whenever
// they ask: nobody waits and nobody else holds.
func refusedAttemptsRefuseNobody(t *testing.T, server *containers.ZooKeeperServer) {
	d, busy := driver(t, server.Addr()), driver(t, server.Addr())
	for name, ask := range map[string]struct{ holds, tries, fits backend.Request }{
		"readers": {reader("readers", false), writer("readers", false), reader("readers", false)},
		"permits": {some("permits", false, 1, 4), some("permits", false, 4, 4), some("permits", false, 1, 4)},
		"limits":  {some("limits", false, 1, 4), some("limits", false, 1, 5), some("limits", false, 1, 4)},
	} {
		fresh := func(r backend.Request) backend.Request {
			r.RequestID = backend.NewRequestID()
			return r
		}
		g := take(t, d, ask.holds)
		ctx, stop := context.WithCancel(soon(t, time.Minute))
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				for ctx.Err() == nil {
					_, err := busy.Acquire(soon(t, 20*time.Second), fresh(ask.tries))
					if !errors.Is(err, backend.ErrHeld) && !errors.Is(err, backend.ErrLimitMismatch) {
						t.Errorf("%s: an attempt that must be refused = %v", name, err)
						return
					}
				}
			})
		}
		for range 20 {
			began := time.Now()
			beside, err := d.Acquire(soon(t, 20*time.Second), fresh(ask.fits))
			switch took := time.Since(began); {
			case err == nil:
				release(t, d, beside)
			case errors.Is(err, backend.ErrHeld) && took > time.Second:
				t.Logf("%s: an attempt was refused for those before it after %v", name, took)
			default:
				t.Errorf("%s: an attempt beside the holder = %v after %v, want it granted", name, err, took)
			}
		}
		stop()
		all.Wait()
		release(t, d, g)
	}
}

// oneNameIsInUseForOneThing asks for what a name is not in use for, behind holders and behind waiters.
func oneNameIsInUseForOneThing(t *testing.T, server *containers.ZooKeeperServer) {
	d, rival := driver(t, server.Addr()), driver(t, server.Addr())
	ask := map[string]func(wait bool) backend.Request{
		"a writer": func(wait bool) backend.Request { return writer("use", wait) },
		"a reader": func(wait bool) backend.Request { return reader("use", wait) },
		"2 of 4":   func(wait bool) backend.Request { return some("use", wait, 2, 4) },
		"1 of 5":   func(wait bool) backend.Request { return some("use", wait, 1, 5) },
	}
	for holds, holder := range ask {
		r := holder(false)
		r.Owner = "the holder"
		g := take(t, d, r)
		ctx, giveUp := context.WithCancel(soon(t, time.Minute))
		waits := make(chan error, 1)
		go func() {
			r := as(holder(true), r.Kind, r.Limit, r.Limit)
			if r.Kind == backend.KindShared {
				r.Kind = backend.KindExclusive
			}
			_, err := d.Acquire(ctx, r)
			waits <- err
		}()
		if err := queued(soon(t, 20*time.Second), rival, "use"); err != nil {
			t.Fatal(err)
		}
		for what, asked := range ask {
			if asked(false).Limit == r.Limit {
				continue
			}
			for _, wait := range []bool{false, true} {
				_, err := rival.Acquire(soon(t, 20*time.Second), asked(wait))
				if !errors.Is(err, backend.ErrLimitMismatch) {
					t.Errorf("%s, where %s holds (wait %v) = %v, want ErrLimitMismatch", what, holds, wait, err)
				}
			}
		}
		// The same request has what it has.
		for what, asked := range ask {
			again := asked(false)
			again.RequestID = r.RequestID
			if _, err := rival.Acquire(soon(t, 20*time.Second), again); what != holds &&
				!errors.Is(err, backend.ErrLimitMismatch) {
				t.Errorf("the request of %s, asking for %s = %v, want ErrLimitMismatch", holds, what, err)
			}
			if what == holds {
				g = take(t, d, again) // back to its client
			}
		}
		if info, err := d.Look(soon(t, 20*time.Second), "use"); err != nil || len(info.Holders) != 1 ||
			info.Waiters != 1 {
			t.Errorf("after all that %+v, %v; want the one holder and the one waiter", info, err)
		}
		giveUp()
		if err := <-waits; !errors.Is(err, context.Canceled) {
			t.Errorf("the waiter that gave up = %v", err)
		}
		release(t, d, g)
		stands(t, d, "use", 0, 0)
	}
}

// grantMeetsCancel gives a wait for permits up while they come free. None may be lost.
func grantMeetsCancel(t *testing.T, server *containers.ZooKeeperServer) {
	a, b := driver(t, server.Addr()), driver(t, server.Addr())
	granted, cancelled := 0, 0
	for n := range 45 {
		g := take(t, a, some("race", true, 3, 3))
		ctx, cancel := context.WithCancel(soon(t, 20*time.Second))
		got := make(chan error, 1)
		r := some("race", true, 2, 3)
		go func() {
			next, err := b.Acquire(ctx, r)
			if err == nil {
				err = b.Release(soon(t, 20*time.Second), next)
			} else if errors.Is(err, backend.ErrUnknown) {
				err = errors.Join(context.Canceled, b.Release(soon(t, 20*time.Second), r.Grant()))
			}
			got <- err
		}()
		stands(t, a, "race", 1, 1)
		time.AfterFunc(time.Duration(n%15)*200*time.Microsecond, cancel)
		release(t, a, g)
		switch err := <-got; {
		case err == nil:
			granted++
		case errors.Is(err, context.Canceled):
			cancelled++
		default:
			t.Errorf("round %d: %v", n, err)
		}
		cancel()
	}
	release(t, a, take(t, a, some("race", true, 3, 3)))
	t.Logf("%d were granted, %d gave up", granted, cancelled)
}

// deadHoldersGiveBack cuts a client off that reads one name and has permits of another one.
func deadHoldersGiveBack(t *testing.T, server *containers.ZooKeeperServer) {
	addr, link := server.NewLink(t)
	victim, rival := driver(t, addr), driver(t, server.Addr())
	var told sync.WaitGroup
	told.Add(2)
	var grants []backend.Grant
	const ttl = 3 * containers.ZooKeeperTick
	for _, r := range []backend.Request{reader("read", false), some("permits", false, 2, 3)} {
		r.TTL = ttl
		r.Lost = func(loss backend.Loss) {
			if loss.Reason != backend.ReasonSessionExpired {
				t.Errorf("reason = %q, want %q", loss.Reason, backend.ReasonSessionExpired)
			}
			told.Done()
		}
		grants = append(grants, take(t, victim, r))
	}
	beside := []backend.Grant{take(t, rival, reader("read", false)), take(t, rival, some("permits", false, 1, 3))}
	release(t, rival, beside[0])
	renewed := victim.Renew(soon(t, 10*time.Second), grants)
	link.Hold(fault.Both)
	for i, r := range []backend.Request{writer("read", true), some("permits", true, 2, 3)} {
		g := take(t, rival, r)
		if left := renewed[i].SentAt.Add(victim.Describe().Validity(ttl)).
			Sub(backend.SystemClock().Now()); renewed[i].Err != nil || left > 0 {
			t.Errorf("%v: granted to the next while the dead holder may believe in it for %v, %v",
				r.Kind, left, renewed[i].Err)
		}
		release(t, rival, g)
	}
	link.Pass()
	told.Wait()
	for i, r := range victim.Renew(soon(t, 10*time.Second), grants) {
		if !errors.Is(r.Err, backend.ErrNotHeld) {
			t.Errorf("%v: Renew after the end of the session = %v, want ErrNotHeld", grants[i].Kind, r.Err)
		}
	}
	release(t, rival, beside[1])
}

// forceReleaseEndsAllHolds takes a name away from more holders than one transaction deletes, and from a few.
func forceReleaseEndsAllHolds(t *testing.T, server *containers.ZooKeeperServer) {
	drivers := []*zookeeper.Driver{driver(t, server.Addr()), driver(t, server.Addr())}
	for name, test := range map[string]struct {
		holders  int
		ask      func(name string, wait bool) backend.Request
		nextAsks func(name string, wait bool) backend.Request
	}{
		"few": {3, reader, writer},
		"many": {
			520, func(name string, wait bool) backend.Request { return some(name, wait, 1, 520) },
			func(name string, wait bool) backend.Request { return some(name, wait, 520, 520) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			reasons := make(chan backend.Reason, test.holders)
			grants := make([]backend.Grant, test.holders)
			var all sync.WaitGroup
			for i := range grants {
				all.Go(func() {
					r := test.ask(name, false)
					r.Lost = func(loss backend.Loss) { reasons <- loss.Reason }
					g, err := drivers[i%2].Acquire(soon(t, 30*time.Second), r)
					if err != nil {
						t.Errorf("Acquire = %v", err)
					}
					grants[i] = g
				})
			}
			all.Wait()
			next := make(chan backend.Grant, 1)
			go func() {
				g, err := drivers[0].Acquire(soon(t, 40*time.Second), test.nextAsks(name, true))
				if err != nil {
					t.Errorf("Acquire by the next = %v", err)
				}
				next <- g
			}()
			stands(t, drivers[1], name, test.holders, 1)
			w := stallmeter.Begin() // a holder waits half a second for the reason
			var wrong []backend.Reason
			if err := drivers[1].ForceRelease(soon(t, 20*time.Second), backend.ForceRequest{Name: name, Reason: "test"}); err != nil {
				t.Fatalf("ForceRelease = %v", err)
			}
			for range grants {
				select {
				case reason := <-reasons:
					if reason != backend.ReasonForceReleased {
						wrong = append(wrong, reason)
					}
				case <-soon(t, 20*time.Second).Done():
					t.Fatal("not every holder was notified")
				}
			}
			if len(wrong) > 0 {
				w.Errorf(t, 100*time.Millisecond, "reasons %q, want %q", wrong, backend.ReasonForceReleased)
			} else {
				w.End()
			}
			g := <-next
			for i := range min(len(grants), 3) {
				var lost *backend.NotHeldError
				err := drivers[i%2].Renew(soon(t, 10*time.Second), grants[i:i+1])[0].Err
				if !errors.As(err, &lost) || lost.Reason != backend.ReasonForceReleased {
					t.Errorf("Renew = %v, want that it was force-released", err)
				}
			}
			release(t, drivers[0], g)
		})
	}
}

// forceReleaseAmidChange takes a name away from three readers while others come and go.
func forceReleaseAmidChange(t *testing.T, server *containers.ZooKeeperServer) {
	d, busy := driver(t, server.Addr()), driver(t, server.Addr())
	var told sync.WaitGroup
	for range 3 {
		r := reader("change", false)
		told.Add(1)
		r.Lost = func(backend.Loss) { told.Done() }
		take(t, d, r)
	}
	ctx, stop := context.WithCancel(soon(t, time.Minute))
	defer stop()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for ctx.Err() == nil {
				g, err := busy.Acquire(soon(t, 20*time.Second), reader("change", false))
				if err == nil {
					err = busy.Release(soon(t, 20*time.Second), g)
				}
				if err != nil && !errors.Is(err, backend.ErrNotHeld) && !errors.Is(err, backend.ErrUnavailable) {
					t.Errorf("a reader that comes and goes: %v", err)
					return
				}
			}
		})
	}
	if err := d.ForceRelease(soon(t, 20*time.Second), backend.ForceRequest{Name: "change", Reason: "test"}); err != nil {
		t.Errorf("ForceRelease = %v", err)
	}
	stop()
	all.Wait()
	told.Wait()
	stands(t, d, "change", 0, 0)
}

// anyOfThePermitsWakes releases the oldest of those who hold all permits, and the middle one. That the one right before
// the waiter wakes it shows elsewhere.
func anyOfThePermitsWakes(t *testing.T, server *containers.ZooKeeperServer) {
	a, b := driver(t, server.Addr()), driver(t, server.Addr())
	var took []time.Duration
	w := stallmeter.Begin()
	defer w.End()
	for round := range 8 {
		var holds []backend.Grant
		for range 3 {
			holds = append(holds, take(t, a, some("wake", true, 1, 3)))
		}
		woken := make(chan backend.Grant, 1)
		go func() {
			g, err := b.Acquire(soon(t, 20*time.Second), some("wake", true, 1, 3))
			if err != nil {
				t.Errorf("Acquire = %v", err)
			}
			woken <- g
		}()
		stands(t, a, "wake", 3, 1)
		began := time.Now()
		release(t, a, holds[round%2])
		g := <-woken
		took = append(took, time.Since(began))
		release(t, b, g)
		for i, g := range holds {
			if i != round%2 {
				release(t, a, g)
			}
		}
	}
	// A waiter that is not notified looks for itself, half a second later at the earliest.
	if slices.Sort(took); took[len(took)/2] > 400*time.Millisecond {
		w.Errorf(t, 50*time.Millisecond, "a waiter was granted %v after a release in the median; was it not notified?",
			took[len(took)/2])
	}
}
