package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-zookeeper/zk"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/fencelock/fencelock/conformance/check"
	"github.com/fencelock/fencelock/conformance/fault"
)

// breakage is one way to break what lies under all peers of a system at once.
type breakage string

const (
	linkHeld   breakage = "holder's link held back"   // and everything delivered afterwards, late
	linkLost   breakage = "holder's link lost"        // and its connections reset afterwards
	waiterHeld breakage = "waiter's link held back"   // while the lock changes hands
	serverStop breakage = "server stopped (SIGSTOP)"  // with its sockets open
	keyDeleted breakage = "key deleted behind it all" // as a failover that lost data does
)

var breakages = []breakage{linkHeld, linkLost, waiterHeld, serverStop, keyDeleted}

// checked is a peer whose calls are recorded, while it is broken.
type checked struct {
	peer
	lab *lab
	r   *check.Recorder
	ttl time.Duration

	name    string // that the holder takes, and the contenders want
	another string // that the contenders want, too

	// Of one round.
	client client
	proxy  *fault.Proxy
	held   recorded
	waits  chan recorded // of the waiter
	err    error
}

// recorded is a hold that is recorded.
type recorded interface {
	release(ctx context.Context)
	over() <-chan struct{} // told of the loss; nil: never
}

// checkResult is one row of the table, and what -json writes of it.
type checkResult struct {
	System     string             `json:"system"`
	Peer       string             `json:"peer"`
	Ours       bool               `json:"ours"`
	Seed       uint64             `json:"seed"`
	Rounds     int                `json:"rounds"`
	Figures    check.Figures      `json:"figures"`
	Violations map[check.Kind]int `json:"violations"`
	Errors     []string           `json:"errors,omitempty"` // of rounds that could not be done
}

// runCheck breaks what o names under our clients and those that users would pick instead, and holds what they did
// against the same rules.
func runCheck(ctx context.Context, w io.Writer, o options) error {
	if o.seed == 0 {
		o.seed = rand.Uint64()
	}
	var all []checkResult
	for name := range strings.SplitSeq(o.backend, ",") {
		s, _, err := open(ctx, name, o)
		if err != nil {
			return err
		}
		if s.addr() == "" {
			_ = s.close()
			continue // there is nothing to break
		}
		fmt.Fprintf(os.Stderr, "%s, seed %d\n", s.version(), o.seed)
		results, err := checkSystem(ctx, &lab{system: s, only: o.peers, quick: o.quick}, o)
		if err := errors.Join(err, s.close()); err != nil {
			return err
		}
		all = append(all, results...)
	}
	writeChecks(w, all)
	return o.write(all)
}

func checkSystem(ctx context.Context, l *lab, o options) ([]checkResult, error) {
	if err := l.system.reset(ctx); err != nil {
		return nil, err
	}
	ttl := l.ttl()
	var peers []*checked
	for _, p := range l.system.peers() {
		if p.contends() && p.key != nil && selected(p.name, l.only) {
			peers = append(peers, &checked{
				peer: p, lab: l, ttl: ttl, r: check.NewRecorder(check.Options{}), name: l.fresh("check"), another: l.fresh("check"),
			})
		}
	}
	going, stop := context.WithCancel(ctx)
	defer stop()
	var work sync.WaitGroup
	for _, p := range peers {
		for i := range 2 {
			work.Go(func() { p.contend(going, fmt.Sprint("contender-", i)) })
		}
	}
	random := rand.New(rand.NewPCG(o.seed, 0))
	rounds := 2 * len(breakages)
	if l.quick {
		rounds = len(breakages)
	}
	var order []breakage
	for range rounds / len(breakages) {
		each := slices.Clone(breakages)
		random.Shuffle(len(each), func(i, j int) { each[i], each[j] = each[j], each[i] })
		order = append(order, each...)
	}
	results := make([]checkResult, len(peers))
	for n, b := range order {
		length := ttl + ttl/5 + time.Duration(random.Int64N(int64(ttl)))
		for i, err := range l.breakOnce(ctx, peers, b, length) {
			if err != nil {
				results[i].Errors = append(results[i].Errors, fmt.Sprintf("round %d, %s: %v", n, b, err))
			}
		}
	}
	stop()
	ended := make(chan struct{})
	go func() { work.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(10 * ttl): // a library that knows no contexts
	}
	for i, p := range peers {
		rules := check.Rules{TTL: ttl, Patience: 5 * time.Second, Recovery: 3*ttl + 5*time.Second}
		report := check.Verify(ctx, p.r.History(), rules)
		r := &results[i]
		r.System, r.Peer, r.Ours, r.Seed, r.Rounds = l.at(p.peer).version(), p.peer.name, p.role == roleOurs, o.seed, len(order)
		r.Figures, r.Violations = report.Figures, map[check.Kind]int{}
		for _, v := range report.Violations {
			r.Violations[v.Kind]++
		}
		if o.dump != "" {
			dir := fmt.Sprintf("%s/%s-%s", o.dump, l.system.name(), strings.ReplaceAll(p.peer.name, "/", "-"))
			if err := report.Dump(dir); err != nil {
				return nil, err
			}
		}
	}
	return results, nil
}

