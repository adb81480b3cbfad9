package server

// Calls: what becomes of a client's request. There are three ways to an answer.
//
//	propose, log   a command goes through the log; that it lands in this term proves that this member led
//	keepAlive      a session is renewed in memory; the answer waits for the same proof, by Term.Confirm
//	look           that proof, and then what the state machine shows
//
// An answer says renewed only if the proof is of an instant after the receipt of the request. Without it a leader that
// was paused and succeeded would promise time of which its successor knows nothing: see
// docs/decisions/2026-11-22-no-leader-is-believed-alone.md.

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/lead"
)

// outcome is what a command did, for its answer.
type outcome struct {
	lead.Outcome
	renewed bool // the command has renewed its session
}

// propose sends a command through the log and answers with its result, or with what then makes of it.
//
// That the command is in the log of this term proves that this member led after the request was received. It renews the
// session as a keepalive does, also one that is kept.
func (x *call) propose(c machine.Command, then func(*outcome) *lockpb.Reply) error {
	named := x.session != machine.SessionID{}
	renewed := named && x.leadership.Time.Renew(x.session, x.receipt)
	return x.log(c, func(o *outcome) *lockpb.Reply {
		o.renewed = named && o.Result.Code != machine.CodeNoSession &&
			(renewed || x.leadership.Time.Logged(x.session, x.receipt))
		return then(o)
	})
}

// log is propose for what renews nothing. It waits while the connection has too much in flight.
func (x *call) log(c machine.Command, then func(*outcome) *lockpb.Reply) error {
	c.Session = x.session
	places := min(1+lead.Weight(&c)/placeBytes, inFlight)
	if !x.board(places) {
		return nil // nobody would hear of it
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
		// Those who lose something by the command hear of it before its sender has the answer: a former holder that
		// asks from then on whether it still holds finds the loss told already.
		x.leadership.Deliver(x.conn, o.Notices)
		x.reply(x.request, r)
	}
	err := x.leadership.Submit(lead.Proposal{Command: c, By: x.conn, Obsolete: x.attachedElsewhere, Done: done})
	if err != nil {
		x.alight(places)
	}
	return err
}

// attachedElsewhere is why a command that has waited for the log is not carried out any more. It waits in the lane of
// its connection, and what the client has sent on another one since, to which the session is attached now, may be ahead
// of it.
func (x *call) attachedElsewhere() error {
	if !x.speaks() || x.session == (machine.SessionID{}) {
		return nil
	}
	if other := x.leadership.Listener(x.session); other != nil && other != x.conn {
		return notAttached()
	}
	return nil
}

// plain makes the reply of a command that has no reply of its own.
func (x *call) plain(o *outcome) *lockpb.Reply {
	return resultReply(&o.Result, x.leadership.Time, x.server.config.Limits)
}

// numbered adds what makes it harmless to send the command again.
func (x *call) numbered(c machine.Command) machine.Command {
	c.Seq, c.Acked = x.request.Sequence, x.request.Acknowledged
	return c
}

// openSession claims the session for this connection before the command goes into the log, since the client may send
// more for it before it has the answer. The bounds of the TTL are settings of this server and no part of the state, so
// they are checked here.
func (x *call) openSession(ttl time.Duration) error {
	if low, high := x.server.config.MinTTL, x.server.config.MaxTTL; ttl < low || ttl > high {
		return invalid("ttl", "%v is not between %v and %v", ttl, low, high)
	}
	x.leadership.Claim(x.session, x.conn)
	c := machine.Command{Op: machine.OpOpenSession, TTL: ttl}
	if x.machine().Level() >= machine.LevelDeadlines {
		c.Client = x.client
	}
	return x.propose(c, func(o *outcome) *lockpb.Reply {
		if o.Result.Code != machine.CodeOK {
			return x.plain(o)
		}
		lives := x.leadership.Time.Opened(x.session, ttl, x.receipt)
		x.leadership.Attach(x.session, x.conn)
		return &lockpb.Reply{
			Renewed: lives,
			Answer: &lockpb.Reply_Session{Session: &lockpb.SessionState{
				TtlNanos: int64(ttl), Revision: x.machine().Revision(),
			}},
		}
	})
}

// closeSession renews nothing, so the log is all that it needs.
func (x *call) closeSession() error {
	c := machine.Command{Op: machine.OpCloseSession, Linger: x.leadership.Time.AnyClosed()}
	return x.log(c, func(o *outcome) *lockpb.Reply {
		x.leadership.Time.Ended(x.session)
		x.leadership.Forget(x.session)
		return x.plain(o)
	})
}

func (x *call) acquire(all []*lockpb.Acquire, under []string) error {
	c, err := acquireCommand(all, under)
	if err != nil {
		return err
	}
	return x.propose(x.numbered(c), x.plain)
}

func (x *call) cancelWait(q *lockpb.CancelWait) error {
	return x.propose(x.numbered(machine.Command{
		Op: machine.OpCancelWait, Name: q.GetName(), RequestID: q.GetRequestId(), Target: q.GetTarget(),
	}), x.plain)
}

func (x *call) release(q *lockpb.Release) error {
	return x.propose(x.numbered(machine.Command{
		Op: machine.OpRelease, Name: q.GetName(), RequestID: q.GetRequestId(), Token: fencing.Token(q.GetToken()),
		Target: q.GetTarget(), Linger: x.lingers(q), Own: q.GetOwn(),
	}), x.plain)
}

func (x *call) move(q *lockpb.Move) error {
	return x.propose(x.numbered(machine.Command{
		Op: machine.OpMove, Name: q.GetName(), RequestID: q.GetRequestId(), Token: fencing.Token(q.GetToken()),
	}), x.plain)
}

