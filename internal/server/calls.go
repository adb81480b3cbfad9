package server

// Calls: the processing of a client's request. A call is answered in one of three ways.
//
//	propose, log   a command goes through the log; that it lands in this term proves that this member led
//	keepAllAlive   sessions are renewed in memory; the answer waits for the same proof, by Term.Confirm
//	look           that proof, and then the answer of the state machine
//
// An answer is marked renewed only if the proof is of an instant after the receipt of the request. Without the proof
// a leader that was paused and replaced would promise time that its successor does not know of: see
// docs/decisions/2026-11-22-no-leader-is-believed-alone.md.

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/rules"
	"github.com/fencelock/fencelock/internal/server/lead"
)

// outcome is the result of a command from which the answer is made.
type outcome struct {
	lead.Outcome
	renewed bool // the command has renewed its session
}

// propose sends a command through the log, and answers with the reply that then makes of its result.
//
// That the command is in the log of this term proves that this member led after the request was received. It renews
// the session as a keepalive does, even a kept session.
func (x *call) propose(c machine.Command, then func(*outcome) *lockpb.Reply) error {
	named := x.session != machine.SessionID{}
	renewed := named && x.leadership.Time.Renew(x.session, x.receipt)
	return x.log(c, func(o *outcome) *lockpb.Reply {
		o.renewed = named && o.Result.Code != machine.CodeNoSession &&
			(renewed || x.leadership.Time.Logged(x.session, x.receipt))
		return then(o)
	})
}

// log is propose without a renewal. It waits while the connection has too much in flight.
func (x *call) log(c machine.Command, then func(*outcome) *lockpb.Reply) error {
	if bad := x.ids.hide(&c, x.leadership); bad != nil {
		x.reply(x.request, resultReply(bad, x.leadership.Time, x.server.config.Limits))
		return nil
	}
	places := min(1+lead.Weight(&c)/placeBytes, inFlight)
	if !x.board(places) {
		return nil // no client would get the answer
	}
	done := func(o lead.Outcome, err error) {
		defer x.alight(places)
		if err != nil {
			x.fail(x.request, err)
			return
		}
		for _, g := range o.Result.Grants {
			x.leadership.Time.Granted(g.Name, g.Token, g.MinHold)
		}
		with := outcome{Outcome: o}
		r := then(&with)
		r.Renewed = r.Renewed || with.renewed
		// Clients that lose a hold by the command are notified before its sender has the answer: a former holder that then
		// asks whether it still holds the name has the loss reported already.
		x.leadership.Deliver(x.conn, o.Notices)
		x.reply(x.request, r)
		for _, g := range o.Result.Grants {
			x.leadership.Time.Bounded(g.Name, g.Token, g.MaxHold)
		}
	}
	err := x.leadership.Submit(lead.Proposal{
		Command: c, By: x.conn, From: x.client, Address: x.address,
		Obsolete: x.attachedElsewhere, Done: done,
	})
	if err != nil {
		x.alight(places)
	}
	return err
}

// attachedElsewhere returns the reason not to carry out a command that has waited for the log. In the lane of its
// connection, later commands of the client may have overtaken it on another connection, to which the session is
// attached now.
func (x *call) attachedElsewhere() error {
	if !x.speaks() || x.session == (machine.SessionID{}) {
		return nil
	}
	return x.attachedToOther(x.session)
}

// attachedToOther returns an error if the session is attached to another connection.
func (x *call) attachedToOther(id machine.SessionID) error {
	if other := x.leadership.Listener(id); other != nil && other != x.conn {
		return notAttached()
	}
	return nil
}

// plain makes the reply of a command without a special reply.
func (x *call) plain(o *outcome) *lockpb.Reply {
	r := resultReply(&o.Result, x.leadership.Time, x.server.config.Limits)
	nameGrants(x.request, r.GetAcquired().GetGrants())
	if e := r.GetError(); o.Result.Code == machine.CodeMismatch {
		use := x.server.replica.State.Machine.Use(o.Result.Detail)
		e.Name, e.Holder, e.Kind, e.Limit = o.Result.Detail, use.Owner, kindsOut[use.Kind], use.Limit
	}
	x.hide(r.GetError())
	return r
}

// numbered adds the numbers that make a repetition of the command harmless.
func (x *call) numbered(c machine.Command) machine.Command {
	c.Seq, c.Acked = x.request.Sequence, x.request.Acknowledged
	return c
}

