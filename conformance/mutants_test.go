package conformance_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/race"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/internal/testtier"
)

// TestMutants breaks the in-process driver in one way at a time and wants the suite to see each of them, on the clauses
// that say what was broken. The unbroken driver passes the same clauses in TestMemory.
func TestMutants(t *testing.T) {
	killAll(t, func(t *testing.T, m mutant) conformance.Report {
		return conformance.CheckSimulated(t, m.harness, m.breaks...)
	})
}

// TestMutantsInRealTime shows that the suite sees them with the clocks that real services have, too.
func TestMutantsInRealTime(t *testing.T) {
	testtier.Only(t)
	if race.Enabled {
		t.Skip(testtier.Mark + "make deep runs it without the race detector too, under which too much is inconclusive")
	}
	// They mostly wait, so some run side by side: not so many that they wait for each other.
	reports := map[string]chan conformance.Report{}
	seats := make(chan struct{}, 8)
	for _, m := range allMutants() {
		report := make(chan conformance.Report, 1)
		reports[m.name] = report
		go func() {
			seats <- struct{}{}
			defer func() { <-seats }()
			report <- conformance.Check(t, m.harness(t), m.breaks...)
		}()
	}
	killAll(t, func(_ *testing.T, m mutant) conformance.Report { return <-reports[m.name] })
}

func allMutants() []mutant {
	return slices.Concat(mutants, kindMutants, boundMutants, identityMutants, serviceMutants, answerMutants, clientMutants)
}

func killAll(t *testing.T, check func(*testing.T, mutant) conformance.Report) {
	var rows []string
	for _, m := range allMutants() {
		t.Run(strings.Map(hyphens, m.name), func(t *testing.T) {
			var killers, unknown []string
			for _, r := range check(t, m) {
				switch r.Outcome {
				case conformance.Failed:
					killers = append(killers, r.Clause.ID)
				case conformance.Inconclusive: // it failed, which the machine may have caused as well
					unknown = append(unknown, r.Clause.ID)
				default:
					t.Errorf("%v ended with %v, want it to fail", r.Clause, r.Outcome)
				}
			}
			if len(killers)+len(unknown) == 0 {
				t.Error("this mutant survives")
			}
			testfindings.Write(t, testfindings.Mutant{What: m.name, Killers: strings.Join(killers, " ")})
			rows = append(rows, fmt.Sprintf("%-56s killed by %s", m.name, strings.Join(killers, " ")))
			if len(unknown) > 0 && !t.Failed() {
				t.Skipf("%s%v: the machine stood still", stallmeter.Mark, unknown)
			}
		})
	}
	t.Logf("%d mutants\n%s", len(rows), strings.Join(rows, "\n"))
}

func hyphens(r rune) rune {
	if r == ' ' || r == ',' {
		return '-'
	}
	return r
}

// mutant is one way to get a lock wrong.
type mutant struct {
	name   string
	breaks []string // numbers of clauses that must fail
	apply  func(b *broken)

	restart func(w *world) // what a restart of the service does, besides
}

// broken is the in-process driver with some methods replaced.
type broken struct {
	*memory.Driver
	world *world

	describe func() backend.Description
	promise  func() backend.Driver
	look     func(context.Context, string) (backend.State, error)
	list     func(context.Context, string) iter.Seq2[backend.State, error]
	acquire  func(context.Context, backend.Request) (backend.Grant, error)
	all      func(context.Context, []backend.Request) ([]backend.Grant, error)
	renew    func(context.Context, []backend.Grant) []backend.Renewal
	release  func(context.Context, backend.Grant) error
	watch    func(context.Context, string, uint64) iter.Seq2[backend.Change, error]
	ping     func(context.Context) error
	close    func(context.Context) error
}

func (b *broken) Describe() backend.Description {
	if b.describe != nil {
		return b.describe()
	}
	return b.Driver.Describe()
}

func (b *broken) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	b.world.mu.Lock()
	if b.world.requests[r.HoldID] == "" {
		b.world.requests[r.HoldID] = r.RequestID
	}
	b.world.mu.Unlock()
	if b.acquire != nil {
		return b.acquire(ctx, r)
	}
	return b.Driver.Acquire(ctx, r)
}

