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

// breakage is one way to break the service or the network under all peers of a system.
type breakage string

const (
	linkHeld   breakage = "holder's link held back"   // and all messages delivered late, afterwards
	linkLost   breakage = "holder's link lost"        // and its connections reset afterwards
	waiterHeld breakage = "waiter's link held back"   // while the lock changes hands
	serverStop breakage = "server stopped (SIGSTOP)"  // with its sockets open
	keyDeleted breakage = "key deleted behind it all" // as a failover that lost data does
)

var breakages = []breakage{linkHeld, linkLost, waiterHeld, serverStop, keyDeleted}

// checked is a peer whose calls are recorded during a breakage.
type checked struct {
	peer
	at  *system
	r   *check.Recorder
	ttl time.Duration

	name    string // the name that the holder takes, and the contenders want
	another string // another name that the contenders want
	errors  []string
}

// recorded is a recorded hold: a lease of ours, or one of another library.
type recorded struct {
	over    <-chan struct{} // closed when the library reports the loss; nil: never
	release func(ctx context.Context)
}

// checkResult is one row of the table, in the form that -json writes.
type checkResult struct {
	System     string             `json:"system"`
	Peer       string             `json:"peer"`
	Ours       bool               `json:"ours"`
	Seed       uint64             `json:"seed"`
	Rounds     int                `json:"rounds"`
	Figures    check.Figures      `json:"figures"`
	Violations map[check.Kind]int `json:"violations"`
	Errors     []string           `json:"errors,omitempty"` // of rounds that failed
}

// runCheck breaks the services that o names under our clients and their alternatives, and checks their histories
// against the same rules.
func runCheck(ctx context.Context, w io.Writer, o options) error {
	if o.seed == 0 {
		o.seed = rand.Uint64()
	}
	var all []checkResult
	if err := o.eachService(ctx, func(_ service, s *system) error {
		if !s.breakable() {
			return nil
		}
		fmt.Fprintf(os.Stderr, "%s, seed %d\n", s.version, o.seed)
		results, err := (&lab{system: s, options: &o}).check(ctx)
		all = append(all, results...)
		return err
	}); err != nil {
		return err
	}
	writeChecks(w, all)
	return o.write(all)
}

func (l *lab) check(ctx context.Context) (results []checkResult, err error) {
	if err := l.system.empty(ctx); err != nil {
		return nil, err
	}
	going, stop := context.WithCancel(ctx)
	defer stop()
	var work sync.WaitGroup
	var peers []*checked
	for _, p := range l.system.peers {
		if !p.contends() || p.key == nil || !selected(p.name, l.peers) {
			continue
		}
		c := &checked{peer: p, at: l.on(p), r: check.NewRecorder(check.Options{}), ttl: l.ttl(),
			name: l.fresh("check"), another: l.fresh("check")}
		peers = append(peers, c)
		for i := range 2 {
			work.Go(func() { c.contend(going, fmt.Sprint("contender-", i)) })
		}
	}
	random := rand.New(rand.NewPCG(l.seed, 0))
	order := shuffled(random)
	if !l.quick {
		order = append(order, shuffled(random)...)
	}
	for n, b := range order {
		length := l.ttl() + l.ttl()/5 + time.Duration(random.Int64N(int64(l.ttl())))
		for i, err := range l.breakOnce(ctx, peers, b, length) {
			if err != nil {
				peers[i].errors = append(peers[i].errors, fmt.Sprintf("round %d, %s: %v", n, b, err))
			}
		}
	}
	stop()
	patiently(going, 10*l.ttl(), work.Wait) // without waiting for a library that ignores contexts
	for _, p := range peers {
		rules := check.Rules{TTL: p.ttl, Patience: 5 * time.Second, Recovery: 3*p.ttl + 5*time.Second}
		report := check.Verify(ctx, p.r.History(), rules)
		violations := map[check.Kind]int{}
		for _, v := range report.Violations {
			violations[v.Kind]++
		}
		results = append(results, checkResult{p.at.version, p.peer.name, p.role == roleOurs, l.seed, len(order),
			report.Figures, violations, p.errors})
		if l.dump != "" {
			dir := fmt.Sprintf("%s/%s-%s", l.dump, l.system.name, strings.ReplaceAll(p.peer.name, "/", "-"))
			if err := report.Dump(dir); err != nil {
				return nil, err
			}
		}
	}
	return results, nil
}

