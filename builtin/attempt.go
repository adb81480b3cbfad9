package builtin

// Attempts: one acquire, from its request to the grant or the refusal, over as many connections as that takes.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
)

// attempt is one acquire of one session, of one name or of several in one step, until it is decided: it is granted, it
// is refused, or it ends and another attempt must follow.
//
// Each attempt has a sequence: the server executes its request once, however often it arrives, and not at all after
// the cleanup of an abandoned attempt.
//
// begin makes it. It is decided once, by decide, which closes done:
//
//	granted, by the answer or by a push     hold
//	refused, or its session ended           answered, session.end
//	its place in the queue is lost          Driver.lost, with errAgain: another attempt follows
//	its caller leaves                       session.giveUp
//
// From then on the driver ignores answers to it: its state at the server, if any, is a leftover.
type attempt struct {
	s      *session
	wishes []wish
	// wait: it takes a place in the queue, as its requests ask; they agree in that.
	wait bool
	// heir: it follows a takeOver: the server may have part of its request already, even if it is never sent.
	heir bool
	// sequence is the sequence of its last request: repeat draws another. A cleanup names it as target.
	sequence uint64

	// The following fields are protected by Driver.mu.

	// call is the acquire itself, or its last repetition. It is nil only if the session had ended before begin.
	call *call
	// queued: it has, or had, a place in the queue. It stays set when the attempt is granted, for the grant.
	queued bool
	// on is the connection on which the service last confirmed its place. misses treats a place as lost that the
	// present connection has not confirmed.
	on *conn
	// decided: done is closed.
	decided bool

	// The following fields are valid once done is closed.

	done chan struct{}
	// grants are one for each of wishes, in their order.
	grants []*lockpb.Grant
	// lasts are hold.last of the holds.
	lasts []backend.Instant
	// sentAt is the instant from which the holds' validity counts.
	sentAt backend.Instant
	// before is no later than the grant, so a minimum hold that counts from here is not too long.
	before backend.Instant
	err    error
}

// wish is the request for one name of an attempt.
type wish struct {
	key
	lost func(backend.Loss) // nil without a listener
}

// is reports whether g grants it.
func (w wish) is(g *lockpb.Grant) bool { return g.Name == w.name && g.RequestId == w.requestID }

// begin sends an acquire. patient: it waits through a time without a leader, because the request had a place in the
// queue before. heir: it follows a takeOver, so the service may have part of it even if it is never sent.
//
// begin uses ctx only for the principal of the request (see onBehalf), and returns immediately.
//
// An attempt in an ended session is decided before begin returns, with errSessionEnded. begin overtakes the leftovers
// of earlier attempts of the same requests: their releases must not end this attempt's holds.
func (s *session) begin(ctx context.Context, rs []backend.Request, patient, heir bool) *attempt {
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
		request: onBehalf(ctx, d.acquireOf(rs)), session: s, sequence: a.sequence, waits: a.wait, patient: patient,
		then: a.answered,
	}
	d.start(a.call)
	return a
}

// repeat sends the request with a new sequence: the answer is the hold or the place in the queue that the request
// has. The caller holds d.mu.
//
// The old sequence is settled, so the server may have forgotten its answer and refuse it (STALE). The repetition waits
// through a time without a leader, since there was a place in the queue.
func (a *attempt) repeat() {
	a.withdraw()
	next := *a.call
	a.sequence, a.on = a.s.number(), a.s.d.conn
	next.sequence, next.patient = a.sequence, true
	next.request = renewNonces(next.request)
	a.call = &next
	a.s.d.start(a.call)
}

// renewNonces returns a copy of the acquire with other nonces: if its earlier hold has ended, the new grant is
// another hold.
func renewNonces(r *lockpb.Request) *lockpb.Request {
	r = proto.CloneOf(r)
	one, all := r.GetAcquire(), r.GetAcquireAll().GetRequests()
	if one != nil {
		all = []*lockpb.Acquire{one}
	}
	for _, q := range all {
		q.Nonce = newNonce()
	}
	return r
}

func newNonce() []byte {
	n := fencing.NewNonce()
	return n[:]
}

// asks reports whether the acquire is unanswered. The caller holds d.mu.
func (a *attempt) asks() bool { return a.call != nil && a.s.d.calls[a.call.number] == a.call }

// withdraw makes the attempt ignore answers to the acquire, and settles its sequence. The caller holds d.mu.
//
// The call is removed from d.calls without being finished: its then would decide this attempt a second time.
func (a *attempt) withdraw() {
	if a.asks() {
		delete(a.s.d.calls, a.call.number)
	}
	a.s.settled(a.sequence)
}

// acquireOf returns the request on the wire for rs.
func (d *Driver) acquireOf(rs []backend.Request) *lockpb.Request {
	hidden := d.under[:min(len(d.under), max(0, backend.MaxUnder-len(rs[0].Under)))]
	if len(rs) == 1 {
		one := oneOf(&rs[0])
		one.Under, one.UnderHidden = slices.Clone(rs[0].Under), hidden
		return &lockpb.Request{Call: &lockpb.Request_Acquire{Acquire: one}}
	}
	all := &lockpb.AcquireAll{Requests: make([]*lockpb.Acquire, len(rs)), Under: slices.Clone(rs[0].Under), UnderHidden: hidden}
	for i := range rs {
		all.Requests[i] = oneOf(&rs[i])
	}
	return &lockpb.Request{Call: &lockpb.Request_AcquireAll{AcquireAll: all}}
}

