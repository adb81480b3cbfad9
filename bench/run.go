package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
)

// lab has the system under test and the options of a run.
type lab struct {
	*options
	system *system
	names  atomic.Int64
}

// on returns the system on which p runs.
func (l *lab) on(p peer) *system { return cmp.Or(p.at, l.system) }

// fresh returns an unused name.
func (l *lab) fresh(what string) string { return fmt.Sprintf("bench/%s/%d", what, l.names.Add(1)) }

// length returns full, or quick in a quick run.
func (l *lab) length(full, quick time.Duration) time.Duration {
	if l.quick {
		return quick
	}
	return full
}

// lossTTL is the TTL in scenarios that wait for its end.
const lossTTL = 3 * time.Second

// ttl is lossTTL, or two seconds in a quick run.
func (l *lab) ttl() time.Duration { return l.length(lossTTL, 2*time.Second) }

// round is one measurement of one peer, by the phase of a scenario.
type round struct {
	scope
	*lab
	peer peer
	at   *system // the system on which the peer runs
	size int     // of the scenario
	s    sample  // of the last row
	rows []row
}

// row begins another row, to which r.s then belongs. The peer's own row is omitted if it is empty.
func (r *round) row(name string, role role) {
	r.s = sample{}
	r.rows = append(r.rows, row{Name: name, Role: role, Rounds: []sample{r.s}})
}

// name returns a fresh name, prepared for the peer.
func (r *round) name(what string) string {
	name := r.fresh(what)
	if r.peer.seed != nil {
		r.must(r.peer.seed(r.ctx, name))
	}
	return name
}

// open makes n clients and warms them by one cycle each, which opens connections and loads scripts.
func (r *round) open(n int, o clientOptions) []*client {
	o.addr = cmp.Or(o.addr, r.at.addr())
	clients := make([]*client, 0, n)
	r.later(func() { _ = each(len(clients), func(i int) error { clients[i].end(); return nil }) })
	for range n {
		c, err := r.peer.client(r.ctx, o)
		r.must(err)
		clients = append(clients, c)
		r.must(c.cycle(r.ctx, r.name("warm")))
	}
	return clients
}

// client returns the only client of a round, or one with separate options.
func (r *round) client(ttl time.Duration) *client { return r.open(1, clientOptions{ttl: ttl})[0] }

// proxy is a network between a client and the service.
func (r *round) proxy() (*fault.Proxy, clientOptions) {
	proxy, err := fault.NewProxy(r.at.addr())
	r.must(err)
	r.closing(proxy)
	return proxy, clientOptions{addr: proxy.Addr(), proxied: true, ttl: r.ttl()}
}

func (r *round) lock(c *client, name string) hold {
	h, err := c.lock(r.ctx, name)
	r.must(err)
	return h
}

// grant is the time of a grant that was released immediately.
type grant struct {
	at  time.Time
	err error
}

// granting waits for a lock that another client holds, and releases it.
func (r *round) granting(c *client, name string) <-chan grant {
	granted := make(chan grant, 1)
	go func() {
		h, err := c.lock(r.ctx, name)
		at := time.Now()
		if err == nil {
			err = h.Release(r.ctx)
		}
		granted <- grant{at, err}
	}()
	return granted
}

// await returns the time of the grant.
func (r *round) await(granted <-chan grant) time.Time {
	g := <-granted
	r.must(g.err)
	return g.at
}

// once runs one round of one peer. Every measurement starts with an empty store.
func (sc scenario) once(ctx context.Context, l *lab, p peer, empty func(context.Context) error) *round {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(sc.limit, time.Minute))
	defer cancel()
	r := &round{scope: scope{ctx: ctx}, lab: l, peer: p, at: l.on(p), size: sc.size}
	r.row(p.name, p.role)
	err := r.try(func() {
		defer r.end()
		r.must(empty(ctx))
		sc.phase(r)
	})
	if err != nil {
		r = &round{scope: scope{err: err}} // its figures may be incomplete
		r.row(p.name, p.role)
	} else if len(r.rows) > 1 && len(r.rows[0].Rounds[0]) == 0 {
		r.rows = r.rows[1:]
	}
	return r
}

// loud is the number of cores that others may use before a round counts as disturbed.
const loud = 0.35

// quiet repeats a round while it is disturbed and l.patience lasts, and returns the least disturbed round. Only the
// load by other processes counts: the figures of a round must not decide whether it is kept.
func (l *lab) quiet(measure func() *round) *round {
	best := measure()
	for best.err == nil && foreign(best.rows) > loud && l.patience > 0 {
		began := time.Now()
		again := measure()
		l.patience -= time.Since(began)
		if again.err != nil || foreign(again.rows) < foreign(best.rows) {
			best = again
		}
	}
	return best
}