func shuffled(random *rand.Rand) []breakage {
	all := slices.Clone(breakages)
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// breakOnce lets one client of each peer hold its name, applies the breakage for the given time, heals it, and
// releases the names. It returns the errors of the peers that could not take part.
func (l *lab) breakOnce(ctx context.Context, peers []*checked, b breakage, length time.Duration) []error {
	errs, healed := make([]error, len(peers)), make(chan struct{})
	var begun, over sync.WaitGroup
	begun.Add(len(peers))
	for i, p := range peers {
		over.Go(func() {
			s := &scope{ctx: ctx}
			begin := sync.OnceFunc(begun.Done)
			errs[i] = s.try(func() {
				defer s.end()
				defer begin()
				p.suffer(s, b, func() { begin(); begun.Wait() }, healed)
			})
		})
	}
	begun.Wait()
	var failed error
	if b == serverStop {
		failed = l.system.pause()
	}
	sleep(ctx, length)
	l.system.resume()
	close(healed)
	over.Wait()
	for i := range errs {
		errs[i] = errors.Join(errs[i], failed)
	}
	return errs
}

// suffer holds the name with a client behind its own link, or waits for it in a round that breaks a waiter. Once all
// peers have begun, it breaks its own part. When all is healed, it waits until the library has reported the loss, or
// had the time to do so, and then releases a hold without a reported loss.
func (p *checked) suffer(s *scope, b breakage, begun func(), healed <-chan struct{}) {
	proxy, err := fault.NewProxy(p.at.addr())
	s.must(err)
	s.closing(proxy)
	c, err := p.peer.client(s.ctx, clientOptions{addr: proxy.Addr(), proxied: true, ttl: p.ttl})
	s.must(err)
	s.later(c.leave)
	holds := make(chan *recorded, 1)
	take := func(who string) error {
		h, err := p.take(s.ctx, 5*p.ttl, c, who, p.name)
		holds <- h // nil without a hold
		return err
	}
	if b == waiterHeld {
		go func() { _ = take("waiter") }() // recorded
	} else {
		s.must(take("holder"))
		sleep(s.ctx, p.ttl/10)
	}
	begun()
	p.r.Fault(string(b))
	switch b {
	case linkHeld, waiterHeld:
		proxy.Hold(fault.Both)
	case linkLost:
		proxy.Drop(fault.Both)
	case keyDeleted:
		call := p.r.Begin(s.ctx, "operator", check.OpForce, p.name)
		by := &scope{ctx: s.ctx}
		err = by.try(func() { p.at.wipe(by, p.key(p.name)) })
		call.Return(check.OK, err)
	}
	<-healed
	proxy.Pass()
	p.r.Healed(string(b))
	select {
	case h := <-holds:
		if h == nil {
			break
		}
		select {
		case <-h.over:
		case <-time.After(p.ttl / 2):
		}
		bounded(func(context.Context) error { h.release(s.ctx); return nil })
	case <-time.After(6 * p.ttl):
	}
	s.must(err)
}

// leave ends a client whose library may not return.
func (c *client) leave() { bounded(func(context.Context) error { c.end(); return nil }) }

// contend takes both names in turn until ctx ends. It replaces a client whose calls fail repeatedly, as its user would
// do.
func (p *checked) contend(ctx context.Context, who string) {
	for n := 0; ctx.Err() == nil; {
		c, err := p.peer.client(context.WithoutCancel(ctx), clientOptions{addr: p.at.addr(), ttl: p.ttl})
		if err != nil {
			sleep(ctx, 200*time.Millisecond)
			continue
		}
		for failures := 0; failures < 3 && ctx.Err() == nil; n++ {
			h, err := p.take(ctx, 3*p.ttl, c, who, []string{p.name, p.another}[n%2])
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
		c.leave()
	}
}

// take waits for a name, for patience at most, and records the call.
func (p *checked) take(ctx context.Context, patience time.Duration, c *client, who, name string) (*recorded, error) {
	wait, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if o, ok := c.native.(ourNative); ok {
		h, err := p.r.Wrap(who, o.locks).Acquire(wait, name)
		if err != nil {
			return nil, err
		}
		return p.recorded(h.Lease().Context().Done(), func(ctx context.Context) { _ = h.Release(ctx) }), nil
	}
	// rueidislock's hold ends with the context of its acquire, so that context must outlive the wait.
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
	if until := h.(theirs).until; until != nil {
		g.Deadline = p.r.Instant(until())
	}
	granted, released := call.Granted(g), make(chan struct{})
	told := h.Context().Done()
	go func() {
		select {
		case <-told: // nil blocks
			granted.Lost("told", check.Grant{})
		case <-released:
		}
	}()
	return p.recorded(told, func(ctx context.Context) {
		call := granted.Release(ctx, check.Grant{})
		close(released)
		err := h.Release(ctx)
		done()
		call.Return(said(err), err)
	}), nil
}

// recorded returns a hold with a release that is bounded by the TTL, if the library respects contexts.
func (p *checked) recorded(over <-chan struct{}, release func(context.Context)) *recorded {
	return &recorded{over, func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, p.ttl)
		defer cancel()
		release(ctx)
	}}
}

// said returns the outcome of an unlock. Without an error it succeeded.
func said(err error) check.Outcome {
	var taken *redsync.ErrTaken
	gone := []error{redsync.ErrLockAlreadyExpired, redislock.ErrLockNotHeld, concurrency.ErrLockReleased,
		zk.ErrNotLocked, zk.ErrNoNode}
	switch {
	case err == nil:
		return check.OK
	case errors.As(err, &taken), slices.ContainsFunc(gone, func(gone error) bool { return errors.Is(err, gone) }):
		return check.Gone
	}
	return check.Unknown
}

// writeChecks prints the table, in Markdown.
func writeChecks(w io.Writer, all []checkResult) {
	fmt.Fprintln(w, "| service | library | calls | holds | holders beside whom others held | longest s |"+
		" lost to a rival: notified before | notified after | never notified | violations by kind |\n"+
		"|---|---|--:|--:|--:|--:|--:|--:|--:|---|")
	for _, r := range all {
		var kinds []string
		for _, k := range slices.Sorted(maps.Keys(r.Violations)) {
			kinds = append(kinds, fmt.Sprintf("%s %d", k, r.Violations[k]))
		}
		if kinds == nil {
			kinds = []string{"none"}
		}
		f := r.Figures
		fmt.Fprintf(w, "| %s | %s | %d | %d | %d | %.1f | %d | %d | %d | %s |\n",
			r.System, r.Peer, f.Operations, f.Grants, f.Doubled, f.Overrun.Seconds(),
			f.NotifiedBefore, f.NotifiedAfter, f.NeverNotified, strings.Join(kinds, ", "))
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
