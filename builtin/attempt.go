package builtin

// Attempts: one acquire on its way, from its request to the grant or the refusal, over as many connections as that
// takes.

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// attempt is one acquire of one session, of one name or of several in one step, until it is decided: granted, refused,
// or over so that another one must follow.
//
// Each has a sequence: whenever it arrives, and however often, it is carried out once, and not at all after the
// clean-up that follows when it is given up.
type attempt struct {
	s        *session
	wishes   []wish
	wait     bool
	heir     bool // something that it asks for may be there already
	sequence uint64

	// The following fields are protected by Driver.mu.

	call   *call // the acquire itself
	queued bool  // it has a place in the queue
	on     *conn // the connection on which the service told of that last

	// The following fields are valid once done is closed.

	done   chan struct{}
	grants []*lockpb.Grant // one for each of wishes
	sentAt backend.Instant // the holds' validity rests on it
	before backend.Instant // the grant did not come before it
	err    error
}

// wish is one name that an attempt asks for.
type wish struct {
	key
	lost func(backend.Reason) // nil if nobody listens
}

// is reports whether g grants it.
func (w wish) is(g *lockpb.Grant) bool { return g.Name == w.name && g.RequestId == w.requestID }

// begin sends an acquire. patient: it outlasts a time in which nobody leads, as one does that had a place in the queue
// before. heir: it follows a takeOver, so that something of it may be in the service even if it is never sent.
func (s *session) begin(rs []backend.Request, patient, heir bool) *attempt {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	a := &attempt{
		s: s, wishes: make([]wish, len(rs)), wait: rs[0].Wait, heir: heir, sequence: s.number(),
		done: make(chan struct{}),
	}
	for i := range rs {
		a.wishes[i] = wish{key{rs[i].Name, rs[i].RequestID}, rs[i].Lost}
	}
	if s.Ended() {
		a.decide(nil, errSessionEnded)
		return a
	}
	for _, w := range a.wishes {
		s.overtake(w.key)
		s.attempts[w.key] = append(s.attempts[w.key], a)
	}
	a.call = &call{
		request: acquireOf(rs), session: s, sequence: a.sequence, waits: a.wait, patient: patient, then: a.answered,
	}
	d.start(a.call)
	return a
}

// repeat asks once more, with a sequence of its own: the answer is the hold or the place in the queue that the request
// has. The caller holds d.mu.
func (a *attempt) repeat() {
	a.withdraw()
	next := *a.call
	a.sequence, a.on = a.s.number(), a.s.d.conn
	next.sequence, next.first, next.patient = a.sequence, a.call.began(), true
	a.call = &next
	a.s.d.start(a.call)
}

// asks reports whether the acquire has no answer yet. The caller holds d.mu.
func (a *attempt) asks() bool { return a.call != nil && a.s.d.calls[a.call.number] == a.call }

// withdraw takes no answer to the acquire any more. The caller holds d.mu.
func (a *attempt) withdraw() {
	if a.asks() {
		delete(a.s.d.calls, a.call.number)
	}
	a.s.settled(a.sequence)
}

// acquireOf is the request on the wire for rs.
func acquireOf(rs []backend.Request) *lockpb.Request {
	if len(rs) == 1 {
		one := oneOf(&rs[0])
		one.Under = slices.Clone(rs[0].Under)
		return &lockpb.Request{Call: &lockpb.Request_Acquire{Acquire: one}}
	}
	all := &lockpb.AcquireAll{Requests: make([]*lockpb.Acquire, len(rs)), Under: slices.Clone(rs[0].Under)}
	for i := range rs {
		all.Requests[i] = oneOf(&rs[i])
	}
	return &lockpb.Request{Call: &lockpb.Request_AcquireAll{AcquireAll: all}}
}

func oneOf(r *backend.Request) *lockpb.Acquire {
	return &lockpb.Acquire{
		Name: r.Name, RequestId: r.RequestID, HoldId: r.HoldID, Owner: r.Owner, Wait: r.Wait,
		Kind: kindsOut[r.Kind], Permits: uint32(r.Permits), Limit: uint32(r.Limit), Hierarchical: r.Hierarchical,
		Metadata: maps.Clone(r.Metadata), MinHoldNanos: int64(r.MinHold),
	}
}

