package simulation

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/fencing"
)

// service is what a mutant replaces.
type service struct {
	acquire func(context.Context, backend.Request) (backend.Grant, error)
	all     func(context.Context, []backend.Request) ([]backend.Grant, error)
	renew   func(context.Context, []backend.Grant) []backend.Renewal
	release func(context.Context, backend.Grant) error
}

// port is the driver of one client: the in-process driver behind a process that may be paused and that has a clock of
// its own. It adds a few microseconds before and after each call, so that no two of them fall on one instant.
type port struct {
	*memory.Driver
	node *node
	service

	// The following fields are protected by node.mu.

	failed map[string]plan          // by request id: renewals of which the last one failed
	known  map[string]uint64        // the requests, numbered as they came
	gone   map[fencing.Token]bool   // holds that ended here
	hand   map[fencing.Token]bool   // holds that are renewed by hand
	sets   map[string]chan struct{} // by request id: the turns to release parts of the set
}

// plan has the instants at which a renewal's attempt leaves and is abandoned.
type plan struct{ next, end time.Duration }

func newPort(n *node, d *memory.Driver) *port {
	p := &port{
		Driver: d, node: n, failed: map[string]plan{}, known: map[string]uint64{},
		gone: map[fencing.Token]bool{}, hand: map[fencing.Token]bool{}, sets: map[string]chan struct{}{},
	}
	p.service = service{acquire: d.Acquire, all: d.AcquireAll, renew: d.Renew, release: d.Release}
	return p
}

// message is what the seed knows a message by.
type message struct {
	call   string
	name   string
	number uint64
}

// about makes the message about a request. Its id is random; its number is not.
func (p *port) about(call, name, id string) message {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	n := p.known[id]
	if n == 0 {
		n = uint64(len(p.known) + 1)
		p.known[id] = n
	}
	return message{call, name, n}
}

// leave lets a request out. It returns the context's error if that ended before.
func (p *port) leave(ctx context.Context, m message) error {
	p.node.w.rec.operation()
	p.node.pass(m, 1)
	if err := ctx.Err(); err != nil {
		return &backend.CallError{Driver: "simulation", Call: m.call, Name: m.name, Err: err}
	}
	p.node.vary(p.Driver, m)
	p.node.w.rec.trace(p.node, m, "leaves")
	return nil
}

// arrive lets an answer in.
func (p *port) arrive(m message) {
	p.node.w.rec.trace(p.node, m, "returns")
	p.node.pass(m, 2)
}

// Acquire implements backend.Driver.
func (p *port) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if err := p.node.stand(ctx); err != nil {
		return backend.Grant{}, err
	}
	m := p.about("acquire", r.Name, r.RequestID)
	if err := p.leave(ctx, m); err != nil {
		return backend.Grant{}, err
	}
	r.Lost = p.late(r.Lost)
	g, err := p.acquire(ctx, r)
	p.arrive(m)
	p.node.stood()
	return p.local(g), err
}

// AcquireAll implements backend.MultiAcquirer.
func (p *port) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	rs = slices.Clone(rs)
	var m message
	for i := range rs {
		rs[i].Lost = p.late(rs[i].Lost)
		m = p.about("acquire", rs[i].Name, rs[i].RequestID)
	}
	p.together(rs)
	if err := p.leave(ctx, m); err != nil {
		return nil, err
	}
	grants, err := p.all(ctx, rs)
	p.arrive(m)
	for i := range grants {
		grants[i] = p.local(grants[i])
	}
	return grants, err
}

// together notes that requests are one set.
func (p *port) together(rs []backend.Request) {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	turn := make(chan struct{}, 1)
	for i := range rs {
		p.sets[rs[i].RequestID] = turn
	}
}

// inTurn waits for the end of the releases of the same set that left before. Of two that wait in the driver for one
// answer, the scheduler would choose the first, which alone finds something to release.
func (p *port) inTurn(ctx context.Context, id string) (done func()) {
	p.node.mu.Lock()
	turn := p.sets[id]
	p.node.mu.Unlock()
	if turn == nil {
		return func() {}
	}
	select {
	case turn <- struct{}{}:
		return func() { <-turn }
	case <-ctx.Done():
		return func() {}
	}
}

// Renew implements backend.Driver.
//
// The core spreads its retries by its own random numbers, which no seed reaches. So a renewal waits here for the latest
// instant that this chance could have drawn, and is abandoned at the earliest: the seed decides again. See the package
// comment for what that does not reach.
func (p *port) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	byHand := p.byHand(grants)
	deadline := p.deadline(grants[0]) // the nearest, by the client's clock
	for _, g := range grants[1:] {
		deadline = min(deadline, p.deadline(g))
	}
	if !byHand {
		f := p.planned(grants, deadline)
		if f.end == 0 {
			<-ctx.Done()
			out := make([]backend.Renewal, len(grants))
			for i := range out {
				out[i].Err = backend.ErrUnavailable
			}
			return out
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, max(f.end-p.node.w.now(), 0))
		defer cancel()
		p.node.w.until(ctx, f.next)
	}
	out := make([]backend.Renewal, len(grants))
	var sent []int // those that the client still has; chance decides their order
	for i := range grants {
		out[i].Err = backend.ErrUnavailable
		if !p.ended(grants[i].Token) {
			sent = append(sent, i)
		}
	}
	if len(sent) == 0 {
		return out
	}
	slices.SortFunc(sent, func(i, j int) int { return cmp.Compare(grants[i].Token.Order(), grants[j].Token.Order()) })
	ordered := make([]backend.Grant, len(sent))
	for k, i := range sent {
		ordered[k] = grants[i]
	}
	m := p.about("renew", ordered[0].Name, ordered[0].RequestID)
	err := p.leave(ctx, m)
	var renewals []backend.Renewal
	if err == nil {
		renewals = p.renew(ctx, ordered)
		p.arrive(m)
	}
	for k, i := range sent {
		if err != nil {
			out[i].Err = err
			continue
		}
		out[i] = renewals[k]
		out[i].SentAt = p.node.clock.local(out[i].SentAt)
	}
	p.note(grants, out, deadline.Sub(p.node.clock.Now()))
	return out
}