// rows runs all rounds. Without sc.together it runs round by round, and in each round peer by peer (ABAB), so that a
// drift of the machine's speed affects all peers equally; each round begins with another peer. With sc.together,
// rounds run concurrently: they wait for a TTL and use no CPU.
func (sc scenario) rows(ctx context.Context, l *lab, peers []peer) []row {
	rounds := sc.rounds
	if l.quick {
		rounds = 1
		if sc.together {
			rounds = 2
		}
	}
	found := make([][]row, len(peers))
	var mu sync.Mutex
	add := func(i, n int, r *round) {
		mu.Lock()
		defer mu.Unlock()
		for _, got := range r.rows {
			at := slices.IndexFunc(found[i], func(known row) bool { return known.Name == got.Name })
			if at < 0 {
				at = len(found[i])
				found[i] = append(found[i], row{Name: got.Name, Role: got.Role, Rounds: make([]sample, rounds)})
			}
			known := &found[i][at]
			known.Rounds[n] = got.Rounds[0]
			if r.err != nil && known.Error == "" { // the figures of this round are missing
				known.Error = r.err.Error()
			}
		}
	}
	once := sync.OnceValue(func() error { return l.system.empty(ctx) })
	var all sync.WaitGroup
	for n := range rounds {
		for i := range peers {
			i = (i + n) % len(peers)
			p := peers[i]
			if sc.together {
				all.Go(func() { add(i, n, sc.once(ctx, l, p, func(context.Context) error { return once() })) })
			} else if ctx.Err() == nil {
				add(i, n, l.quiet(func() *round { return sc.once(ctx, l, p, l.on(p).empty) }))
			}
		}
	}
	all.Wait()
	return slices.Concat(found...)
}

// run measures one scenario; false if there is no peer for it.
func (sc scenario) run(ctx context.Context, l *lab) (table, bool) {
	peers := slices.DeleteFunc(slices.Clone(l.system.peers), func(p peer) bool {
		return !selected(p.name, l.peers) || !sc.suits(l.on(p), p)
	})
	if len(peers) == 0 {
		return table{}, false
	}
	began := time.Now()
	rows := sc.rows(ctx, l, peers)
	sc.relate(rows)
	return newTable(l.system, sc, rows, time.Since(began)), true
}

// relate adds the ratios of each round to the same round of the yardsticks.
func (sc scenario) relate(rows []row) {
	floor := slices.IndexFunc(rows, func(r row) bool { return r.Name == sc.floor })
	if floor < 0 && sc.floor != "" {
		floor = slices.IndexFunc(rows, func(r row) bool { return r.Role == roleFloor })
	}
	others := strings.Split(sc.second, ", ")
	second := slices.IndexFunc(rows, func(r row) bool { return slices.Contains(others, r.Name) })
	ratio := func(key, of string, base int) {
		for _, r := range rows {
			for n, s := range r.Rounds {
				if v, ok := s[of]; ok && base >= 0 && rows[base].Rounds[n][of] > 0 {
					s[key] = v / rows[base].Rounds[n][of]
				}
			}
		}
	}
	ratio("x", cmp.Or(sc.ratioOf, "ops"), floor)
	ratio("cpu-x", "client-us", floor)
	ratio("x2", "ops", second)
}

// foreign returns the highest load by others in any round, in cores.
func foreign(rows []row) float64 {
	most := math.NaN()
	for _, r := range rows {
		most = highest.of([]float64{most, r.figure(column{key: "foreign", pick: highest})})
	}
	return most
}

// scenario is one table.
type scenario struct {
	name    string // of a kind: all of its names
	about   string // with {n} for the size
	columns string
	rounds  int // in a quick run: 1, or 2 with together

	// floor names the peer to which the keys x (operations per second, or ratioOf) and cpu-x (client CPU) relate. Without
	// such a peer, these relate to the first floor in the table. Empty: no ratio.
	floor, ratioOf string
	second         string // the peers; x2 relates to the first of them in the table

	grows string // the axis of the curve that has the scenario as a point; empty: no curve
	along string // the keys that are shown along the curve

	size     int           // the number in the name
	limit    time.Duration // of a round; 0: a minute
	together bool          // all rounds run at the same time
	suits    func(s *system, p peer) bool
	phase    func(r *round)
}

// find returns the scenario of a name. The number in it is its size: hold10k has 10,000.
func find(name string) scenario {
	sc := kinds[slices.IndexFunc(kinds, func(k scenario) bool { return slices.Contains(strings.Fields(k.name), name) })]
	sc.name, sc.size = name, 1
	if n, err := strconv.Atoi(strings.Trim(name, "abcdefghijklmnopqrstuvwxyz-")); err == nil {
		sc.size = n
	}
	if strings.HasSuffix(name, "k") {
		sc.size *= 1000
	}
	sc.about = strings.ReplaceAll(sc.about, "{n}", strconv.Itoa(sc.size))
	return sc
}

// column is a column of a table.
type column struct {
	key   string
	title string
	pick  pick
}

// columns reads "key=title; key=title<; key": the lowest (<) or the highest (>) of the rounds, or else the median.
func columns(text string) (all []column) {
	picks := map[string]pick{"": median, "<": lowest, ">": highest}
	for part := range strings.SplitSeq(text, "; ") {
		bare := strings.TrimRight(part, "<>")
		key, title, _ := strings.Cut(bare, "=")
		all = append(all, column{key, cmp.Or(title, key), picks[part[len(bare):]]})
	}
	return all
}

// target is a target of performance.md, for ours on some systems in some scenarios.
type target struct {
	systems, scenarios string // lists
	key, relation      string // <= or >=
	value              float64
	text               string
}

// targets returns the targets of a scenario on a system.
func (sc scenario) targets(s *system) []target {
	return slices.DeleteFunc(slices.Clone(targets), func(t target) bool {
		return !slices.Contains(strings.Split(t.systems, ", "), s.name) ||
			!slices.Contains(strings.Fields(t.scenarios), sc.name)
	})
}

// selected reports whether a list of names or prefixes, separated by commas, selects name. An empty list selects all.
func selected(name, only string) bool {
	return only == "" || slices.ContainsFunc(strings.Split(only, ","), func(want string) bool {
		want = strings.TrimSpace(want)
		return want != "" && strings.HasPrefix(name, want)
	})
}