// answered takes the answer to the acquire: it decides the attempt, or says that it waits in the queue, or that it must
// be sent again. The caller holds d.mu.
//
// A grant is valid from the instant at which the acquire was sent only if the answer says that it renewed the session.
// Otherwise its validity rests on what proved the session last.
func (a *attempt) answered(r *lockpb.Reply, err error) {
	s := a.s
	acquired, wire := r.GetAcquired(), r.GetError()
	grants := a.inOrder(acquired.GetGrants())
	switch {
	case err != nil:
		a.decide(nil, err)
	case acquired.GetQueued() && !a.wait:
		a.decide(nil, &backend.HeldError{}) // the request waits already, and this attempt does not
	case acquired.GetQueued():
		a.queued, a.on = true, s.d.conn
		s.settled(a.sequence)
	case grants != nil:
		sent := a.call.sent
		if !r.Renewed {
			sent = s.proved
		}
		a.sentAt, a.before = sent, a.call.left
		a.hold(grants)
	case wire == nil:
		a.decide(nil, fmt.Errorf("%w: %w", backend.ErrUnknown, errors.New("an acquire was answered as something else")))
	case wire.Code == lockpb.Code_CODE_UNAVAILABLE, wire.Code == lockpb.Code_CODE_UNKNOWN:
		a.again(wire)
	case wire.Code == lockpb.Code_CODE_NOT_HELD:
		a.decide(nil, errAgain) // sent again, and what it was granted has ended since
	case wire.Code == lockpb.Code_CODE_SESSION_ENDED:
		s.end(backend.ReasonSessionExpired)
	default:
		a.decide(nil, replyError(wire))
	}
}

// inOrder returns one grant for each of the wishes, in their order; nil if grants are not for exactly these. The server
// keeps the order of the request that took the place in the queue, which may have been an earlier one with the same
// ids.
func (a *attempt) inOrder(grants []*lockpb.Grant) []*lockpb.Grant {
	if len(grants) != len(a.wishes) {
		return nil
	}
	if len(grants) == 1 && a.wishes[0].is(grants[0]) {
		return grants
	}
	ordered := make([]*lockpb.Grant, len(grants))
	for i, w := range a.wishes {
		at := slices.IndexFunc(grants, w.is)
		if at < 0 {
			return nil
		}
		ordered[i] = grants[at]
	}
	return ordered
}

// hold decides the attempt: it is granted. grants are in the order of the wishes. The caller holds d.mu.
func (a *attempt) hold(grants []*lockpb.Grant) {
	for i, w := range a.wishes {
		a.s.d.hold(a.s, grants[i], w.lost)
	}
	a.decide(grants, nil)
}

// again sends the acquire once more, with the same sequence, after a pause: the server could not serve. An election
// takes a second or two; who waits for a lock waits on. The caller holds d.mu.
func (a *attempt) again(wire *lockpb.Error) {
	d, before := a.s.d, a.call
	doubt := before.doubt || wire.Code == lockpb.Code_CODE_UNKNOWN
	if !a.wait && d.clock.Now().Sub(before.began()) > busyTime {
		if doubt {
			a.decide(nil, fmt.Errorf("%w: %w", backend.ErrUnknown, replyError(wire)))
		} else {
			a.decide(nil, replyError(wire))
		}
		return
	}
	d.background(func() {
		_ = d.pause(d.ctx, busyPause)
		d.mu.Lock()
		defer d.mu.Unlock()
		if a.call != before || a.decided() {
			return
		}
		next := *before
		next.doubt, next.first = doubt, before.began()
		a.call = &next
		d.start(a.call)
	})
}

// granted takes grants, all that one place in the queue has brought, to those who wait for them. The caller holds d.mu.
func (s *session) granted(grants []*lockpb.Grant) {
	if len(grants) == 0 {
		return
	}
	// Who gave up is not among them; the clean-up ends the holds.
	for _, a := range s.attempts[key{grants[0].Name, grants[0].RequestId}] {
		if mine := a.inOrder(grants); mine != nil {
			// What proved the session was asked for before this was sent.
			a.queued, a.sentAt, a.before = true, s.proved, max(s.proved, a.call.left)
			a.hold(mine)
		}
	}
}

func (a *attempt) decided() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

// decide ends the attempt, once. From then on no answer to it is taken, and its sequence is settled. The caller holds
// d.mu.
func (a *attempt) decide(grants []*lockpb.Grant, err error) {
	if a.decided() {
		return
	}
	a.grants, a.err = grants, err
	a.withdraw()
	for _, w := range a.wishes {
		a.s.remove(w.key, a)
	}
	close(a.done)
}

// remove takes an attempt out of those for k that are not decided. The caller holds d.mu.
func (s *session) remove(k key, a *attempt) {
	var rest []*attempt
	for _, other := range s.attempts[k] {
		if other != a {
			rest = append(rest, other)
		}
	}
	if s.attempts[k] = rest; rest == nil {
		delete(s.attempts, k)
	}
}