func (b *broken) Look(ctx context.Context, name string) (backend.State, error) {
	if b.look != nil {
		return b.look(ctx, name)
	}
	return b.Driver.Look(ctx, name)
}

func (b *broken) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	if b.list != nil {
		return b.list(ctx, prefix)
	}
	return b.Driver.List(ctx, prefix)
}

func (b *broken) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	if b.all != nil {
		return b.all(ctx, rs)
	}
	return b.Driver.AcquireAll(ctx, rs)
}

func (b *broken) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	if b.renew != nil {
		return b.renew(ctx, grants)
	}
	return b.Driver.Renew(ctx, grants)
}

func (b *broken) Release(ctx context.Context, g backend.Grant) error {
	if b.release != nil {
		return b.release(ctx, g)
	}
	return b.Driver.Release(ctx, g)
}

func (b *broken) Ping(ctx context.Context) error {
	if b.ping != nil {
		return b.ping(ctx)
	}
	return b.Driver.Ping(ctx)
}

func (b *broken) Close(ctx context.Context) error {
	if b.close != nil {
		return b.close(ctx)
	}
	return b.Driver.Close(ctx)
}

func (b *broken) Watch(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	if b.watch != nil {
		return b.watch(ctx, name, since)
	}
	return b.Driver.Watch(ctx, name, since)
}

// retell makes Watch yield what tell makes of each event; retold makes one for each watch.
func (b *broken) retell(retold func() (tell func(e backend.Change) []backend.Change)) {
	b.watch = func(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
		return func(yield func(backend.Change, error) bool) {
			tell := retold()
			for e, err := range b.Driver.Watch(ctx, name, since) {
				if err != nil {
					yield(e, err)
					return
				}
				for _, told := range tell(e) {
					if !yield(told, nil) {
						return
					}
				}
			}
		}
	}
}

// world is what the clients of one broken service share.
type world struct {
	t     testing.TB
	store *memory.Store

	mu       sync.Mutex // protects the following fields
	released chan struct{}
	base     map[string]fencing.Token // where the count of a name began anew
	next     fencing.Token
	holders  map[string]string
	requests map[string]string            // request ids by hold ids, which are all that a driver shows
	noPlace  map[string]bool              // names with evicted waiters
	metadata map[string]map[string]string // by hold ids, as the callers gave it
}

// request is the id of the request of a hold that somebody can see.
func (w *world) request(h backend.Holder) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.requests[h.HoldID]
}

func (m mutant) harness(t testing.TB) conformance.Harness {
	w := &world{
		t: t, store: memory.NewStore(&memory.Options{Clock: backend.GoClock()}), released: make(chan struct{}),
		base:    map[string]fencing.Token{},
		holders: map[string]string{}, requests: map[string]string{}, noPlace: map[string]bool{},
		metadata: map[string]map[string]string{},
	}
	h := memoryHarness(t)
	client := func() *broken {
		b := &broken{Driver: w.store.Driver(), world: w}
		m.apply(b)
		return b
	}
	h.New = func(testing.TB) backend.Driver { return client() }
	h.Linked = func(testing.TB) (backend.Driver, fault.Link) {
		b := client()
		return b, conformance.NetworkLink(b.Driver)
	}
	h.Server = conformance.Server{
		Restart: func(testing.TB) {
			w.forget("")
			if m.restart != nil {
				m.restart(w)
			}
			w.store.Restart()
		},
		Stop:        func(testing.TB) { w.store.Stop() },
		Start:       func(testing.TB) { w.store.Start() },
		Pause:       func(testing.TB) { w.store.Pause() },
		Resume:      func(testing.TB) { w.store.Resume() },
		Evict:       func(_ testing.TB, name string) { w.forget(name); w.store.Evict(name) },
		EvictWaiter: func(_ testing.TB, name string) int { w.evicted(name); return w.store.EvictWaiters(name) },
		Wipe:        func(testing.TB) { w.forget(""); w.store.Wipe() },
		Compact:     func(testing.TB, string) { w.store.Compact() },

		RefuseRelease: refuse(w.store, memory.RefuseReleases),
		RefuseWrites:  refuse(w.store, memory.RefuseWrites),
	}
	h.Ahead = func(t testing.TB, token fencing.Token) {
		if err := w.store.Ahead(token); err != nil {
			t.Fatal(err)
		}
	}
	h.Leftovers = func() ([]string, error) { return make([]string, w.store.Names()), nil }
	return h
}