// lingers reports whether the minimum of the hold that is released goes on. The command carries that: the state machine
// reads no clock, and only the leader times minimums.
func (x *call) lingers(q *lockpb.Release) bool {
	if !x.leadership.Time.AnyClosed() {
		return false
	}
	if q.GetToken() != 0 {
		return x.leadership.Time.Closed(fencing.Token(q.GetToken())) > 0
	}
	holders := x.machine().Holder(q.GetName()).Holders
	return slices.ContainsFunc(holders, func(h machine.Hold) bool {
		return h.RequestID == q.GetRequestId() && x.leadership.Time.Closed(h.Token) > 0
	})
}

func (x *call) forceRelease(q *lockpb.ForceRelease) error {
	return x.propose(x.numbered(machine.Command{
		Op: machine.OpForceRelease, Name: q.GetName(), Reason: q.GetReason(), By: q.GetBy(),
	}), x.plain)
}

// keepAlive renews the session. The answer waits for the proof that this member led after the request was received: a
// leader that was deposed must not promise time that its successor does not know of. A session that is kept is renewed
// through the log, since a new leader goes by the deadline that stands there.
func (x *call) keepAlive() error {
	if x.leadership.Time.IsKept(x.session) {
		return x.propose(machine.Command{Op: machine.OpRenew}, func(o *outcome) *lockpb.Reply {
			if !o.renewed {
				return errorReply(x.server.wireError(x.whyNotRenewed()))
			}
			return aliveReply()
		})
	}
	if !x.board(1) {
		return nil
	}
	renewed := x.leadership.Time.Renew(x.session, x.receipt)
	x.leadership.Term.Confirm(func(err error) {
		defer x.alight(1)
		if err != nil {
			x.fail(x.request, err)
			return
		}
		if renewed || x.leadership.Time.Renew(x.session, x.receipt) {
			r := aliveReply()
			r.Renewed = true
			x.reply(x.request, r)
			return
		}
		x.fail(x.request, x.whyNotRenewed())
	})
	return nil
}

// renewInLog renews a session that is kept. What it returns is closed once that has come to its end.
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

// whyNotRenewed tells a session that ended from one of which the outcome is open.
func (x *call) whyNotRenewed() error {
	if x.machine().SessionOpen(x.session) {
		return refused(lockpb.Code_CODE_UNAVAILABLE, "",
			"the session is about to end, or was opened just now: ask again")
	}
	return &requestError{&lockpb.Error{
		Code: lockpb.Code_CODE_SESSION_ENDED, Message: messages[machine.CodeNoSession],
		Revision: x.machine().Revision(),
	}}
}

func (x *call) machine() *machine.Machine { return x.server.replica.State.Machine }

// look answers with what see returns, unless that is nil. It sees everything that was acknowledged to anybody before
// the request.
//
// Nobody led after this member, and everything that this member acknowledged was applied here before; so was everything
// of earlier leaders before this member began to serve.
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
		go func() { // see takes its time, and others wait for the confirmer
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

// pageLimit bounds the entries of one answer, and pageBytes its size. attachLimit bounds those of one answer about a
// session: they are small, and each page looks at all that the session has.
const (
	pageLimit   = 1000
	pageBytes   = 1 << 20
	attachLimit = 5000
)

// limitOf is how many entries to answer with; asked is 0 if the client has named no number.
func limitOf(asked uint32, most int) int {
	if asked == 0 {
		return pageLimit
	}
	return int(min(asked, uint32(most)))
}

func (x *call) holder(q *lockpb.GetHolder) error {
	return x.look(func() *lockpb.Reply {
		info := x.machine().Holder(q.GetName())
		return &lockpb.Reply{Answer: &lockpb.Reply_Name{Name: nameState(&info, x.leadership.Time)}}
	})
}

func (x *call) list(q *lockpb.List) error {
	return x.look(func() *lockpb.Reply {
		infos, more := x.machine().List(q.GetPrefix(), q.GetAfter(), limitOf(q.GetLimit(), pageLimit))
		names, next := namePage(infos, more, x.leadership.Time)
		return &lockpb.Reply{Answer: &lockpb.Reply_Names{Names: &lockpb.NameList{Names: names, NextAfter: next}}}
	})
}

// namePage is one page of names, of which there are more or not. next is set if there are.
func namePage(infos []machine.Info, more bool, k *lead.Timekeeper) (names []*lockpb.NameState, next string) {
	size := 0
	for i := range infos {
		name := nameState(&infos[i], k)
		if size += proto.Size(name); size > pageBytes && i > 0 {
			more = true
			break
		}
		names = append(names, name)
	}
	if more && len(names) > 0 {
		next = names[len(names)-1].Name
	}
	return names, next
}

// attach directs the session's pushes here before it looks at the state, so that what happens meanwhile is told twice
// rather than not at all.
func (x *call) attach(q *lockpb.Attach) error {
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
		x.leadership.Attach(x.session, x.conn)
		page, open := x.machine().SessionPage(x.session, q.GetAfter(), limitOf(q.GetLimit(), attachLimit))
		if !open {
			x.leadership.Forget(x.session)
			return errorReply(x.server.wireError(x.whyNotRenewed()))
		}
		r := &lockpb.Reply{Answer: &lockpb.Reply_Session{Session: sessionPage(&page)}}
		r.Renewed = renewed || x.leadership.Time.Renew(x.session, x.receipt)
		return r
	})
}

// sessionPage is one page in the words of the wire.
func sessionPage(p *machine.SessionPage) *lockpb.SessionState {
	out := &lockpb.SessionState{TtlNanos: int64(p.TTL), Revision: p.Revision}
	for _, e := range p.Entries {
		entry := &lockpb.SessionEntry{Name: e.Name, RequestId: e.RequestID, Token: uint64(e.Token)}
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
