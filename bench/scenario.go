package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
)

// scenario is one table. One file per kind.
type scenario struct {
	name    string
	about   string
	columns []column
	targets map[string][]target // by the name of the system

	// floor names the peer to which the keys x (operations per second, or ratioOf) and cpu-x (client CPU) relate. Where
	// there is none of that name, that is the first floor in the table. Empty: no ratio.
	floor   string
	ratioOf string
	// second names the peers of which the first one in the table is what x2 relates to.
	second []string

	// curve is what the scenario is a point of, nil for none.
	curve *curve

	rounds, quickRounds int

	// suits says which peers take part.
	suits func(system, peer) bool

	// all runs every round of every peer: interleaved or together.
	all func(ctx context.Context, l *lab, peers []peer, rounds int) []row
}

// column of a table.
type column struct {
	key   string
	title string
	pick  pick
}

// columns reads "key=title; key=title<; key": the lowest (<) or the highest (>) of the rounds, or else the median.
func columns(text string) (all []column) {
	for part := range strings.SplitSeq(text, "; ") {
		c := column{pick: median}
		switch text := part[:len(part)-1]; part[len(text):] {
		case "<":
			part, c.pick = text, lowest
		case ">":
			part, c.pick = text, highest
		}
		var titled bool
		if c.key, c.title, titled = strings.Cut(part, "="); !titled {
			c.title = c.key
		}
		all = append(all, c)
	}
	return all
}

// target of performance.md, for ours.
type target struct {
	text  string
	key   string
	least bool // the figure must be at least value; otherwise at most
	value float64
}

func atLeast(key string, value float64, text string) target {
	return target{text: text, key: key, least: true, value: value}
}

func atMost(key string, value float64, text string) target {
	return target{text: text, key: key, value: value}
}

// everywhere are the targets of the services that bear faults.
func everywhere(all ...target) map[string][]target {
	return map[string][]target{"redis": all, "etcd": all, "zookeeper": all, "builtin": all}
}

// row of a table: one peer, or one size.
type row struct {
	name    string
	role    role
	samples []sample
	err     error // of the first round that failed; its figures are missing
}

func (r *row) add(s sample, err error) {
	if err != nil {
		if r.err == nil {
			r.err = err
		}
		s = sample{}
	}
	r.samples = append(r.samples, s)
}

func (r *row) figure(c column) float64 {
	var values []float64
	for _, s := range r.samples {
		if v, ok := s[c.key]; ok {
			values = append(values, v)
		}
	}
	return c.pick.of(values)
}

// lab is where scenarios run.
type lab struct {
	system system
	quick  bool
	only   string // the peers that were asked for

	// patience is how long rounds may be repeated, in all, because others used the processors meanwhile.
	patience time.Duration

	mu    sync.Mutex
	count int
}

// at returns the service that p runs on.
func (l *lab) at(p peer) system {
	if p.at != nil {
		return p.at
	}
	return l.system
}

// fresh returns a name that nothing has used.
func (l *lab) fresh(what string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count++
	return fmt.Sprintf("bench/%s/%d", what, l.count)
}

// length returns full, or quick in a quick run.
func (l *lab) length(full, quick time.Duration) time.Duration {
	if l.quick {
		return quick
	}
	return full
}

// seed prepares name for p.
func (l *lab) seed(ctx context.Context, p peer, name string) error {
	if p.seed == nil {
		return nil
	}
	return p.seed(ctx, name)
}

// warm opens connections and loads scripts: one cycle on a name of its own.
func (l *lab) warm(ctx context.Context, p peer, c client) error {
	name := l.fresh("warm")
	if err := l.seed(ctx, p, name); err != nil {
		return err
	}
	h, err := c.lock(ctx, name)
	if err != nil {
		return err
	}
	return h.unlock(ctx)
}

// open makes n warm clients.
func (l *lab) open(ctx context.Context, p peer, n int, o clientOptions) (clients []client, close func(), err error) {
	close = func() {
		var wg sync.WaitGroup
		for _, c := range clients {
			wg.Go(c.close)
		}
		wg.Wait()
	}
	if o.addr == "" {
		o.addr = l.at(p).addr()
	}
	for range n {
		c, err := p.open(o)
		if err == nil {
			clients = append(clients, c)
			err = l.warm(ctx, p, c)
		}
		if err != nil {
			close()
			return nil, nil, err
		}
	}
	return clients, close, nil
}

// one measures one round of one peer.
type one func(ctx context.Context, l *lab, p peer) (sample, error)

// roundTime bounds one round: a library that ignores its context must not stop the run.
const roundTime = 60 * time.Second