// now reads the clock that the drivers use.
func now() backend.Instant { return backend.GoClock().Now() }

// getThenSet looks and takes in two steps.
func getThenSet(b *broken) {
	w := b.world
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		for ctx.Err() == nil {
			w.mu.Lock()
			holder := w.holders[r.Name]
			w.mu.Unlock()
			runtime.Gosched()
			if holder == "" {
				time.Sleep(50 * time.Microsecond) // the round trip between the two steps
				w.mu.Lock()
				w.holders[r.Name] = r.RequestID
				w.mu.Unlock()
				g := r.Grant()
				g.SentAt = now()
				return g, nil
			}
			if !r.Wait {
				return backend.Grant{}, &backend.HeldError{Name: r.Name}
			}
			time.Sleep(100 * time.Microsecond)
		}
		return backend.Grant{}, ctx.Err()
	}
	b.release = func(_ context.Context, g backend.Grant) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.holders[g.Name] != g.RequestID {
			return backend.ErrNotHeld
		}
		delete(w.holders, g.Name)
		return nil
	}
}

// broadcast makes waiters hear of releases by a message to all of them that each answers with an attempt, and poll
// besides. Messages over a link that is broken get lost.
func (b *broken) broadcast(poll time.Duration) {
	w := b.world
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		wait := r.Wait
		r.Wait = false
		for {
			w.mu.Lock()
			heard := w.released
			w.mu.Unlock()
			g, err := b.Driver.Acquire(ctx, r)
			if !wait || !errors.Is(err, backend.ErrHeld) {
				return g, err
			}
			next := time.NewTimer(poll)
			select {
			case <-heard:
				time.Sleep(rand.N(5 * time.Millisecond)) // subscribers hear in no particular order
				// The message comes over the same link: see whether it would have.
				probe, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				if b.Ping(probe) != nil {
					select {
					case <-next.C:
					case <-ctx.Done():
					}
				}
				cancel()
			case <-next.C:
			case <-ctx.Done():
			}
			next.Stop()
			if ctx.Err() != nil {
				return g, &backend.CallError{Driver: "memory", Call: "acquire", Name: r.Name, Err: ctx.Err()}
			}
		}
	}
	b.release = func(ctx context.Context, g backend.Grant) error {
		err := b.Driver.Release(ctx, g)
		w.mu.Lock()
		defer w.mu.Unlock()
		close(w.released)
		w.released = make(chan struct{})
		return err
	}
}

// renumber replaces tokens by what number makes of them.
func (b *broken) renumber(number func(name string, token fencing.Token) fencing.Token) {
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		g, err := b.Driver.Acquire(ctx, r)
		if err == nil {
			g.Token = number(g.Name, g.Token)
		}
		return g, err
	}
	b.restoreToken()
}

// restoreToken restores the store's tokens, which are in the incarnation.
func (b *broken) restoreToken() {
	original := func(g backend.Grant) backend.Grant {
		if token, err := fencing.ParseToken(g.Incarnation); err == nil {
			g.Token = token
		}
		return g
	}
	b.release = func(ctx context.Context, g backend.Grant) error { return b.Driver.Release(ctx, original(g)) }
	b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
		restored := make([]backend.Grant, len(grants))
		for i, g := range grants {
			restored[i] = original(g)
		}
		return b.Driver.Renew(ctx, restored)
	}
}

// forget makes the count of name, or of all names, begin anew.
func (w *world) forget(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if name == "" {
		clear(w.base)
		return
	}
	delete(w.base, name)
}

// evicted notes that the waiters for name have lost their places.
func (w *world) evicted(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.noPlace[name] = true
}

// evict ends every hold that was granted less than d ago.
func (w *world) evict(d time.Duration) {
	probe := w.store.Driver()
	for held := range probe.List(context.Background(), "") {
		if len(held.Holders) > 0 && time.Since(held.Holders[0].Since) < d {
			w.store.Evict(held.Name)
		}
	}
	_ = probe.Close(context.Background())
}

func (b *broken) IssuesFencingTokens() backend.Driver {
	if b.promise != nil {
		return b.promise()
	}
	return b
}
