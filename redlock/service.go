package redlock

// This file is the binding of backend/engine: the parts that all exchanges use.
//
// A round is one exchange: one step for each server that it asks, all with one sink, a channel with room for every
// answer. So a line never waits for the asker, and an asker that has left costs the memory of its channel. The caller
// gathers the answers on its own goroutine, and returns when the rest cannot change the outcome.
//
// The lines are Ordered: a server executes later requests later, whatever became of the connection. So a Leave needs
// no answer to the Enter before it.

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/bits"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/rediswire"
)

// service is the binding.
type service struct {
	o        Options // with defaults
	nodes    []*node
	quorum   int
	unfit    error         // the fault of a client or the options, or nil
	patience time.Duration // for one look at the servers
	identity string        // of this client, in values and as the name of its channel
	clock    backend.Clock
	seed     maphash.Seed
	nonces   atomic.Uint64
	wanted   redisconn.Wanted // names that the script is asked for immediately
	later    later
	// laterTime and hedgeTime are the constants of these names, and quarantine is on; tests set others.
	laterTime, hedgeTime time.Duration
	quarantine           bool
	// roster protects the nodes' knowledge of their servers: if two nodes with the same server connect at a time, at
	// least one must find that out.
	roster sync.Mutex

	notify    func(engine.Push)
	subscribe sync.Once
	pushesBy  atomic.Int64 // the instant from which a subscription that does not stand is not waited for

	seen    atomic.Bool  // a look has found a fit majority
	lookAt  atomic.Int64 // the instant of the next look at the servers
	looking atomic.Bool  // one is made beside the calls
	gate    *kit.Gate    // of the looks
}

// Prompt is engine.Prompt's: rounds return within the caller's context.
func (s *service) Prompt() {}

// Unfit is engine.Checked's.
func (s *service) Unfit() error { return s.unfit }

// Classify is engine.Service's. The table is redisconn's.
func (s *service) Classify(err error) engine.Class { return redisconn.Classify(err) }

// Close is engine.Service's.
func (s *service) Close(ctx context.Context) error {
	s.gate.Close()
	err := s.gate.Wait(ctx)
	var ends []<-chan struct{}
	for _, n := range s.nodes {
		ends = append(ends, n.push.Close(), n.line.Close())
	}
	if err == nil { // otherwise the goroutines end with their connections
		err = redisconn.Await(ctx, ends...)
	}
	for _, n := range s.nodes {
		err = errors.Join(err, n.client.Close())
	}
	return err
}

// nodeTimeout is the time that a step for holds of ttl waits for unresponsive servers, if they could decide its
// outcome.
func (s *service) nodeTimeout(ttl time.Duration) time.Duration {
	if s.o.NodeTimeout > 0 {
		return s.o.NodeTimeout
	}
	return min(max(ttl/4, 50*time.Millisecond), time.Second)
}

func (s *service) keys(name string) redisscript.Keys { return redisscript.KeysOf(s.o.KeyPrefix, name) }

// set is a set of nodes, by index.
type set uint32

func only(i int) set { return 1 << i }

func (s set) has(i int) bool { return s&only(i) != 0 }

func count(s set) int { return bits.OnesCount32(uint32(s)) }

func (s *service) all() set { return only(len(s.nodes)) - 1 }

// step is one step for one node.
type step struct {
	rediswire.Step
	node  int
	index int
	sink  chan<- *step
}

// Ended is rediswire.Owner's. The sink has room.
func (s *step) Ended() { s.sink <- s }

// round is one exchange. It belongs to the goroutine of its caller.
type round struct {
	s        *service
	keys     redisscript.Keys
	sink     chan *step
	deadline time.Time
	steps    []*step            // the last one of each node
	asked    set                // nodes that were asked
	open     set                // nodes that have not answered
	failed   set                // nodes that have failed after the last step was sent
	fault    *redisconn.Failure // the most informative failure of a node
	ended    bool               // the context of the round has ended, or its driver
	over     error              // of that context
}

// round prepares a round in which each node is asked twice at most.
func (s *service) round(keys redisscript.Keys, patience time.Duration) *round {
	r := new(round)
	r.begin(s, keys, patience)
	return r
}

func (r *round) begin(s *service, keys redisscript.Keys, patience time.Duration) {
	r.s, r.keys, r.sink = s, keys, make(chan *step, 2*len(s.nodes))
	r.steps, r.deadline = make([]*step, len(s.nodes)), time.Now().Add(patience)
}

// send asks node i.
func (r *round) send(i int, code string, args ...string) { r.to(only(i), code, args...) }

