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

// service has the functions that a mutant may replace.
type service struct {
	acquire func(context.Context, backend.Request) (backend.Grant, error)
	all     func(context.Context, []backend.Request) ([]backend.Grant, error)
	renew   func(context.Context, []backend.Grant) []backend.Renewal
	release func(context.Context, backend.Grant) error
}

// port is the driver of one client: the in-process driver, in a process that may be paused and that has its own clock.
// It adds a few microseconds before and after each call, so that no two calls fall on one instant.
type port struct {
	*memory.Driver
	node *node
	service

	// The following fields are protected by node.mu.

	failed map[string]plan          // by request id: the plans after renewals that failed
	known  map[string]uint64        // the numbers of the requests, in their order
	gone   map[fencing.Token]bool   // holds that ended here
	hand   map[fencing.Token]bool   // holds that are renewed by hand
	sets   map[string]chan struct{} // by request id: the turns of the releases of the set's parts
}

// plan has the instants at which an attempt of a renewal leaves and is abandoned.
type plan struct{ next, end time.Duration }

func newPort(n *node, d *memory.Driver) *port {
	p := &port{
		Driver: d, node: n, failed: map[string]plan{}, known: map[string]uint64{},
		gone: map[fencing.Token]bool{}, hand: map[fencing.Token]bool{}, sets: map[string]chan struct{}{},
	}
	p.service = service{acquire: d.Acquire, all: d.AcquireAll, renew: d.Renew, release: d.Release}
	return p
}

// message identifies a message for the seed.
type message struct {
	call   string
	name   string
	number uint64
}

// about returns the message about a request. It has the request's number, which repeats with the seed, and not its id,
// which is random.
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

// leave waits until a request leaves the client. It returns the context's error if the context ends before.
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

// arrive waits until an answer reaches the client.
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

// inTurn waits for the end of the earlier releases of the same set. Of two releases that wait in the driver for one
// answer, the scheduler would choose the first, and only the first finds a hold to release.
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
// The core spreads its retries by random numbers that do not depend on the seed. So a renewal waits here until the
// latest instant that the core could have drawn, and is abandoned at the earliest, so that it depends only on the
// seed. See the package comment for the remaining exceptions.
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
	var sent []int // the grants that the client still has; their order is random
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

// byHand reports whether these are the first attempts at renewals for Extend, which have no random delay.
func (p *port) byHand(grants []backend.Grant) bool {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	return !slices.ContainsFunc(grants, func(g backend.Grant) bool {
		return !p.hand[g.Token] || p.failed[g.RequestID].next != 0
	})
}

// deadline returns the end of a hold's validity for the core, by the client's clock.
func (p *port) deadline(g backend.Grant) backend.Instant {
	o := &p.node.options
	return g.SentAt.Add(p.Describe().Validity(g.TTL) - o.StopEarly - o.LockDelay)
}

// Describe implements backend.Driver: the client's clock is that of its machine. It omits inspection: the core would
// look for the holder shortly after the beginning of a wait, which is random in an election.
func (p *port) Describe() backend.Description {
	d := p.Driver.Describe()
	d.Clock = p.node.clock
	d.Capabilities &^= backend.CapInspect
	return d
}

// Chance implements chance.Source with a constant.
func (p *port) Chance() float64 { return 0.999 }

// maxAttempt is the core's bound of one attempt at a renewal, less its slack.
const maxAttempt = 4900 * time.Millisecond

// planned returns the instants at which the renewal of a batch leaves and is abandoned.
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
	// By a random amount, between eight tenths and all of a third of the validity is over. The core's timer may be late
	// by its slack.
	c := p.node.clock
	sent := grants[0].SentAt
	due := p.node.w.now() + c.real(sent.Add(deadline.Sub(sent)/3).Sub(c.Now()))
	end := min(tick(due)+rung(deadline.Sub(sent)*2/3)/4, due-c.real(deadline.Sub(sent)/15)+maxAttempt)
	return plan{next: tick(due), end: end}
}

// lastAttempt is the time before a deadline in which no renewal leaves: retries then follow each other so quickly that
// their random pauses would show.
const lastAttempt = 40 * time.Millisecond

// tick returns a whole millisecond, between one and two after d.
func tick(d time.Duration) time.Duration { return d.Truncate(time.Millisecond) + 2*time.Millisecond }

// rung returns the greatest power of two milliseconds that is not more than d, and 4 ms at least. d is not exact,
// because it was counted from a random instant, but is rarely close to a power of two.
func rung(d time.Duration) time.Duration {
	r := 4 * time.Millisecond
	for r*2 <= d {
		r *= 2
	}
	return r
}

// note records the grants whose renewal failed, with the time left for them.
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
		// The core waits for at most a tenth of the time left, or a second, and gives the attempt a third of the rest.
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

// late delays pushed losses while the client is paused.
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
