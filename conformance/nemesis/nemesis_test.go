package nemesis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/check"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/conformance/nemesis"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testtier"
)

func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{nemesis.Role: nemesis.Client(dial)})
	testtier.Wide(8)
	os.Exit(m.Run())
}

const ttl = 500 * time.Millisecond

// world is a lock service in this process.
type world struct {
	store     *memory.Store
	processes atomic.Int64 // number of server processes so far
	wrap      func(client int, d *memory.Driver) backend.Driver

	mu      sync.Mutex
	drivers []*memory.Driver
}

// service returns the service of a new world, with drivers wrapped by wrap.
func service(wrap func(client int, d *memory.Driver) backend.Driver) nemesis.Service {
	w := &world{store: memory.NewStore(nil), wrap: wrap}
	probe := w.store.Driver()
	does := func(act func()) func(context.Context, int) error {
		return func(context.Context, int) error {
			act()
			return nil
		}
	}
	return nemesis.Service{
		Driver: "memory", TTL: ttl, Processes: -1, Inside: 4,
		Client: func(testing.TB) (string, fault.Links) {
			w.mu.Lock()
			defer w.mu.Unlock()
			d := w.store.Driver()
			w.drivers = append(w.drivers, d)
			return fmt.Sprint(len(w.drivers) - 1), fault.Links{conformance.NetworkLink(d)}
		},
		Open: func(_ context.Context, target string) (backend.Driver, error) {
			var i int
			if _, err := fmt.Sscan(target, &i); err != nil {
				return nil, err
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.wrap == nil {
				return w.drivers[i], nil
			}
			return w.wrap(i, w.drivers[i]), nil
		},
		Kill: does(w.store.Stop),
		Start: does(func() {
			w.processes.Add(1)
			w.store.Start()
		}),
		Pause: does(w.store.Pause), Resume: does(w.store.Resume),
		Probe: func(ctx context.Context, _ int) (string, error) {
			return fmt.Sprint(w.processes.Load()), probe.Ping(ctx)
		},
		RefuseRelease: refuse(w.store, memory.RefuseReleases), RefuseWrites: refuse(w.store, memory.RefuseWrites),
		More: []nemesis.Kind{
			nemesis.NewLapse("delete", "one name is deleted", func(_ context.Context, name string) error {
				w.store.Evict(name)
				return nil
			}),
			nemesis.NewLapse("wipe", "everything is deleted", func(ctx context.Context, _ string) error {
				for held, err := range probe.List(ctx, "") {
					if err != nil {
						return err
					}
					w.store.Evict(held.Name)
				}
				return nil
			}),
			nemesis.NewKind("hiccup", "the server freezes briefly", 0, 0.1,
				func(ctx context.Context, _ uint32, d time.Duration) error {
					w.store.Pause()
					defer w.store.Resume()
					time.Sleep(d)
					return nil
				}),
		},
		Leftovers: func() ([]string, error) {
			if n := w.store.Names(); n > 0 {
				return []string{fmt.Sprint(n, " names")}, nil
			}
			return nil, nil
		},
	}
}

// refuse returns a refusal of the store.
func refuse(store *memory.Store, what memory.Refusal) func(testing.TB, string) func() {
	return func(testing.TB, string) func() {
		store.Refuse(what)
		return func() { store.Refuse(memory.RefuseNothing) }
	}
}

// whole bounds a recovery in tests that need the whole schedule: a run skips steps if it is later than that by more
// than half its duration.
const whole = 4 * time.Minute

// passed fails the test for violations, and skips it if a busy machine leaves the result open.
func passed(t *testing.T, r nemesis.Result) {
	t.Helper()
	for _, v := range r.Failures() {
		t.Error(v)
	}
	for _, v := range r.Violations {
		if v.Kind == nemesis.Inconclusive && !t.Failed() {
			t.Skipf("%s%v", stallmeter.Mark, v)
		}
	}
}

// plan returns a short plan.
func plan(kinds ...string) nemesis.Plan {
	return nemesis.Plan{Seed: 3, Duration: 4 * time.Second, Kinds: kinds}
}

func TestWholeDriverPasses(t *testing.T) {
	t.Parallel()
	p := plan()
	p.Duration, p.Recovery = 8*time.Second, whole
	r := nemesis.Play(t, service(nil), p)
	t.Log(r)
	passed(t, r)
	if r.Steps != len(r.Schedule.Steps) || r.Faults < r.Steps || r.Grants < 100 {
		t.Errorf("%d of %d steps, %d faults, %d grants: too little to tell anything",
			r.Steps, len(r.Schedule.Steps), r.Faults, r.Grants)
	}
	summary := r.String()
	for _, want := range []string{
		"soak: driver=memory seed=3 ", " violations=0 ", " worst margin=", " recovery max=", "fault=node-kill count=",
	} {
		if !strings.Contains(summary, want) {
			t.Errorf("the summary lacks %q:\n%s", want, summary)
		}
	}
}

// Two runs with one seed have the same schedule.
func TestSameSeedSameSchedule(t *testing.T) {
	t.Parallel()
	var printed []string
	for range 2 {
		p := plan()
		p.Duration = time.Second
		r := nemesis.Play(quiet{t}, service(nil), p)
		for _, v := range r.Failures() {
			t.Error(v)
		}
		printed = append(printed, r.Schedule.String())
	}
	if printed[0] != printed[1] || !strings.Contains(printed[0], " for ") {
		t.Errorf("one seed, two schedules:\n%s\n%s", printed[0], printed[1])
	}
}

// After a refused release, a hold ends within its TTL, even if renewals are refused.
func TestRefusals(t *testing.T) {
	t.Parallel()
	p := plan("refuse-release", "refuse-writes")
	p.Duration, p.Recovery = 6*time.Second, whole
	r := nemesis.Play(t, service(nil), p)
	t.Log(r)
	passed(t, r)
	for _, kind := range p.Kinds {
		if r.Kinds[kind] == nil {
			t.Errorf("no %s in %d steps", kind, r.Steps)
		}
	}
}

// A service without these hooks has no such kinds.
func TestRefusalsNeedHooks(t *testing.T) {
	t.Parallel()
	s := service(nil)
	refusals := func() (all []string) {
		for _, k := range nemesis.Kinds(s, false) {
			if strings.HasPrefix(k.Slug, "refuse-") {
				all = append(all, k.Slug)
			}
		}
		return all
	}
	if got := refusals(); !slices.Equal(got, []string{"refuse-release", "refuse-writes"}) {
		t.Errorf("kinds with hooks: %q", got)
	}
	s.RefuseRelease, s.RefuseWrites = nil, nil
	if got := refusals(); got != nil {
		t.Errorf("kinds without hooks: %q", got)
	}
}

// mutant is a driver with one method replaced.
type mutant struct {
	*memory.Driver
	acquire func(context.Context, backend.Request) (backend.Grant, error)
	renew   func(context.Context, []backend.Grant) []backend.Renewal
	release func(context.Context, backend.Grant) error
	ending  func() // before Close
}

func (m *mutant) Release(ctx context.Context, g backend.Grant) error {
	if m.release != nil {
		return m.release(ctx, g)
	}
	return m.Driver.Release(ctx, g)
}

func (m *mutant) Close(ctx context.Context) error {
	if m.ending != nil {
		m.ending()
	}
	return m.Driver.Close(ctx)
}

// hoard makes a driver that drops a hold whose release was refused, and still renews it.
func hoard(_ int, d *memory.Driver) backend.Driver {
	ctx, stop := context.WithCancel(context.Background())
	var forgotten sync.Map
	return &mutant{Driver: d, ending: stop, release: func(releasing context.Context, g backend.Grant) error {
		if _, is := forgotten.Load(g.RequestID); is {
			return backend.ErrNotHeld
		}
		err := d.Release(releasing, g)
		if !errors.Is(err, backend.ErrMisconfigured) {
			return err
		}
		forgotten.Store(g.RequestID, nil)
		go func() {
			for ctx.Err() == nil {
				d.Renew(ctx, []backend.Grant{g})
				time.Sleep(g.TTL / 8)
			}
		}()
		return err
	}}
}

func (m *mutant) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if m.acquire != nil {
		return m.acquire(ctx, r)
	}
	return m.Driver.Acquire(ctx, r)
}