func (p *port) ended(t fencing.Token) bool {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	return p.gone[t]
}

// byHand reports whether these are the first attempts at renewals for Extend, which no chance is in.
func (p *port) byHand(grants []backend.Grant) bool {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	return !slices.ContainsFunc(grants, func(g backend.Grant) bool {
		return !p.hand[g.Token] || p.failed[g.RequestID].next != 0
	})
}

// deadline returns until when the core believes in a hold, by the client's clock.
func (p *port) deadline(g backend.Grant) backend.Instant {
	o := &p.node.options
	return g.SentAt.Add(p.Describe().Validity(g.TTL) - o.StopEarly - o.LockDelay)
}

// Describe implements backend.Driver: the client's clock is its machine's. Nobody looks who holds: the core does so a
// moment after a wait has begun, and when an election's wait begins is of chance.
func (p *port) Describe() backend.Description {
	d := p.Driver.Describe()
	d.Clock = p.node.clock
	d.Capabilities &^= backend.CapInspect
	return d
}

// Chance implements chance.Source: no chance is left.
func (p *port) Chance() float64 { return 0.999 }

// maxAttempt is the core's bound of one attempt at a renewal, less its slack.
const maxAttempt = 4900 * time.Millisecond

// planned returns when the renewal of a batch leaves, and when it is abandoned.
func (p *port) planned(grants []backend.Grant, deadline backend.Instant) plan {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	var last plan
	for i := range grants {
		if f := p.failed[grants[i].RequestID]; f.next > last.next {
			last = f
		}
	}
	if last.next != 0 {
		return last
	}
	// Up to a third of the validity is over, by chance: at least eight tenths of that. The core's timer may be late by
	// its own slack.
	c := p.node.clock
	sent := grants[0].SentAt
	due := p.node.w.now() + c.real(sent.Add(deadline.Sub(sent)/3).Sub(c.Now()))
	end := min(tick(due)+rung(deadline.Sub(sent)*2/3)/4, due-c.real(deadline.Sub(sent)/15)+maxAttempt)
	return plan{next: tick(due), end: end}
}

// lastAttempt is the time before a deadline from which on no renewal leaves any more: retries follow each other so
// quickly then that chance would show.
const lastAttempt = 40 * time.Millisecond

// tick is a whole millisecond, one or two after d.
func tick(d time.Duration) time.Duration { return d.Truncate(time.Millisecond) + 2*time.Millisecond }

// rung is the greatest power of two milliseconds that is not more than d, which is not exact: it was counted from an
// instant that chance drew, and chance is rarely next to a power of two.
func rung(d time.Duration) time.Duration {
	r := 4 * time.Millisecond
	for r*2 <= d {
		r *= 2
	}
	return r
}

// note remembers for which grants the renewal failed, with so much time left.
func (p *port) note(grants []backend.Grant, out []backend.Renewal, left time.Duration) {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	now, r := p.node.w.now(), rung(left)
	for i := range grants {
		id := grants[i].RequestID
		if out[i].Err == nil {
			delete(p.failed, id)
			continue
		}
		if left < lastAttempt {
			p.failed[id] = plan{next: now}
			continue
		}
		// The core waits for at most a tenth of the time left, or a second, and gives it a third of the rest.
		p.failed[id] = plan{
			next: now + min(max(r/5, 6*time.Millisecond), 1001*time.Millisecond), end: now + min(r*3/10, maxAttempt),
		}
	}
}

// Release implements backend.Driver.
func (p *port) Release(ctx context.Context, g backend.Grant) error {
	p.node.mu.Lock()
	delete(p.failed, g.RequestID)
	p.node.mu.Unlock()
	m := p.about("release", g.Name, g.RequestID)
	if err := p.leave(ctx, m); err != nil {
		return err
	}
	done := p.inTurn(ctx, g.RequestID)
	err := p.release(ctx, g)
	p.arrive(m)
	done()
	p.node.stood()
	return err
}

// local puts the client's clock in place of the service's.
func (p *port) local(g backend.Grant) backend.Grant {
	g.SentAt = p.node.clock.local(g.SentAt)
	g.MinHoldUntil = p.node.clock.local(g.MinHoldUntil)
	return g
}

// late keeps pushed losses back while the client is paused.
func (p *port) late(lost func(backend.Loss)) func(backend.Loss) {
	if lost == nil {
		return nil
	}
	return func(loss backend.Loss) {
		if left := p.node.pausedFor(); left > 0 {
			time.AfterFunc(left, func() { lost(loss) })
			return
		}
		lost(loss)
	}
}

func (p *port) IssuesFencingTokens() backend.Driver { return p }