// breakOnce lets one client of each peer hold its name, breaks it for so long, heals, and lets go. It returns what kept
// each of them from that.
func (l *lab) breakOnce(ctx context.Context, peers []*checked, b breakage, length time.Duration) []error {
	l.each(peers, func(p *checked) { p.err = p.begin(ctx, b) })
	l.each(peers, func(p *checked) {
		p.r.Fault(string(b))
		if p.err == nil {
			p.err = p.hurt(ctx, b)
		}
	})
	if b == serverStop && !l.system.pause() {
		for _, p := range peers {
			p.err = errors.New("the server was not started here, so it cannot be stopped")
		}
	}
	sleep(ctx, length)
	l.system.resume()
	errs := make([]error, len(peers))
	for i, p := range peers {
		if p.proxy != nil {
			p.proxy.Pass()
		}
		p.r.Healed(string(b))
		errs[i] = p.err
	}
	l.each(peers, func(p *checked) { p.end(ctx) })
	return errs
}

func (l *lab) each(peers []*checked, do func(*checked)) {
	var work sync.WaitGroup
	for _, p := range peers {
		work.Go(func() { do(p) })
	}
	work.Wait()
}

// begin makes a client with a link of its own. It holds the name, or waits for it in a round that breaks a waiter.
func (p *checked) begin(ctx context.Context, b breakage) error {
	p.client, p.proxy, p.held, p.waits = nil, nil, nil, nil
	var err error
	if p.proxy, err = fault.NewProxy(p.lab.at(p.peer).addr()); err != nil {
		return err
	}
	p.client, err = p.open(clientOptions{addr: p.proxy.Addr(), proxied: true, ttl: p.ttl})
	if err != nil {
		return err
	}
	if b != waiterHeld {
		p.held, err = p.take(ctx, 5*p.ttl, p.client, "holder", p.name)
		sleep(ctx, p.ttl/10)
		return err
	}
	waits := make(chan recorded, 1)
	p.waits = waits
	go func() {
		defer close(waits)
		if h, err := p.take(ctx, 5*p.ttl, p.client, "waiter", p.name); err == nil {
			waits <- h
		}
	}()
	return nil
}

// hurt breaks what belongs to this peer alone.
func (p *checked) hurt(ctx context.Context, b breakage) error {
	switch b {
	case linkHeld, waiterHeld:
		p.proxy.Hold(fault.Both)
	case linkLost:
		p.proxy.Drop(fault.Both)
	case keyDeleted:
		call := p.r.Begin(ctx, "operator", check.OpForce, p.name)
		err := p.lab.at(p.peer).erase(ctx, p.key(p.name))
		call.Return(check.OK, err)
		return err
	}
	return nil
}

// end gives back what the holder still believes in, once it was told or has had the time to be.
func (p *checked) end(ctx context.Context) {
	if p.waits != nil {
		select {
		case p.held = <-p.waits: // nil if it got nothing
		case <-time.After(6 * p.ttl):
		}
	}
	if p.held != nil {
		select {
		case <-p.held.over():
		case <-time.After(p.ttl / 2):
		}
		bounded(func() { p.held.release(ctx) })
	}
	if p.client != nil {
		bounded(p.client.close)
	}
	if p.proxy != nil {
		_ = p.proxy.Close()
	}
}

// bounded runs do, and goes on without it after a while: not every library returns.
func bounded(do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
	}
}

// contend takes both names in turn until ctx ends. A client whose calls fail again and again is replaced, as its user
// would do.
func (p *checked) contend(ctx context.Context, who string) {
	var c client
	failures := 0
	defer func() {
		if c != nil {
			bounded(c.close)
		}
	}()
	for n := 0; ctx.Err() == nil; n++ {
		if c != nil && failures >= 3 {
			bounded(c.close)
			c = nil
		}
		if c == nil {
			var err error
			failures = 0
			if c, err = p.open(clientOptions{addr: p.lab.at(p.peer).addr(), ttl: p.ttl}); err != nil {
				c = nil
				sleep(ctx, 200*time.Millisecond)
				continue
			}
		}
		name := p.name
		if n%2 == 1 {
			name = p.another
		}
		h, err := p.take(ctx, 3*p.ttl, c, who, name)
		if err != nil {
			failures++
			sleep(ctx, 20*time.Millisecond)
			continue
		}
		failures = 0
		sleep(ctx, 5*time.Millisecond+rand.N(20*time.Millisecond))
		h.release(context.WithoutCancel(ctx))
		sleep(ctx, rand.N(10*time.Millisecond))
	}
}