func (m *mutant) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	return nil, backend.ErrUnsupported
}

func (m *mutant) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	if m.renew != nil {
		return m.renew(ctx, grants)
	}
	return m.Driver.Renew(ctx, grants)
}

// A run must catch broken drivers, even if they are correct without faults.
func TestMutantsAreCaught(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		wrap  func(client int, d *memory.Driver) backend.Driver
		kinds []string
		want  []check.Kind // any of these
		slow  bool
	}{
		"one client locks another name": {
			func(client int, d *memory.Driver) backend.Driver {
				if client != 2 {
					return d
				}
				return &mutant{Driver: d, acquire: func(ctx context.Context, r backend.Request) (backend.Grant, error) {
					name := r.Name
					r.Name += "/mine"
					g, err := d.Acquire(ctx, r)
					g.Name = name
					return g, err
				}, renew: func(_ context.Context, grants []backend.Grant) []backend.Renewal {
					all := make([]backend.Renewal, len(grants))
					for i, g := range grants {
						all[i] = backend.Renewal{SentAt: backend.SystemClock().Now(), TTL: g.TTL}
					}
					return all
				}}
			},
			nil, []check.Kind{check.Overlap, check.Early}, true, // the run waits for a name that is never released
		},
		"the TTL is returned longer than granted": {
			func(_ int, d *memory.Driver) backend.Driver {
				return &mutant{Driver: d, acquire: func(ctx context.Context, r backend.Request) (backend.Grant, error) {
					full := r.TTL
					r.TTL /= 4
					g, err := d.Acquire(ctx, r)
					g.TTL = full
					return g, err
				}}
			},
			[]string{"link-drop", "link-hold", "link-requests"}, []check.Kind{check.Overlap, check.Early}, false,
		},
		"tokens decrease": {
			func(client int, d *memory.Driver) backend.Driver {
				return &mutant{Driver: d, acquire: func(ctx context.Context, r backend.Request) (backend.Grant, error) {
					g, err := d.Acquire(ctx, r)
					if err == nil && client == 1 && r.Kind == backend.KindExclusive {
						g.Token = fencing.Token(1)
					}
					return g, err
				}}
			},
			[]string{"link-reset"}, []check.Kind{check.TokenOrder, check.TokenTwice}, true,
		},
		"a hold is renewed after its release was refused": {
			hoard, []string{"refuse-release"}, []check.Kind{nemesis.Failed}, false,
		},
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			if c.slow {
				testtier.Only(t)
			}
			t.Parallel()
			p := plan(c.kinds...)
			p.Search = time.Second // the search in an illegal history may not end
			r := nemesis.Play(quiet{t}, service(c.wrap), p)
			caught := slices.ContainsFunc(
				r.Violations, func(v check.Violation) bool { return slices.Contains(c.want, v.Kind) },
			)
			silent := slices.IndexFunc(r.Violations, func(v check.Violation) bool { return v.Kind == nemesis.Inconclusive })
			switch {
			case caught:
			case silent >= 0 && slices.Contains(c.want, nemesis.Failed): // it failed, possibly because of a busy machine
				t.Skipf("%s%v", stallmeter.Mark, r.Violations[silent])
			default:
				t.Errorf("survived, with %v", r.Violations)
			}
			left(t, r, "run.txt", "history.jsonl")
		})
	}
}