// openSession claims the session for this connection before the command goes into the log, since the client may use
// it before it has the answer. The bounds of the TTL are checked here, because they are settings of this server and
// not part of the state.
func (x *call) openSession(ttl time.Duration) error {
	if low, high := x.server.config.MinTTL, x.server.replica.MaxTTL(); ttl < low || ttl > high {
		return invalid("ttl", "%v is not between %v and %v", ttl, low, high)
	}
	if err := x.checkPrincipal(); err != nil {
		return err
	}
	x.leadership.Claim(x.session, x.ids.secret, x.conn)
	c := machine.Command{Op: machine.OpOpenSession, TTL: ttl}
	if x.machine().Level() >= machine.LevelDeadlines {
		c.Client = x.client
	}
	return x.propose(x.signed(c), func(o *outcome) *lockpb.Reply {
		if o.Result.Code != machine.CodeOK {
			return x.plain(o)
		}
		lives := x.leadership.Time.Opened(x.session, ttl, x.receipt)
		x.leadership.Attach(x.session, x.ids.secret, x.conn)
		return &lockpb.Reply{
			Renewed: lives,
			Answer: &lockpb.Reply_Session{Session: &lockpb.SessionState{
				TtlNanos: int64(ttl), Revision: x.machine().Revision(), Principal: string(x.principal),
			}},
		}
	})
}

// checkPrincipal refuses the session if it is open and belongs to another principal, even if the client knows its id.
// Before LevelHiddenIDs sessions have no principals.
func (x *call) checkPrincipal() error {
	if owner, open := x.machine().Principal(x.session); open && x.leadership.HidesIDs && !x.principal.MayUse(owner) {
		return refused(lockpb.Code_CODE_DENIED, "session", "it is another principal's")
	}
	return nil
}

// closeSession renews no session, so it needs only the log.
func (x *call) closeSession() error {
	if err := x.checkPrincipal(); err != nil {
		return err
	}
	c := machine.Command{Op: machine.OpCloseSession, Linger: x.leadership.Time.AnyClosed()}
	return x.log(c, func(o *outcome) *lockpb.Reply {
		x.leadership.Time.Ended(x.session)
		x.leadership.Forget(x.session)
		return x.plain(o)
	})
}

// signed adds the principal to a command, once all members know principals.
func (x *call) signed(c machine.Command) machine.Command {
	if x.leadership.HidesIDs {
		c.Principal = x.principal
	}
	return c
}

func (x *call) acquire(all []*lockpb.Acquire, under, underHidden []string) error {
	c, err := acquireCommand(all, under)
	if err != nil {
		return err
	}
	c.UnderHidden = underHidden
	x.settleFields(c.Requests)
	return x.propose(x.numbered(c), x.plain)
}

// settleFields sets the principal of each request, and the nonce of a request without one, as earlier clients send
// it, and clears the fields that a member may not know.
func (x *call) settleFields(requests []machine.Request) {
	level := x.machine().Level()
	known := level >= machine.LevelNonces
	for i := range requests {
		r := &requests[i]
		if r.For = x.by.other; level < machine.LevelRules {
			r.HeedsMaxHold, r.For = false, ""
		}
		n := &r.Nonce
		switch {
		case !known:
			*n = fencing.Nonce{}
		case *n == fencing.Nonce{}:
			*n = fencing.NewNonce()
		}
	}
}

func (x *call) cancelWait(q *lockpb.CancelWait) error {
	return x.propose(x.signed(x.numbered(machine.Command{
		Op: machine.OpCancelWait, Name: q.GetName(), RequestID: q.GetRequestId(), Target: q.GetTarget(),
	})), x.plain)
}

// release ends the hold of a request. With a token, a caller had the hold: a minimum that is not over goes on.
// Without a token no caller had it, and a lingering hold ends too.
func (x *call) release(q *lockpb.Release) error {
	token := fencing.Token(q.GetToken())
	c := machine.Command{
		Op: machine.OpRelease, Name: q.GetName(), RequestID: q.GetRequestId(), Token: token, Target: q.GetTarget(),
		Linger: token != 0 && x.leadership.Time.Closed(token) > 0, Own: q.GetOwn(),
	}
	freed := new(bool)
	if token == 0 && !q.GetOwn() {
		if err := x.free(q, freed); err != nil {
			return err
		}
	}
	return x.propose(x.signed(x.numbered(c)), func(o *outcome) *lockpb.Reply {
		if *freed && o.Result.Code == machine.CodeNotHeld {
			o.Result.Code = machine.CodeOK
		}
		return x.plain(o)
	})
}

