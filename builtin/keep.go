package builtin

// One keepalive for all sessions: concurrent renewals travel as one request, which includes the other sessions that
// are due soon.

import (
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// mostKept bounds the sessions of one keepalive, and mostLooked the sessions that are checked for inclusion.
const (
	mostKept   = 256
	mostLooked = 64
)

// kept is one session in a keepalive.
type kept struct {
	session *session
	call    *call           // the call that waits for the answer; nil: keepOthers has included the session
	sent    backend.Instant // the instant just before the keepalive was sent
	seen    uint64          // as in call
}

// keep adds the keepalive x to the request, or makes the request if it is nil or full. The caller holds d.mu.
func (c *conn) keep(keep *lockpb.Request, x *call, now backend.Instant) *lockpb.Request {
	if keep == nil || len(c.kept[keep.Number]) >= mostKept {
		keep = &lockpb.Request{Number: x.number, Call: &lockpb.Request_KeepAlive{KeepAlive: &lockpb.KeepAlive{}}}
		if c.kept == nil {
			c.kept = map[uint64][]kept{}
		}
	}
	c.addKept(keep, kept{x.session, x, now, x.seen})
	return keep
}

func (c *conn) addKept(keep *lockpb.Request, k kept) {
	all := keep.GetKeepAlive()
	all.Sessions = append(all.Sessions, k.session.id)
	c.kept[keep.Number] = append(c.kept[keep.Number], k)
}

// lookEvery is the minimum interval between two checks of the other sessions. No TTL needs more frequent checks.
const lookEvery = minTTL / 6

// keepOthers adds the sessions for which at least half of the interval between their own keepalives has passed. The
// caller holds d.mu.
func (c *conn) keepOthers(keep *lockpb.Request, now backend.Instant) {
	if now.Sub(c.looked) < lookEvery {
		return
	}
	c.looked = now
	looked := 0
	for _, s := range c.d.byID {
		if looked++; looked > mostLooked || len(c.kept[keep.Number]) >= mostKept {
			return
		}
		if s.open && s.on == c && now.Sub(max(s.proved, s.asked)) >= s.ttl/6 {
			s.asked = now
			c.addKept(keep, kept{session: s, sent: now, seen: c.d.past.seen})
		}
	}
}

// keptAlive handles the answer to a keepalive for several sessions, as receive and prove do for one. The caller holds
// d.mu, and unlocks it with unlockAndTell.
func (d *Driver) keptAlive(c *conn, all []kept, r *lockpb.Reply) {
	lives := r.GetAlive().GetLives()
	if e := r.GetError(); e != nil && e.Code == lockpb.Code_CODE_NOT_LEADER {
		d.leader = e.LeaderAddress
		for _, k := range all {
			if k.call != nil && d.calls[k.call.number] == k.call && k.call.on == c {
				k.call.sent = 0 // it had no effect; it is sent to the next leader
			}
		}
		c.cancel(errDeposed)
		return
	}
	if !d.allPushed(c, r) {
		return
	}
	for i, k := range all {
		answer := r // an error for all
		switch {
		case i >= len(lives):
		case lives[i].Renewed:
			answer = renewedReply
		default:
			answer = &lockpb.Reply{Answer: &lockpb.Reply_Error{Error: lives[i].Error}}
		}
		if d.keptOne(c, k, answer); d.past.lost != nil {
			return
		}
	}
}

// renewedReply is the result of each renewed session. It is read-only.
var renewedReply = &lockpb.Reply{Renewed: true, Answer: &lockpb.Reply_Done{Done: &lockpb.Done{}}}

// keptOne handles the result of one session. The caller holds d.mu.
func (d *Driver) keptOne(c *conn, k kept, r *lockpb.Reply) {
	if d.compare(k.seen, r); d.past.lost != nil {
		return
	}
	waits := k.call != nil && d.calls[k.call.number] == k.call && k.call.on == c
	if k.session.Ended() || k.session.on != c {
		return // finished with it, or with the connection
	}
	switch {
	case r.Renewed:
		k.session.proved = max(k.session.proved, k.sent)
	case r.GetError().GetCode() == lockpb.Code_CODE_SESSION_ENDED:
		k.session.end(backend.ReasonSessionExpired)
	case r.GetError().GetCode() == lockpb.Code_CODE_CONFLICT && !waits:
		c.cancel(errPushLost) // the server does not know where to push
	}
	if waits {
		d.finish(k.call, r, nil)
	}
}