// to asks some nodes. A request for a vote that would not count fails immediately.
func (r *round) to(nodes set, code string, args ...string) {
	memory := make([]step, count(nodes))
	r.asked |= nodes
	r.open |= nodes
	r.failed &^= nodes
	for i, n := range r.s.nodes {
		if !nodes.has(i) {
			continue
		}
		s := &memory[0]
		memory = memory[1:]
		s.Code, s.Keys, s.Args, s.Deadline, s.Owner, s.node, s.sink = code, r.keys, args, r.deadline, s, i, r.sink
		if r.steps[i] = s; !n.refuses(s) {
			n.line.Submit(&s.Step)
		}
	}
}

// wait passes on the answers, until each returns true or all nodes have answered. After hedge it calls slow, unless nil,
// which may return true too. It is false if the time of the round, or of ctx, is over before that.
func (r *round) wait(ctx context.Context, hedge time.Duration, each func(*step) (done bool), slow func() (done bool)) bool {
	if r.open == 0 {
		return true
	}
	end := r.deadline
	if of, ok := ctx.Deadline(); ok && of.Before(end) {
		end = of
	}
	patience := time.Until(end)
	hedge = min(hedge, patience)
	timer := time.NewTimer(hedge)
	defer func() {
		timer.Stop()
		if r.ended {
			r.over = ctx.Err()
		}
	}()
	closing := engine.Closing(ctx)
	for {
		select {
		case s := <-r.sink:
			r.open &^= only(s.node)
			if s.Err != nil {
				r.fail(s.node, s.Err)
			}
			if each(s) || r.open == 0 {
				return true
			}
		case <-timer.C:
			switch {
			case slow == nil:
				if r.ended = end != r.deadline; r.ended { // the deadline of ctx may be known before its end
					select {
					case <-ctx.Done():
					case <-time.After(deadlineGrace):
					}
				}
				return false
			case slow():
				return true
			}
			slow = nil
			timer.Reset(patience - hedge)
		case <-ctx.Done():
			r.ended = true
			return false
		case <-closing:
			r.ended = true
			return false
		}
	}
}

// fail notes a fault: a permanent one has priority, and then one after which the step may have been executed.
func (r *round) fail(i int, f *redisconn.Failure) {
	r.failed |= only(i)
	if r.fault == nil || f.Fatal && !r.fault.Fatal || f.Sent && !r.fault.Sent && !r.fault.Fatal {
		r.fault = f
	}
}

// silent ends a round that more answers could decide. A step that its line has not taken is withdrawn, and is not
// executed. A node counts as sick if it had the whole time of the round; ctx may have ended early.
func (r *round) silent() {
	late := !time.Now().Before(r.deadline)
	for i, s := range r.steps {
		if !r.open.has(i) {
			continue
		}
		if late {
			r.s.nodes[i].sick.Store(true)
		}
		f := r.silence()
		if s.Drop() {
			r.open &^= only(i)
			f.Sent = false
		}
		r.fail(i, f)
	}
}

// silence returns the fault of a node without an answer.
func (r *round) silence() *redisconn.Failure {
	cause := errSilent
	if r.over != nil {
		cause = r.over
	}
	return &redisconn.Failure{Cause: cause, Sent: true}
}

// undecided is the error of a round without a majority. some is true if a node has executed it.
func (r *round) undecided(some bool) error {
	if r.fault == nil { // the nodes disagree
		r.fault = &redisconn.Failure{Cause: errSilent}
	}
	if some || r.fault.Sent {
		return &engine.Unanswered{Err: r.fault}
	}
	return r.fault
}

// one reads the answer to a step: 1 if it was executed, and 0 if it had no effect.
func one(s *step) (yes, ok bool) {
	n, isNumber := s.Answer.(int64)
	return n > 0, isNumber && s.Err == nil
}

var errAnswer = &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}

const (
	// lookInterval is the time after which the servers are looked at again.
	lookInterval = 30 * time.Second
	// deadlineGrace is for a context with a deadline that has passed to end.
	deadlineGrace = 20 * time.Millisecond
	// straggle is for the minority, once a majority has answered.
	straggle = 250 * time.Millisecond
)

// Probe is engine.Prober's.
func (s *service) Probe(ctx context.Context) error { return s.Ping(ctx) }

// Ping is engine.Service's. It connects to all servers concurrently, which vets them. An unreachable minority is no
// obstacle: its servers are vetted when they come back, before their votes count. One unfit server makes the whole set
// unfit: a mistake of the configuration is best found immediately.
func (s *service) Ping(ctx context.Context) error {
	r := s.round(s.keys("ping"), s.patience)
	r.to(s.all(), redisscript.Inform)
	well, errs, unfit := 0, []error(nil), error(nil)
	count := func(p *step) bool {
		if p.Err == nil {
			well++
			return false
		}
		err := fmt.Errorf("server %s: %w", s.nodes[p.node].addr, p.Err)
		errs = append(errs, err)
		if p.Err.Fatal {
			unfit = err
		}
		return unfit != nil
	}
	if !r.wait(ctx, s.patience, func(p *step) bool { return count(p) || well == s.quorum }, nil) {
		errs = append(errs, fmt.Errorf("the others: %w", errSilent))
	} else if unfit == nil {
		r.wait(ctx, straggle, count, nil)
	}
	switch {
	case unfit != nil:
		return &redisconn.Failure{Cause: unfit, Fatal: true}
	case well < s.quorum:
		return &redisconn.Failure{Cause: fmt.Errorf("%d of %d servers answer, but %d are needed: %w",
			well, len(s.nodes), s.quorum, errors.Join(errs...))}
	}
	s.seen.Store(true)
	s.lookAt.Store(int64(s.clock.Now().Add(redisscript.Jitter(lookInterval))))
	return nil
}

