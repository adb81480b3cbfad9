package redlock

// This file is one Acquire that waits. After a first try it becomes a waiter: it stands in the queue of one server, the
// leader, and asks the others for their votes when the leader has given its own. look.go holds what a waiter does by
// time, waiters.go how pushes find it.
//
// Everything that happens to a waiter passes through one goroutine, its caller's, in the loop of contend: answers come
// from sink, pushes from events, and one timer is set to what is due next. So a waiter needs no lock. The loop ends
// with a grant, a fault, a split vote, ctx, or Close, and gives back whatever any server may have.
//
// The promise is exclusion, and an order that is that of arrival as a rule. Exclusion is what majority counts; the
// order is worth only as much machinery as keeps votes from splitting.

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// A waiter checks its places and votes as often as redisscript says, and more often once it has a vote.
const (
	// reachLook is for a waiter that has the leader's vote and lacks others: what it waits for is on its way.
	reachLook = 40 * time.Millisecond
	// reachEvery, or a third of the TTL, is between its later looks: a look keeps the votes alive that it has.
	reachEvery = 500 * time.Millisecond
	// patientFor is how many looks at split votes pass before it gives up its own.
	patientFor = 2
)

// wait acquires, however long that takes. The first thing is a try like any other, as a free lock must not depend on
// subscriptions. It is left out where others are known to wait: on the servers behind the leader nobody stands in a
// queue, so a try there takes votes that the next in line needs.
//
// Then rounds of contend follow until one is granted the lock. A split round is followed by a random pause, a fault by
// one that grows.
func (a *attempt) wait(ctx context.Context) (backend.Grant, error) {
	if !a.d.waiters.contended(a.keys.Lock) {
		g, won, v := a.once(ctx)
		switch {
		case won:
			return g, nil
		case v.fault != nil && (v.fault.Fatal || ctx.Err() != nil):
			return backend.Grant{}, a.giveUp(ctx, v.fault)
		case ctx.Err() != nil:
			return backend.Grant{}, a.giveUp(ctx, &redisconn.Failure{Cause: ctx.Err(), Fatal: true})
		}
	}
	// A place in a queue is worth nothing to a client that hears no push.
	if err := a.d.listen(ctx); err != nil {
		return backend.Grant{}, a.giveUp(ctx, redisconn.FailureOf(err))
	}
	for splits, faults := 0, 0; ; {
		g, err := a.contend(ctx)
		if err == nil {
			return g, nil
		}
		// The places of the last try may still be there.
		a.again = true
		if errors.Is(err, errSplit) {
			splits++
			if redisconn.PauseFor(ctx, splitPause(splits)) {
				continue
			}
			return backend.Grant{}, a.giveUp(ctx, &redisconn.Failure{Cause: ctx.Err(), Fatal: true})
		}
		f := redisconn.FailureOf(err)
		faults++
		if f.Fatal || !redisconn.Pause(ctx, faults) {
			return backend.Grant{}, a.giveUp(ctx, f)
		}
		if a.d.gate.Closed() {
			return backend.Grant{}, backend.ErrClosed
		}
	}
}

// waiter is an attempt that waits, in one of its tries.
//
// It stands in the queue of one node, the leader: the first in the order of the clients' list that is well. Only the
// waiter that has the leader's vote asks the other nodes, in whose queues there is then hardly anybody else; so votes
// split only while waiters disagree about the leader, for lack of a connection to it for example. Queues on all nodes
// at once were rejected: each has its own order, and with many waiters none of them gets a majority in any round.
//
// The queue is a matter of order alone. Whatever becomes of it, the lock belongs to nobody who lacks the votes of a
// majority.
type waiter struct {
	a *attempt
	h redisscript.Hold
	// Pushes, from the goroutines of the subscriptions. They never block: what does not fit is found by the next look.
	events chan event
	// Answers. It has room for every step under way, which flying counts.
	sink chan *step

	places []place
	leader int
	// When the leader was asked, if it has not answered: after patience another one leads.
	asked time.Time
	// The other nodes were asked, since the leader gave its vote.
	reached bool
	// Steps under way.
	flying int
	// Looks in a row that found the votes split.
	looks int
	// When to look next; also soon after a hold that is in the way should have run out, as a look lets the server hand
	// over.
	look time.Time
}

// place is what a waiter has on one node, as far as it knows.
type place struct {
	state placeState
	// The place, or the vote, was there after this instant. Zero for a vote that was offered and not yet accepted: it
	// does not count.
	proved backend.Instant
	// The push for the place was here before the answer that there is one.
	early bool
	// The last step ended without an answer, so that nobody knows.
	unsure bool
	// The last step that asked for the place; nil if none did, so that there is nothing to give back.
	step *step
	// The request in the way, as the last look has found.
	holder string
}