// free ends a lingering hold of the request, ahead of its release in the lane of this connection, and sets freed if
// there was one. Outcomes come from one goroutine, in their order.
func (x *call) free(q *lockpb.Release, freed *bool) error {
	if !x.leadership.Time.AnyClosed() {
		return nil
	}
	id := q.GetRequestId()
	if x.leadership.HidesIDs {
		id = machine.HiddenRequest(id)
	}
	for _, h := range x.machine().Holder(q.GetName()).Holders {
		if !h.Lingering || h.RequestID != id {
			continue
		}
		err := x.leadership.Submit(lead.Proposal{
			Command: machine.Command{Op: machine.OpFree, Name: h.Name, Token: h.Token}, By: x.conn,
			Done: func(o lead.Outcome, err error) {
				if err == nil && o.Result.Code == machine.CodeOK {
					*freed = true
					x.leadership.Deliver(x.conn, o.Notices)
				}
			},
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (x *call) move(q *lockpb.Move) error {
	return x.propose(x.numbered(machine.Command{
		Op: machine.OpMove, Name: q.GetName(), RequestID: q.GetRequestId(), Token: fencing.Token(q.GetToken()),
	}), x.plain)
}

func (x *call) forceRelease(q *lockpb.ForceRelease) error {
	nonce, err := nonceOf(q.GetNonce())
	if err != nil {
		return err
	}
	if x.by.other != "" {
		if why := x.server.rules().RefusalFor(x.by.client, x.by.other, rules.Force, q.GetName(), false); why != "" {
			return refused(lockpb.Code_CODE_DENIED, "on_behalf_of", "%s", why)
		}
	}
	c := machine.Command{
		Op: machine.OpForceRelease, Name: q.GetName(), Reason: q.GetReason(), By: q.GetBy(),
		Nonce: nonce, Token: fencing.Token(q.GetToken()),
	}
	switch known := x.machine().Level() >= machine.LevelNonces; {
	case known:
		c.Principal = x.reported
	case nonce != fencing.Nonce{} || c.Token != 0:
		return refused(lockpb.Code_CODE_UNSUPPORTED, "nonce",
			"a member of the cluster runs a version that knows no conditions of a forced release")
	}
	return x.propose(x.numbered(c), x.plain)
}

// renewInLog renews a kept session. The channel is closed when the renewal has ended.
func (x *call) renewInLog() <-chan struct{} {
	over := make(chan struct{})
	err := x.leadership.Submit(lead.Proposal{
		Command: machine.Command{Op: machine.OpRenew, Session: x.session}, By: x.conn,
		Done: func(_ lead.Outcome, err error) {
			if err == nil {
				x.leadership.Time.Logged(x.session, x.receipt)
			}
			close(over)
		},
	})
	if err != nil {
		close(over)
	}
	return over
}

// whyNotRenewed returns the error for a session that was not renewed: it has ended, or may end yet.
func (x *call) whyNotRenewed(id machine.SessionID) error {
	if x.machine().SessionOpen(id) {
		return refused(lockpb.Code_CODE_UNAVAILABLE, "",
			"the session is about to end, or was opened just now: ask again")
	}
	return &requestError{&lockpb.Error{
		Code: lockpb.Code_CODE_SESSION_ENDED, Message: messages[machine.CodeNoSession],
		Revision: x.machine().Revision(),
	}}
}

func (x *call) machine() *machine.Machine { return x.server.replica.State.Machine }

// look answers with the result of see, unless that is nil. see sees every change that was acknowledged to any client
// before the request.
//
// No other member led later, and this member applied each change before it acknowledged it, and all changes of
// earlier leaders before it began to serve.
func (x *call) look(see func() *lockpb.Reply) error {
	if !x.begin() {
		return nil
	}
	select {
	case x.looks <- struct{}{}:
	case <-x.ctx.Done():
		x.tasks.Done()
		return nil
	}
	x.leadership.Term.Confirm(func(err error) {
		if err != nil {
			x.fail(x.request, err)
			x.seen()
			return
		}
		go func() { // see may take long, and others wait for the confirmer
			defer x.seen()
			if !x.awaitTurn() {
				return
			}
			defer func() { <-x.turn }()
			if r := see(); r != nil {
				x.reply(x.request, r)
			}
		}()
	})
	return nil
}

func (x *call) seen() {
	<-x.looks
	x.tasks.Done()
}

// pageLimit bounds the entries of one answer, and pageBytes its size. attachLimit bounds the entries of one answer
// about a session: they are small, and each page visits the whole session.
const (
	pageLimit   = 1000
	pageBytes   = 1 << 20
	attachLimit = 5000
)

// limitOf returns the number of entries to answer with; asked is 0 if the client did not set it.
func limitOf(asked uint32, most int) int {
	if asked == 0 {
		return pageLimit
	}
	return int(min(asked, uint32(most)))
}

func (x *call) holder(q *lockpb.GetHolder) error {
	return x.look(func() *lockpb.Reply {
		if e := x.server.mayRead(x.by, q.GetName()); e != nil {
			return errorReply(e)
		}
		info := x.machine().Look(q.GetName())
		return &lockpb.Reply{Answer: &lockpb.Reply_Name{Name: nameState(&info, x.leadership.Time)}}
	})
}

func (x *call) list(q *lockpb.List) error {
	return x.look(func() *lockpb.Reply {
		infos, more := x.machine().List(q.GetPrefix(), q.GetAfter(), limitOf(q.GetLimit(), pageLimit))
		names, next := namePage(infos, more, x.leadership.Time, x.server.reads(x.by))
		return &lockpb.Reply{Answer: &lockpb.Reply_Names{Names: &lockpb.NameList{Names: names, NextAfter: next}}}
	})
}

// namePage returns one page of the names that shows permits. next is set if there are more.
func namePage(
	infos []machine.Info, more bool, k *lead.Timekeeper, shows func(name string) bool,
) (names []*lockpb.NameState, next string) {
	size, last := 0, ""
	for i := range infos {
		if shows(infos[i].Name) {
			name := nameState(&infos[i], k)
			if size += proto.Size(name); size > pageBytes && len(names) > 0 {
				more = true
				break
			}
			names = append(names, name)
		}
		last = infos[i].Name
	}
	if more {
		next = last
	}
	return names, next
}

// attach directs the session's pushes here before it reads the state, so that a change in between is reported twice
// rather than not at all.
func (x *call) attach(q *lockpb.Attach) error {
	if err := x.checkPrincipal(); err != nil {
		return err
	}
	var logged <-chan struct{}
	renewed := x.leadership.Time.Renew(x.session, x.receipt)
	if !renewed && x.leadership.Time.IsKept(x.session) {
		logged = x.renewInLog()
	}
	return x.look(func() *lockpb.Reply {
		if logged != nil {
			select {
			case <-logged:
			case <-x.ctx.Done():
				return nil
			}
		}
		x.leadership.Attach(x.session, x.ids.secret, x.conn)
		page, open := x.machine().SessionPage(x.session, q.GetAfter(), limitOf(q.GetLimit(), attachLimit))
		if !open {
			x.leadership.Forget(x.session)
			return errorReply(x.server.wireError(x.whyNotRenewed(x.session)))
		}
		r := &lockpb.Reply{Answer: &lockpb.Reply_Session{Session: x.sessionPage(&page)}}
		r.Renewed = renewed || x.leadership.Time.Renew(x.session, x.receipt)
		return r
	})
}

// sessionPage converts one page to the wire's type.
func (x *call) sessionPage(p *machine.SessionPage) *lockpb.SessionState {
	out := &lockpb.SessionState{TtlNanos: int64(p.TTL), Revision: p.Revision, Principal: string(x.principal)}
	for _, e := range p.Entries {
		entry := &lockpb.SessionEntry{
			Name: e.Name, RequestId: x.ids.request(e.RequestID, e.Sealed), Token: uint64(e.Token),
		}
		if e.Token != 0 {
			out.Holds = append(out.Holds, entry)
		} else {
			out.Waits = append(out.Waits, entry)
		}
	}
	if p.More {
		out.NextAfter = p.Entries[len(p.Entries)-1].Name
	}
	return out
}