// quiet keeps the log of intended failures out of the test's log, and their dumps in the test's folder.
type quiet struct{ testing.TB }

func (q quiet) Log(...any)          {}
func (q quiet) Logf(string, ...any) {}

// left checks the files of a dump, and removes it.
func left(t *testing.T, r nemesis.Result, names ...string) {
	t.Helper()
	if r.Dump == "" {
		t.Error("nothing was dumped")
		return
	}
	for _, name := range names {
		if text, err := os.ReadFile(r.Dump + "/" + name); err != nil || len(text) == 0 {
			t.Errorf("%s: %d bytes, %v", name, len(text), err)
		}
	}
	if !strings.HasPrefix(r.Dump, os.TempDir()) {
		return // an artifact folder, which go test keeps
	}
	if err := os.RemoveAll(r.Dump); err != nil {
		t.Error(err)
	}
}

// deaf is a link that ignores its orders.
type deaf struct{ fault.Link }

func (deaf) Hold(fault.Direction)                 {}
func (deaf) Drop(fault.Direction)                 {}
func (deaf) Delay(fault.Direction, time.Duration) {}
func (deaf) Refuse()                              {}
func (deaf) Reset()                               {}

// unused is a link without traffic.
type unused struct{ deaf }

func (unused) Seen(fault.Direction) int64 { return 0 }

// severed is a link that has severed no connection.
type severed struct{ deaf }

func (severed) Severed() int64 { return 0 }

