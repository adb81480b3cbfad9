package redlock

// This file is one round of votes: ask a first majority, the others where that does not decide, and return as soon as
// the outcome is certain. The servers that may have an entry of the try afterwards are recorded, since all of
// them are asked to remove it.

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const (
	// hedgeTime is for the first majority, before the other servers are asked beside it.
	hedgeTime = 3 * time.Millisecond
	// asideTime is the time for which a server that kept a call waiting is not asked first.
	asideTime = time.Second
)

// set is a set of nodes, by index.
type set uint32

// only is the set of one node.
func only(i int) set { return 1 << i }

// has reports whether node i is in the set.
func (s set) has(i int) bool { return s&only(i) != 0 }

// all is the set of all nodes.
func (d *Driver) all() set { return only(len(d.nodes)) - 1 }

// first returns the nodes that a poll begins with: a majority of the healthy ones, in the order of the list, so that
// clients with the same view meet on the same servers. The other nodes need not be asked if a majority decides, and
// hardly any hold is short and unlucky enough for it to matter: see Options.WaitForAll. Random majorities of two
// clients may share one server only, and split the votes of the others.
func (a *attempt) first(now time.Time) set {
	d := a.d
	// A request that was here before may have votes on any server, and all are to be replaced.
	if a.again || d.o.WaitForAll {
		return d.all()
	}
	var first set
	left := d.quorum
	for i, n := range d.nodes {
		if n.aside.Load() < now.UnixNano() {
			first |= only(i)
			if left--; left == 0 {
				return first
			}
		}
	}
	return d.all()
}

// putAside has the next calls ask others first.
func (n *node) putAside() { n.aside.Store(time.Now().Add(asideTime).UnixNano()) }

// vote is one poll: its questions and its result. It belongs to the goroutine that polls.
type vote struct {
	a        *attempt
	h        redisscript.Hold
	args     []string
	sink     chan *step
	deadline time.Time
	// The last step for each node.
	steps []*step
	// Nodes that are known to answer.
	healthy int

	// Nodes that were asked.
	asked set
	// Nodes that have not answered.
	open set
	// Nodes that have, may have, or will have the try's vote.
	kept set
	// By node; zero: no vote.
	proved []backend.Instant
	yes    int
	// How many nodes were held by each request that was in the way.
	refused map[string]int
	no      int
	// The most refusals for one holder.
	top  int
	held error
	// One of the failures.
	fault *redisconn.Failure
}

// poll asks for the lock: a first majority, and the other nodes if that does not decide, or not soon. It returns as
// soon as the outcome is certain, or patience is over. Steps that a line has not taken by then are taken back.
func (a *attempt) poll(ctx context.Context, h redisscript.Hold) *vote {
	d := a.d
	now := time.Now()
	v := &vote{
		a: a, h: h, proved: make([]backend.Instant, len(d.nodes)), steps: make([]*step, len(d.nodes)),
		sink: make(chan *step, 2*len(d.nodes)), deadline: now.Add(a.patience),
	}
	// Counted before asking: a request that was here before waits for all of these.
	for _, n := range d.nodes {
		if !n.sick.Load() {
			v.healthy++
		}
	}
	if a.again {
		// The next poll asks those servers, too.
		d.cancelLater(a.r.RequestID, "")
	}
	v.ask(a.first(now))
	if !gather(ctx, v.sink, d.hedgeTime, a.patience, v.answered, v.slow) {
		v.silent(!time.Now().Before(v.deadline))
	}
	if v.fault != nil && v.fault.Sent || v.open != 0 && !v.certain() {
		a.again = true
	}
	return v
}

// ask asks nodes that were not asked before. An uncontended name is taken without the script.
func (v *vote) ask(nodes set) {
	code := redisscript.Set
	if v.a.d.wanted.Has(v.a.keys.Lock) {
		code = redisscript.Try
	}
	code, v.args = v.a.ask(v.h, v.a.again, code, redisscript.TryAgain)
	for i := range v.steps {
		if nodes.has(i) {
			v.asked |= only(i)
			v.open |= only(i)
			v.send(i, code, v.args...)
		}
	}
}

// rest asks all who were not asked yet.
func (v *vote) rest() { v.ask(v.a.d.all() &^ v.asked) }