// look has all servers looked at when that is due, beside the calls: their settings may have changed. A server that is
// now unfit is asked for no more votes; its votes can still be renewed and released.
func (s *service) look(now backend.Instant) {
	if int64(now) < s.lookAt.Load() || !s.looking.CompareAndSwap(false, true) {
		return
	}
	if !s.gate.Go(func(context.Context) {
		defer s.looking.Store(false)
		ctx, cancel := context.WithTimeout(s.gate.Closing(), s.patience)
		defer cancel()
		var all sync.WaitGroup
		for _, n := range s.nodes {
			all.Go(func() { n.lookAgain(ctx) })
		}
		all.Wait()
		s.lookAt.Store(int64(s.clock.Now().Add(redisscript.Jitter(lookInterval))))
	}) {
		s.looking.Store(false)
	}
}

func (n *node) lookAgain(ctx context.Context) {
	switch err := n.vet(ctx, n.client); {
	case err == nil:
		n.misfit.Store(nil)
	case errors.Is(err, backend.ErrMisconfigured):
		n.misfit.Store(&redisconn.Failure{Cause: err}) // not Fatal: the others may have a majority
	}
}

// refuses fails a request for a vote of an unfit node.
func (n *node) refuses(s *step) bool {
	f := n.misfit.Load()
	if f == nil {
		return false
	}
	switch s.Code {
	case redisscript.Set, redisscript.Try, redisscript.TryAgain, redisscript.Wait, redisscript.WaitAgain:
		s.Err = f
		s.sink <- s
		return true
	}
	return false
}

// States of a subscription.
const (
	connecting uint32 = iota
	standing
	broken
)

// pushTime bounds the wait for the subscription of a server that neither answers nor refuses.
const pushTime = 2 * time.Second

// Listen is engine.Pushes's.
func (s *service) Listen(notify func(engine.Push)) { s.notify = notify }

// leader returns the node in whose queue a waiter stands: the first fit server of the list that notifies waiters.
// Waiters with other leaders would split the votes, so it is -1 while the subscription of an earlier node may still
// come to stand, and if there is no leader. The first waiter starts the subscriptions; a confirmed one makes PushGap
// have all waiters look.
func (s *service) leader() int {
	s.subscribe.Do(func() {
		s.pushesBy.Store(int64(s.clock.Now().Add(pushTime)))
		for _, n := range s.nodes {
			n.push.Start(n.client, redisscript.Channel(s.o.KeyPrefix, s.identity), redisconn.Listener{
				Confirmed: func() {
					n.up.Store(standing)
					s.notify(engine.Push{What: engine.PushGap})
				},
				Message: n.heard,
				Lost: func(error) bool {
					n.up.Store(broken)
					return false
				},
			})
		}
	})
	waits := s.clock.Now() < backend.Instant(s.pushesBy.Load())
	sick := -1
	for i, n := range s.nodes {
		switch up := n.up.Load(); {
		case up == standing && !n.sick.Load():
			return i
		case up == standing && sick < 0:
			sick = i
		case up == connecting && waits:
			return -1
		}
	}
	return sick
}

// heard acts on one message. Messages can be lost and may be stale, so they only make a waiter ask again.
func (n *node) heard(text string) {
	m, ok := redisscript.ParsePush(text)
	if !ok {
		return
	}
	if m.Kind == redisscript.PushOffered {
		if len(m.Nonce) > redisconn.KeyDigits {
			n.s.notify(engine.Push{
				What: engine.PushTurn, RequestID: m.Nonce[:redisconn.KeyDigits], Handed: strconv.Itoa(n.index) + " " + m.Nonce,
			})
		}
		return
	}
	if name, ok := redisscript.NameOf(n.s.o.KeyPrefix, m.Lock); ok {
		turns := engine.Push{What: engine.PushTurns, Name: name}
		if m.Kind == redisscript.PushClosed {
			turns.After = redisscript.SettleIn(m.For)
		}
		n.s.notify(turns)
	}
}

// Key is engine.Keys's: a hash, because pushes are public and request ids are not.
func (s *service) Key(requestID string) string {
	return string(redisconn.AppendKey(nil, s.seed, requestID))
}