// oneOf returns one request on the wire, without the holds that Under names: acquireOf adds these to the set, or to
// the request for one name. The metadata is copied, because the message may be encoded after the caller has changed
// its map.
func oneOf(r *backend.Request) *lockpb.Acquire {
	return &lockpb.Acquire{
		Name: r.Name, RequestId: r.RequestID, HoldId: r.HoldID, Owner: r.Owner, Wait: r.Wait,
		Kind: kindsOut[r.Kind], Permits: uint32(r.Permits), Limit: uint32(r.Limit), Hierarchical: r.Hierarchical,
		Metadata: maps.Clone(r.Metadata), MinHoldNanos: int64(r.MinHold),
		Nonce: newNonce(), HeedsMaxHold: true,
	}
}

// answered handles the answer to the acquire: it decides the attempt, or notes that it waits in the queue, or that it
// must be repeated. The caller holds d.mu.
//
// A grant is valid from the instant at which the acquire was sent only if the answer says that it renewed the
// session. Otherwise its validity counts from the session's last proof.
//
//	an error of the driver's own    decided with it
//	queued                          it waits; a push decides it. Without wait: refused, as held
//	granted                         held
//	an answer of another kind       unknown
//	UNAVAILABLE, UNKNOWN            sent again after a pause
//	NOT_HELD                        errAgain: its hold has ended since, so another attempt follows
//	other errors                    refused
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
		a.hold(grants, a.call.sent)
	case wire == nil:
		a.decide(nil, fmt.Errorf("%w: %w", backend.ErrUnknown, errors.New("an acquire was answered as something else")))
	case isBusy(wire):
		a.again(wire)
	case wire.Code == lockpb.Code_CODE_NOT_HELD:
		a.decide(nil, errAgain) // sent a second time, and its hold has ended since
	default:
		a.decide(nil, replyError(wire))
	}
}

// inOrder returns one grant for each of the wishes, in their order; nil if grants are not for exactly these wishes.
// The server keeps the order of the request that took the place in the queue, which may have been an earlier one with
// the same ids.
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

// hold decides the attempt as granted, and enters its holds. grants are in the order of the wishes, and from is as in
// lastOf. The caller holds d.mu.
func (a *attempt) hold(grants []*lockpb.Grant, from backend.Instant) {
	for i, w := range a.wishes {
		a.lasts = append(a.lasts, a.s.d.hold(a.s, grants[i], w.lost, from))
	}
	a.decide(grants, nil)
}

// again repeats the acquire with the same sequence after a pause, because the server could not serve. An attempt that
// does not wait for a lock ends after busyTime, which is longer than an election; an attempt that waits keeps waiting.
// If another call has replaced this one after the pause, or the attempt is decided, again sends no request. Close cuts
// the pause short and decides the attempt. The caller holds d.mu.
func (a *attempt) again(wire *lockpb.Error) {
	d, before := a.s.d, a.call
	doubt := before.doubt || wire.Code == lockpb.Code_CODE_UNKNOWN
	if !a.wait && d.clock.Now().Sub(before.started) > busyTime {
		a.decide(nil, fmt.Errorf("%w: %s", noAnswer(doubt), wire.Message))
		return
	}
	d.later(func() {
		if a.call == before && !a.decided {
			next := *before
			next.doubt = doubt
			a.call = &next
			d.start(a.call)
		}
	})
}

// granted decides the attempts that wait for a push of grants, all of one place in the queue. The caller holds d.mu.
//
// The validity counts from s.proved, which an answer has set before: a push does not prove the session. If that is
// long ago, session.attempt proves the session before it returns the grant.
func (s *session) granted(grants []*lockpb.Grant) {
	if len(grants) == 0 {
		return
	}
	// Abandoned attempts are not among them; their cleanup ends the holds.
	for _, a := range s.attempts[key{grants[0].Name, grants[0].RequestId}] {
		if mine := a.inOrder(grants); mine != nil {
			// The request that proved the session was sent before this acquire.
			a.queued, a.sentAt, a.before = true, s.proved, max(s.proved, a.call.left)
			a.hold(mine, a.before)
		}
	}
}

// decide ends the attempt, once. From then on its answers are ignored, and its sequence is settled. The caller holds
// d.mu.
//
// It has no effect on a decided attempt, so the end of a session and the end of a caller's context cannot cross.
func (a *attempt) decide(grants []*lockpb.Grant, err error) {
	if a.decided {
		return
	}
	a.decided, a.grants, a.err = true, grants, err
	a.withdraw()
	for _, w := range a.wishes {
		a.s.remove(w.key, a)
	}
	close(a.done)
}

// remove removes an attempt from the undecided ones for k. The caller holds d.mu.
func (s *session) remove(k key, a *attempt) {
	// A copy, because the caller may be iterating over them.
	rest := slices.DeleteFunc(slices.Clone(s.attempts[k]), func(other *attempt) bool { return other == a })
	if s.attempts[k] = rest; len(rest) == 0 {
		delete(s.attempts, k)
	}
}
