package server

// Keepalives. One keepalive may renew all sessions of a client, for one proof of leadership and one answer. A kept
// session is renewed through the log, since a new leader uses its deadline in the log.

import (
	"sync/atomic"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/lead"
)

// maxKeptAlive bounds the sessions of one keepalive.
const maxKeptAlive = 1024

// keepAlive renews the session of the request. The answer waits for the proof that this member led after the request
// was received: a leader that was deposed must not promise time that its successor does not know of.
func (x *call) keepAlive() error {
	return x.keepAllAlive([]machine.SessionID{x.session}, func(lives []error) *lockpb.Reply {
		if lives[0] != nil {
			return errorReply(x.server.wireError(lives[0]))
		}
		r := aliveReply()
		r.Renewed = true
		return r
	})
}

// keepAlives renews several sessions.
func (x *call) keepAlives(secrets [][]byte) error {
	if len(secrets) > maxKeptAlive {
		return invalid("sessions", "%d are more than %d", len(secrets), maxKeptAlive)
	}
	ids := make([]machine.SessionID, len(secrets))
	for i, raw := range secrets {
		secret, err := sessionOf(raw)
		if err != nil {
			return err
		}
		ids[i] = sessionIn(x.leadership, secret)
	}
	return x.keepAllAlive(ids, func(lives []error) *lockpb.Reply {
		all := make([]lockpb.Life, len(lives))
		out := make([]*lockpb.Life, len(lives))
		for i, err := range lives {
			if out[i] = &all[i]; err == nil {
				out[i].Renewed = true
			} else {
				out[i].Error = x.server.wireError(err)
			}
		}
		return &lockpb.Reply{Pushed: new(uint64), Answer: &lockpb.Reply_Alive{Alive: &lockpb.Alive{Lives: out}}}
	})
}

// keepAllAlive renews sessions, and answers with the reply that made builds from their results: for each session nil,
// or the reason why it was not renewed.
func (x *call) keepAllAlive(ids []machine.SessionID, made func([]error) *lockpb.Reply) error {
	k := &keeping{call: x, ids: ids, lives: make([]error, len(ids)), made: made}
	var kept []int
	for i, id := range ids {
		switch {
		case !x.attachedHere(id):
			k.lives[i] = notAttached()
		case x.leadership.Time.IsKept(id):
			kept = append(kept, i)
		case !x.leadership.Time.Renew(id, x.receipt):
			k.again = append(k.again, i)
		}
	}
	if k.places = 1 + len(kept); !x.board(k.places) {
		return nil
	}
	k.open.Store(int32(k.places))
	for _, i := range kept {
		k.log(i)
	}
	if len(kept) == len(ids) {
		k.close() // the log is proof enough
		return nil
	}
	x.leadership.Term.Confirm(k.confirmed)
	return nil
}

// keeping is a keepalive on its way.
type keeping struct {
	*call
	ids    []machine.SessionID
	lives  []error // of each session
	made   func([]error) *lockpb.Reply
	again  []int // numbers of sessions that could not be renewed in memory before the proof
	places int
	open   atomic.Int32 // pending answers
	failed error        // the proof
}

// confirmed handles the proof, for the sessions that are not kept.
func (k *keeping) confirmed(err error) {
	if k.failed = err; err == nil {
		for _, i := range k.again {
			if !k.leadership.Time.Renew(k.ids[i], k.receipt) {
				k.lives[i] = k.whyNotRenewed(k.ids[i])
			}
		}
	}
	k.close()
}

// log renews a kept session. That the command is in the log of this term is proof enough.
func (k *keeping) log(i int) {
	done := func(o lead.Outcome, err error) {
		switch {
		case err != nil:
			k.lives[i] = err
		case o.Result.Code == machine.CodeOK && k.leadership.Time.Logged(k.ids[i], k.receipt):
			k.lives[i] = nil
		default:
			k.lives[i] = k.whyNotRenewed(k.ids[i])
		}
		k.close()
	}
	err := k.leadership.Submit(lead.Proposal{
		Command: machine.Command{Op: machine.OpRenew, Session: k.ids[i]}, By: k.conn, Done: done,
		Obsolete: func() error { return k.attachedToOther(k.ids[i]) },
	})
	if err != nil {
		done(lead.Outcome{}, err)
	}
}

// close counts an answer. The last one answers the client.
func (k *keeping) close() {
	if k.open.Add(-1) > 0 {
		return
	}
	defer k.alight(k.places)
	if k.failed != nil {
		k.fail(k.request, k.failed)
		return
	}
	k.reply(k.request, k.made(k.lives))
}