func (f one) run(ctx context.Context, l *lab, p peer) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, roundTime)
	defer cancel()
	type outcome struct {
		s   sample
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		s, err := f(ctx, l, p)
		done <- outcome{s, err}
	}()
	select {
	case o := <-done:
		return o.s, o.err
	case <-ctx.Done():
		select {
		case o := <-done:
			return o.s, o.err
		case <-time.After(5 * time.Second):
			return nil, errors.New("the round did not end")
		}
	}
}

// interleaved runs round by round, and in each round peer by peer (ABAB), so that a machine whose speed drifts is as
// fast for one as for the other. Each round begins with another peer. An empty store is the start of every measurement.
func interleaved(f one) func(context.Context, *lab, []peer, int) []row {
	return func(ctx context.Context, l *lab, peers []peer, rounds int) []row {
		rows := newRows(peers)
		for r := range rounds {
			for i := range peers {
				i = (i + r) % len(peers)
				if ctx.Err() != nil {
					return rows
				}
				rows[i].add(l.quiet(func() (sample, error) {
					if err := l.at(peers[i]).reset(ctx); err != nil {
						return nil, err
					}
					return f.run(ctx, l, peers[i])
				}))
			}
		}
		return rows
	}
}

// loud is how many cores others may use before a round counts as disturbed.
const loud = 0.35

// quiet repeats a round while it is disturbed and there is patience left, and returns the least disturbed one. What
// counts is the load by others alone: the round's own figures must not decide whether they are kept.
func (l *lab) quiet(round func() (sample, error)) (sample, error) {
	best, err := round()
	for err == nil && best["foreign"] > loud && l.patience > 0 {
		began := time.Now()
		s, again := round()
		l.patience -= time.Since(began)
		if again != nil {
			return nil, again
		}
		if s["foreign"] < best["foreign"] {
			best = s
		}
	}
	return best, err
}

// together runs all rounds of all peers at the same time. For scenarios that wait for a TTL and use no CPU.
func together(f one) func(context.Context, *lab, []peer, int) []row {
	return func(ctx context.Context, l *lab, peers []peer, rounds int) []row {
		rows := newRows(peers)
		if err := l.system.reset(ctx); err != nil {
			for i := range rows {
				rows[i].add(nil, err)
			}
			return rows
		}
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i, p := range peers {
			for range rounds {
				wg.Go(func() {
					s, err := f.run(ctx, l, p)
					mu.Lock()
					defer mu.Unlock()
					rows[i].add(s, err)
				})
			}
		}
		wg.Wait()
		return rows
	}
}

func newRows(peers []peer) []row {
	rows := make([]row, len(peers))
	for i, p := range peers {
		rows[i] = row{name: p.name, role: p.role}
	}
	return rows
}

// relate adds each round's ratios to the same round of the floors.
func (sc scenario) relate(rows []row) {
	find := func(is func(row) bool) int { return slices.IndexFunc(rows, is) }
	ratio := func(i int, key, of string) {
		if i < 0 {
			return
		}
		for _, r := range rows {
			for n := range min(len(r.samples), len(rows[i].samples)) {
				v, ok := r.samples[n][of]
				base, baseOK := rows[i].samples[n][of]
				if ok && baseOK && base > 0 {
					r.samples[n][key] = v / base
				}
			}
		}
	}
	if sc.floor != "" {
		floor := find(func(r row) bool { return r.name == sc.floor })
		if floor < 0 {
			floor = find(func(r row) bool { return r.role == roleFloor })
		}
		of := sc.ratioOf
		if of == "" {
			of = "ops"
		}
		ratio(floor, "x", of)
		ratio(floor, "cpu-x", "client-us")
	}
	ratio(find(func(r row) bool { return slices.Contains(sc.second, r.name) }), "x2", "ops")
}

// foreign returns the highest load by others in any round, in cores.
func foreign(rows []row) float64 {
	most := math.NaN()
	for _, r := range rows {
		most = highest.of([]float64{most, r.figure(column{key: "foreign", pick: highest})})
	}
	return most
}

// run measures one scenario.
func (sc scenario) run(ctx context.Context, l *lab) (table, bool) {
	var peers []peer
	for _, p := range l.system.peers() {
		if selected(p.name, l.only) && (sc.suits == nil || sc.suits(l.system, p)) {
			peers = append(peers, p)
		}
	}
	if len(peers) == 0 {
		return table{}, false
	}
	rounds := sc.rounds
	if l.quick {
		rounds = sc.quickRounds
	}
	began := time.Now()
	rows := sc.all(ctx, l, peers, rounds)
	sc.relate(rows)
	return newTable(l.system, sc, rows, time.Since(began)), true
}

// selected reports whether name is asked for by a list of names or prefixes, separated by commas. Empty: all.
func selected(name, only string) bool {
	if only == "" {
		return true
	}
	for want := range strings.SplitSeq(only, ",") {
		if want = strings.TrimSpace(want); want != "" && strings.HasPrefix(name, want) {
			return true
		}
	}
	return false
}
