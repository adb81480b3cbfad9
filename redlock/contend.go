package redlock

// This file is one Acquire that waits. After a first try it becomes a waiter: it stands in the queue of one server, the
// leader, and asks the others for their votes when the leader has voted. look.go holds a waiter's timed actions,
// waiters.go the way of a push to its waiter.
//
// One goroutine, the caller's, handles all events of a waiter in the loop of contend: answers come from sink, pushes
// from events, and one timer is set to the next action. So a waiter needs no lock. The loop ends with a grant, a fault,
// a split vote, ctx, or Close, and releases all votes and places that a server may have.
//
// The promise is exclusion, and, as a rule, the order of arrival. majority counts votes for exclusion; the order has
// only as much machinery as keeps votes from splitting.

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
	// reachLook is for a waiter that has the leader's vote and lacks others: the other votes are on their way.
	reachLook = 40 * time.Millisecond
	// reachEvery, or a third of the TTL, is between its later looks: a look keeps its votes alive.
	reachEvery = 500 * time.Millisecond
	// patientFor is the number of looks at split votes before it drops its own votes.
	patientFor = 2
)

// wait acquires, however long that takes. The first thing is a try like any other, as a free lock must not depend on
// subscriptions. It is left out where others are known to wait: on the servers behind the leader nobody stands in a
// queue, so a try there takes votes that the next in line needs.
//
// Then rounds of contend follow until one is granted the lock. A split round is followed by a random pause, a fault by
// a growing one.
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
	// A place in a queue is worthless to a client without pushes.
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
// It stands in the queue of one node, the leader: the first healthy one in the order of the clients' list. Only the
// waiter with the leader's vote asks the other nodes, which then have almost empty queues; so votes split only while
// waiters disagree about the leader, for lack of a connection to it for example. Queues on all nodes would differ in
// their order, and with many waiters nobody would get a majority in any round.
//
// The queue is only a matter of order. The lock never belongs to a request without the votes of a majority.
type waiter struct {
	a *attempt
	h redisscript.Hold
	// Pushes, from the goroutines of the subscriptions. They never block: the next look finds the rest.
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

// place is the known state of a waiter on one node.
type place struct {
	state placeState
	// The place, or the vote, was there after this instant. Zero for a vote that was offered and not yet accepted: it
	// does not count.
	proved backend.Instant
	// The push for the place was here before the answer that there is one.
	early bool
	// The last step ended without an answer, so the state is unknown.
	unsure bool
	// The last step that asked for the place; nil if no step did: there is no entry to remove.
	step *step
	// The request in the way, as the last look has found.
	holder string
}

// placeState is the known state of a place on one node.
type placeState uint8

const (
	// There is no place, or it was dropped.
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
	// The timer is set anew in each turn of the loop; an hour is only the initial value.
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
			// A majority after the end of its validity is not an end: the votes are renewed by the next look.
			if sentAt := x.majority(); sentAt != 0 {
				if g, valid := a.grant(x.h, sentAt); valid {
					return g, nil
				}
			}
			continue
		}
		// All that a server may have is released as leftovers. Only a part without an answer makes the outcome unknown.
		if x.unsure() {
			a.unsure = errSilent
		}
		// All nodes that were ever asked: removing an absent entry has no effect.
		a.giveBack(x.h, x.left())
		return backend.Grant{}, err
	}
}

// enter asks for a place on the first healthy node, or else one with a subscription. It is false if there is
// neither: without a subscription no push would announce the turn.
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

// answered processes one answer. An error ends the try only if it is permanent (Fatal), or if no node is left to lead;
// otherwise the next look asks for a new place.
//
// A vote by any node is the sign to go ahead, even by a former leader: its queue then had this waiter first. If a place
// has gone from the leader, a new one is requested immediately, there or on the next healthy node.
func (x *waiter) answered(s *step) error {
	i := s.index
	p := &x.places[i]
	if s.Err != nil {
		// The server refuses this client, or cannot run the script: waiting does not help.
		if s.Err.Fatal {
			return s.Err
		}
		// The step may have run, so the end of the try removes its entry.
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
	// The place is gone there: the present leader, the same or the next, is asked for a new one.
	case i == x.leader && p.state == absent && s.Code != redisscript.Inform:
		if !x.enter() {
			return &redisconn.Failure{Cause: errNobody}
		}
	}
	return nil
}

// looked takes in the answer to a look: the state of the place, the length of the queue, which sets the pace of the
// next look, and the expected end of the hold in the way.
func (x *waiter) looked(i int, s *step) {
	found, ok := redisscript.ParseLooked(s.Answer, 1)
	p := &x.places[i]
	// An answer to a look that left before the new request for a place is about the old place.
	if !ok || p.state == asking {
		return
	}
	// The longer the queue, the less often: this bounds the leader's load from many clients.
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

// heard processes a push. An offer to a place in the queue is accepted, and taken as the turn; if it arrived before the
// answer, it is noted for that answer. An offer may be stale, made to an earlier place of the same try: then the answer
// to accept says so, and a new place is requested. Any other push is a reason to look.
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

// turn takes the vote of a node on which the waiter was queued as the sign to go ahead. It may be a former leader.
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