// placeState is what a waiter knows of its place on one node.
type placeState uint8

const (
	// Nothing is there, or it was given up.
	absent placeState = iota
	// A step that asks for it is under way.
	asking
	// It stands in the queue.
	queued
	// The node has given, or offered, its vote.
	voted
)

// contend makes one try, which ends with a grant, the end of ctx, a fault, or a split vote. The waiter is known to the
// pushes before its first request leaves, as a push may overtake the answer.
func (a *attempt) contend(ctx context.Context) (backend.Grant, error) {
	d := a.d
	x := &waiter{
		a: a, h: a.hold(), places: make([]place, len(d.nodes)),
		events: make(chan event, 8*len(d.nodes)), sink: make(chan *step, 16*len(d.nodes)),
	}
	d.waiters.add(x) // before the request leaves: the push may overtake the answer
	defer d.waiters.remove(x)
	if !x.enter() {
		return backend.Grant{}, &redisconn.Failure{Cause: errNobody}
	}
	x.lookIn(redisscript.FirstLook())
	// The timer is set anew in each turn of the loop; an hour is only what it is made with.
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(max(0, time.Until(x.due())))
		var err error
		select {
		case s := <-x.sink:
			x.flying--
			err = x.answered(s)
		case e := <-x.events:
			x.heard(e)
		case <-timer.C:
			err = x.tick()
		case <-ctx.Done():
			err = &redisconn.Failure{Cause: ctx.Err(), Fatal: true}
		case <-d.gate.Closing().Done():
			err = backend.ErrClosed
		}
		if err == nil {
			// A majority whose validity is over is not an end: the votes are renewed by the next look.
			if sentAt := x.majority(); sentAt != 0 {
				if g, valid := a.grant(x.h, sentAt); valid {
					return g, nil
				}
			}
			continue
		}
		// What any server may have is given back as leftovers. Only what no answer has told of makes the outcome
		// unknown.
		if x.unsure() {
			a.unsure = errSilent
		}
		// All nodes that were ever asked: giving back what is not there does nothing.
		a.giveBack(x.h, x.left())
		return backend.Grant{}, err
	}
}

// enter asks for a place on the first node that is well, or that at least has a subscription. It is false if there is
// none: without one nobody would tell of the turn.
func (x *waiter) enter() bool {
	for _, picky := range []bool{true, false} {
		for i, n := range x.a.d.nodes {
			// The first pass takes nodes that are well only, the second one any that can tell of the turn.
			if n.push.up.Load() && (!picky || !n.sick.Load()) {
				x.leader, x.reached = i, false
				if x.places[i].state == absent {
					x.asked = time.Now()
					x.queue(i)
				}
				return true
			}
		}
	}
	return false
}

// queue asks node i for its vote, or a place in its queue; without a subscription there, for its vote alone.
func (x *waiter) queue(i int) {
	n, a := x.a.d.nodes[i], x.a
	once, again := redisscript.Wait, redisscript.WaitAgain
	if !n.push.up.Load() {
		once, again = redisscript.Try, redisscript.TryAgain
	}
	p := &x.places[i]
	code, args := a.ask(x.h, a.again || p.step != nil, once, again)
	p.state, p.unsure, p.early = asking, true, false
	p.step = n.stepFor(x.sink, a.keys, code, args...)
	x.submit(i, p.step)
}

// accept makes a vote whole that node i has offered, which otherwise ends after a second. It does not count before the
// answer; without an answer, a look renews it.
func (x *waiter) accept(i int) {
	x.places[i].proved = 0
	if x.flying < cap(x.sink) {
		x.submit(i, x.a.d.nodes[i].stepFor(x.sink, x.a.keys, redisscript.Accept,
			x.h.Start(), redisscript.Millis(x.h.PX)))
	}
}

// submit sends s to node i. There is room for its answer in sink: callers that may ask often look at flying before.
func (x *waiter) submit(i int, s *step) {
	s.index = i
	s.Deadline = time.Now().Add(x.a.patience)
	x.flying++
	x.a.d.nodes[i].ask(s)
}