// take waits for a name for so long at most, and records it.
func (p *checked) take(ctx context.Context, patience time.Duration, c client, who, name string) (recorded, error) {
	wait, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if o, ok := c.(ourClient); ok {
		h, err := p.r.Wrap(who, o.c).Acquire(wait, name)
		if err != nil {
			return nil, err
		}
		return ourRecorded{h, p.ttl}, nil
	}
	// rueidislock's hold ends with the context that it was taken with: that one goes on after the wait.
	during, done := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(wait, done)
	call := p.r.Begin(wait, who, check.OpAcquire, name)
	h, err := c.lock(during, name)
	stop()
	if err != nil {
		done()
		call.Return(check.Unknown, err)
		return nil, err
	}
	g := check.Grant{TTL: p.ttl}
	if b, ok := h.(interface {
		until(granted time.Time, ttl time.Duration) time.Time
	}); ok {
		g.Deadline = p.r.Instant(b.until(time.Now(), p.ttl))
	}
	t := &theirRecorded{h: h, hold: call.Granted(g), lost: h.lost(), ttl: p.ttl, done: done, released: make(chan struct{})}
	if t.lost != nil {
		go func() {
			select {
			case <-t.lost:
				t.hold.Lost("told", check.Grant{})
			case <-t.released:
			}
		}()
	}
	return t, nil
}

type ourRecorded struct {
	h   *check.Held
	ttl time.Duration
}

func (o ourRecorded) over() <-chan struct{} { return o.h.Lease().Context().Done() }

func (o ourRecorded) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, o.ttl)
	defer cancel()
	_ = o.h.Release(ctx) // recorded
}

type theirRecorded struct {
	h        hold
	hold     *check.Hold
	lost     <-chan struct{}
	ttl      time.Duration
	done     func()
	released chan struct{}
}

func (t *theirRecorded) over() <-chan struct{} { return t.lost }

// release records what the library says. One that says nothing has done it.
func (t *theirRecorded) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, t.ttl)
	defer cancel()
	call := t.hold.Release(ctx, check.Grant{})
	close(t.released)
	err := t.h.unlock(ctx)
	t.done()
	switch {
	case err == nil:
		call.Return(check.OK, nil)
	case saysGone(err):
		call.Return(check.Gone, err)
	default:
		call.Return(check.Unknown, err)
	}
}

// saysGone tells whether an unlock has said that the lock was not held any more.
func saysGone(err error) bool {
	var taken *redsync.ErrTaken
	return errors.As(err, &taken) || slices.ContainsFunc([]error{
		redsync.ErrLockAlreadyExpired, redislock.ErrLockNotHeld, concurrency.ErrLockReleased, zk.ErrNotLocked, zk.ErrNoNode,
	}, func(gone error) bool { return errors.Is(err, gone) })
}

// until is how long redsync says that its lock is valid.
func (h redsyncHold) until(time.Time, time.Duration) time.Time { return h.m.Until() }

// until is what the user of a lock that is not renewed, and tells nothing, can count.
func (h redislockHold) until(granted time.Time, ttl time.Duration) time.Time { return granted.Add(ttl) }

// writeChecks prints the table, in Markdown.
func writeChecks(w io.Writer, all []checkResult) {
	fmt.Fprintln(w, "| service | library | calls | holds | holders beside whom others held | longest s |"+
		" lost to a rival: told before | told after | never told | violations by kind |")
	fmt.Fprintln(w, "|---|---|--:|--:|--:|--:|--:|--:|--:|---|")
	for _, r := range all {
		var kinds []string
		for _, k := range slices.Sorted(maps.Keys(r.Violations)) {
			kinds = append(kinds, fmt.Sprintf("%s %d", k, r.Violations[k]))
		}
		if kinds == nil {
			kinds = []string{"none"}
		}
		f := r.Figures
		fmt.Fprintf(w, "| %s | %s | %d | %d | %d | %.1f | %d | %d | %d | %s |\n", r.System, r.Peer, f.Operations, f.Grants,
			f.Doubled, f.Overrun.Seconds(), f.ToldBefore, f.ToldAfter, f.NeverTold, strings.Join(kinds, ", "))
	}
	for _, r := range all {
		for _, err := range r.Errors {
			fmt.Fprintf(w, "\n%s, %s: %s", r.System, r.Peer, err)
		}
	}
	if len(all) > 0 {
		fmt.Fprintf(w, "\nSeed %d, %d faults for each library.\n", all[0].Seed, all[0].Rounds)
	}
}