// send asks node i, once more if it was asked before.
func (v *vote) send(i int, code string, args ...string) {
	n := v.a.d.nodes[i]
	s := n.stepFor(v.sink, v.a.keys, code, args...)
	s.index, s.Deadline, v.steps[i] = i, v.deadline, s
	n.ask(s)
}

// slow acts on a first majority that does not answer at once: the others are asked beside it, and the late ones
// are asked last for a while.
func (v *vote) slow() (done bool) {
	for i, n := range v.a.d.nodes {
		if v.open.has(i) {
			n.putAside()
		}
	}
	v.rest()
	return false
}

// answered processes one answer, and reports whether no more are needed. If a server refused SET NX, the script is
// asked too, which names the holder: without it the caller could not tell a lock that is held from a split vote.
func (v *vote) answered(s *step) (done bool) {
	d, i := v.a.d, s.index
	n, isNumber := s.Answer.(int64)
	// The script says who is in the way.
	if s.Err == nil && s.Code == redisscript.Set && n != redisscript.TakeGranted {
		d.wanted.Note(v.a.keys.Lock)
		v.send(i, redisscript.Try, v.args...)
		return false
	}
	// Its answer is final: it is its vote, a refusal, or a fault.
	v.open &^= only(i)
	switch {
	case s.Err != nil:
		d.nodes[i].putAside()
		if v.fault == nil || s.Err.Fatal {
			v.fault = s.Err
		}
		// The vote may be there: it is released unless this try wins.
		if s.Err.Sent {
			v.kept |= only(i)
		}
	case isNumber && n == 1:
		v.proved[i] = s.SentAt
		v.kept |= only(i)
		v.yes++
	default:
		v.kept &^= only(i)
		v.refusal(v.a.r.Name, s.Answer)
	}
	if v.certain() {
		// A request that was here before may have left something on every node: the later grant replaces the earlier
		// one on all that are known to answer, before the caller can go on.
		return !v.a.again && !d.o.WaitForAll || v.yes+v.no >= v.healthy || v.open == 0
	}
	// The first majority cannot be complete any more, or has answered without deciding.
	if s.Err != nil || v.open == 0 {
		v.rest()
	}
	return v.open == 0
}

// certain reports whether more answers cannot change the outcome: a majority for this try, or for one other holder.
func (v *vote) certain() bool { return v.yes >= v.a.d.quorum || v.top >= v.a.d.quorum }

// silent gives up on nodes that have not answered. late says that they had all the time that nodes have, so that they
// count as sick; otherwise it was ctx that ended.
//
// A step that its line has not taken yet is taken back, and leaves no vote. If the line has taken it, the vote
// may be given later: the node stays in open, and so in left.
func (v *vote) silent(late bool) {
	taken := false
	for i, n := range v.a.d.nodes {
		if !v.open.has(i) {
			continue
		}
		if late {
			n.sick.Store(true)
		}
		// Taken back before a line had it: the server never hears of it.
		if v.steps[i].Drop() {
			v.open &^= only(i)
		} else {
			taken = true
		}
	}
	switch {
	// A line has taken a question that nobody has answered: the vote may be there.
	case taken && !v.certain():
		v.fault = &redisconn.Failure{Cause: errSilent, Sent: true}
	case v.fault == nil:
		// No server has seen the question: each is still being connected to, or owes an answer to an earlier one.
		v.fault = &redisconn.Failure{Cause: errSilent}
	}
}

// left returns the nodes that have, may have, or will have the try's vote. A try that was not won releases it there,
// and only there.
func (v *vote) left() set { return v.kept | v.open }

// refusal notes the answer of a node that did not vote for us: who holds its vote, by the request.
func (v *vote) refusal(name string, answer any) {
	v.no++
	s, ok := redisscript.ParseState(answer)
	if !ok || s.Value == "" {
		return // it was free in the end: somebody gave up its place just now
	}
	id := s.Value
	// A hold is counted by its request, so that two tries of one request are one holder; a closed name by its mark.
	if s.Held {
		id = s.Hold.Request
	}
	if v.refused == nil {
		v.refused = map[string]int{}
	}
	v.refused[id]++
	// The error of a refused caller names the holder with the most votes.
	if v.refused[id] > v.top {
		v.top, v.held = v.refused[id], redisconn.HeldError(name, s)
	}
}