// answered takes in one answer. An error ends the try only if trying again cannot help (Fatal), or if nobody is left to
// lead; otherwise the place is asked for again with the next look.
//
// A vote by any node is the sign to go ahead, also by one that led before: then its queue had this waiter first. A
// place that is gone from the leader is asked for again at once, there or on the next node that is well.
func (x *waiter) answered(s *step) error {
	i := s.index
	p := &x.places[i]
	if s.Err != nil {
		// The server refuses this client, or cannot run the script: waiting does not help.
		if s.Err.Fatal {
			return s.Err
		}
		// Whether it was run is not known, so the try's end has it given back.
		if s.Err.Sent {
			p.unsure = true
		} else if p.state == asking {
			p.unsure = false
		}
		if p.state == asking {
			p.state = absent
		}
		return x.failed(i)
	}
	p.unsure = false
	if i == x.leader {
		x.asked = time.Time{}
	}
	n, isNumber := s.Answer.(int64)
	switch s.Code {
	case redisscript.Wait, redisscript.WaitAgain, redisscript.Try, redisscript.TryAgain:
		switch {
		// Granted at once, or in the queue and offered the vote before this answer came. An offer has to be accepted.
		case isNumber && (n == 1 || p.early):
			p.state, p.proved = voted, s.SentAt
			if n != 1 {
				x.accept(i)
			}
		case isNumber:
			p.state, p.proved = queued, s.SentAt
		default:
			p.state = absent
		}
	case redisscript.Accept:
		if n == 1 {
			p.state, p.proved = voted, s.SentAt
		} else {
			p.state = absent
		}
	case redisscript.Inform:
		state, _ := redisscript.ParseState(s.Answer)
		p.holder = state.Hold.Request
	case redisscript.Look:
		x.looked(i, s)
	}
	switch {
	case p.state == voted:
		x.turn(i)
	// The place is gone there: the present leader, this one again or the next, is asked for a new one.
	case i == x.leader && p.state == absent && s.Code != redisscript.Inform:
		if !x.enter() {
			return &redisconn.Failure{Cause: errNobody}
		}
	}
	return nil
}

// looked takes in the answer to a look: what became of the place, how long the queue is, which sets the pace of the
// next look, and when the hold in the way should have run out.
func (x *waiter) looked(i int, s *step) {
	found, ok := redisscript.ParseLooked(s.Answer, 1)
	p := &x.places[i]
	// An answer to a look that left before the place was asked for again says nothing about the new one.
	if !ok || p.state == asking {
		return
	}
	// The longer the queue, the less often: what many clients ask of the leader together stays bounded.
	if i == x.leader && !x.reached && time.Until(x.look) > 0 {
		x.lookIn(redisscript.NextLook(found.Length))
	}
	if found.ExpiresIn >= 0 && p.state != voted {
		x.soon(redisscript.SettleIn(found.ExpiresIn)) // a look lets the node hand over, too
	}
	switch found.Places[0] {
	case redisscript.PlaceGone:
		p.state = absent
	case redisscript.PlaceQueued:
		if p.state != voted { // the push for it overtook the answer
			p.state, p.proved = queued, s.SentAt
		}
	case redisscript.PlaceHolds:
		p.state, p.proved = voted, s.SentAt
	}
}

// heard takes in a push. An offer to a place in the queue is accepted, and taken as the turn; one that arrived before
// the answer is noted for when that comes. An offer may be stale, made to an earlier place of the same try: then the
// answer to accept says so, and the place is asked for again. All else is a reason to look.
func (x *waiter) heard(e event) {
	p := &x.places[e.node]
	switch {
	case e.offered && p.state == queued:
		p.state = voted
		x.accept(e.node)
		x.turn(e.node)
	case e.offered && p.state == asking:
		p.early = true
	case e.closed > 0:
		x.soon(redisscript.SettleIn(e.closed))
	case !e.offered && p.step != nil:
		x.soon(0)
	}
}

// turn takes the vote of a node in whose queue the waiter stood as the sign to go ahead. It may be a former leader.
func (x *waiter) turn(i int) {
	if !x.reached {
		x.leader = i
		x.reach()
	}
}

// reach asks the other nodes: the leader's vote is the sign that it is this waiter's turn.
func (x *waiter) reach() {
	x.reached, x.looks = true, 0
	for i := range x.places {
		if x.places[i].state == absent {
			x.queue(i)
		}
	}
	x.lookIn(redisscript.Jitter(reachLook))
}

// failed acts on a node that does not answer: if it was the leader, another one leads. After reach the leader is a node
// like any other.
func (x *waiter) failed(i int) error {
	if i != x.leader || x.reached {
		return nil
	}
	// The next waiters choose another leader, too.
	x.a.d.nodes[i].sick.Store(true)
	if !x.enter() {
		return &redisconn.Failure{Cause: errNobody}
	}
	return nil
}