// A fault that does not happen must fail the run.
func TestFaultThatDoesNotHappen(t *testing.T) {
	t.Parallel()
	links := func(s *nemesis.Service, other func(fault.Link) fault.Link) {
		client := s.Client
		s.Client = func(t testing.TB) (string, fault.Links) {
			target, links := client(t)
			return target, fault.Links{other(links[0])}
		}
	}
	nothing := func(context.Context, int) error { return nil }
	idle := func(testing.TB, string) func() { return func() {} }
	quorum := func(s *nemesis.Service) {
		s.Nodes = 3
		s.Leader = func(context.Context, uint64) (int, uint64, error) { return 1, 7, nil }
		s.Cut, s.Heal, s.Said = func(int, int) {}, func() {}, func(int, int) int64 { return 0 }
	}
	for name, c := range map[string]struct {
		kind  string
		spoil func(*nemesis.Service)
	}{
		"the server is not killed":    {"node-kill", func(s *nemesis.Service) { s.Kill = nothing }},
		"the server is not paused":    {"node-pause", func(s *nemesis.Service) { s.Pause = nothing }},
		"the process is not replaced": {"node-kill", func(s *nemesis.Service) { same(s) }},
		"messages are not held": {
			"link-hold", func(s *nemesis.Service) { links(s, func(l fault.Link) fault.Link { return deaf{l} }) },
		},
		"no message passes": {
			"link-replies",
			func(s *nemesis.Service) { links(s, func(l fault.Link) fault.Link { return unused{deaf{l}} }) },
		},
		"messages are not delayed": {
			"link-delay",
			func(s *nemesis.Service) { links(s, func(l fault.Link) fault.Link { return unused{deaf{l}} }) },
		},
		"connections are not refused": {
			"link-refuse", func(s *nemesis.Service) { links(s, func(l fault.Link) fault.Link { return deaf{l} }) },
		},
		"there is no connection": {
			"link-reset",
			func(s *nemesis.Service) { links(s, func(l fault.Link) fault.Link { return severed{deaf{l}} }) },
		},
		"releases are not refused":            {"refuse-release", func(s *nemesis.Service) { s.RefuseRelease = idle }},
		"writes are not refused":              {"refuse-writes", func(s *nemesis.Service) { s.RefuseWrites = idle }},
		"the leader leads again":              {"leader-partition", quorum},
		"the follower is not cut off":         {"minority", quorum},
		"no peer is cut off in one direction": {"one-way-peers", quorum},
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			s := service(nil)
			c.spoil(&s)
			p := plan(c.kind)
			p.Patience = 3 * time.Second
			r := nemesis.Play(quiet{t}, s, p)
			if !slices.ContainsFunc(r.Violations, func(v check.Violation) bool { return v.Kind == check.NoFault }) {
				t.Errorf("%d faults, found %v; want that the fault did not happen", r.Faults, r.Violations)
			}
			left(t, r, "run.txt")
		})
	}
}

// same makes the server end and restart with the same process identity.
func same(s *nemesis.Service) {
	probe := s.Probe
	s.Probe = func(ctx context.Context, node int) (string, error) {
		_, err := probe(ctx, node)
		return "the same", err
	}
}

// Violations after faults that no driver promises to survive are only counted.
func TestReported(t *testing.T) {
	t.Parallel()
	p := plan()
	p.Reported = true
	r := nemesis.Play(t, service(nil), p)
	t.Log(r)
	if len(r.Failures()) > 0 || r.Kinds["delete"] == nil || r.Kinds["wipe"] == nil {
		t.Errorf("failures %v, kinds %v", r.Failures(), r.Kinds)
	}
	if len(r.Violations) == 0 {
		t.Error("holds vanished and nobody lost anything")
	}
}

// dial opens a driver of the bundled server, for clients in their own process.
func dial(ctx context.Context, target string) (backend.Driver, error) {
	proxy, addr, _ := strings.Cut(target, ",")
	d := builtin.New([]string{addr}, &builtin.Options{
		Dial: func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", proxy)
		},
	})
	return d, d.Ping(ctx)
}

// Faults stop and kill real processes.
func TestProcesses(t *testing.T) {
	t.Parallel()
	addr := freeport.Addresses(t, 1)[0]
	s, err := server.Start(t.Context(), server.Config{
		DataDir: t.TempDir(), Listen: addr, MinTTL: 100 * time.Millisecond, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	kinds := []string{"stop-holder", "stop-waiter", "kill-holder"}
	p := plan(kinds...)
	p.Duration, p.Recovery, p.OneByOne = 9*time.Second, whole, true
	r := nemesis.Play(t, nemesis.Service{
		Driver: "one", TTL: 2 * ttl, Processes: 2, Inside: 1,
		Client: func(t testing.TB) (string, fault.Links) {
			proxy, err := fault.NewProxy(addr)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { proxy.Close() })
			return proxy.Addr() + "," + addr, fault.Links{proxy}
		},
		Open: dial,
	}, p)
	t.Log(r)
	passed(t, r)
	for _, kind := range kinds {
		if r.Kinds[kind] == nil {
			t.Errorf("no %s in %d steps", kind, r.Steps)
		}
	}
}

func (m *mutant) IssuesFencingTokens() backend.Driver { return m }
