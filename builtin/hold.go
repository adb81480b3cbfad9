package builtin

// Holds: what counts as granted, and how its holder learns that it is lost.

import (
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// hold is a lock that counts as granted. It says nothing about time, which is the session's matter and the core's,
// except until when a renewal for less time must leave it where it is.
type hold struct {
	session *session
	token   uint64
	on      *conn                // the connection on which the service told of it last
	lost    func(backend.Reason) // nil if nobody listens
	busy    int                  // calls under way that end it or move it
	unsure  bool                 // it may hang on another session: a move was not answered
	until   backend.Instant      // it was granted or renewed at least until then
}

// stays reports whether a renewal for ttl leaves the hold on its session: it is the one for that TTL, or one for a
// longer TTL that the hold was promised and that a move would cut short.
func (h *hold) stays(ttl time.Duration, now backend.Instant) bool {
	return !h.unsure && (h.session.ttl == ttl || h.session.ttl > ttl && h.until > now.Add(ttl))
}

// hold notes a lock as granted. A later grant of the same request takes the place of the earlier one, whose holder is
// the same caller: it is told nothing. The caller holds d.mu.
func (d *Driver) hold(s *session, g *lockpb.Grant, lost func(backend.Reason)) {
	k := key{g.Name, g.RequestId}
	if old := d.holds[k]; old != nil {
		d.drop(k, old)
	}
	s.overtake(k)
	d.holds[k] = &hold{session: s, token: g.Token, on: d.conn, lost: lost, until: s.proved.Add(s.ttl)}
	s.Add(1)
}

// drop forgets a hold, whose session it then no longer needs. The caller holds d.mu.
func (d *Driver) drop(k key, h *hold) {
	if d.holds[k] == h {
		delete(d.holds, k)
		h.session.Leave(1)
	}
}

// tellLost has the holder told, once d.mu is unlocked by unlockAndTell. The caller holds d.mu.
func (d *Driver) tellLost(h *hold, reason backend.Reason) {
	if h.lost != nil {
		d.tell = append(d.tell, func() { h.lost(reason) })
	}
}

// lost takes the news that something has ended: a session, a wait, or a hold. News of what is not known here, or of an
// earlier grant, changes nothing; the token tells. That a hold has moved is no loss while this driver moves it itself.
// The caller holds d.mu.
func (d *Driver) lost(l *lockpb.Lost) {
	s := d.byID[string(l.Session)]
	if s == nil {
		return
	}
	if l.Name == "" {
		s.end(backend.ReasonSessionExpired)
		return
	}
	k := key{l.Name, l.RequestId}
	if l.Token == 0 {
		for _, a := range s.attempts[k] {
			if a.queued && !a.asks() {
				a.decide(nil, waitLost(l.Reason))
			}
		}
		return
	}
	h := d.holds[k]
	if h == nil || h.session != s || h.token != l.Token ||
		l.Reason == lockpb.Reason_REASON_MOVED && (h.busy > 0 || h.unsure) {
		return
	}
	reason := reasonOf(l.Reason)
	if reason == "" {
		reason = backend.ReasonEvicted
	}
	d.drop(k, h)
	d.tellLost(h, reason)
}

// waitLost says what a waiter does that lost its place: it queues again, unless another client waits with its id.
func waitLost(r lockpb.Reason) error {
	if r == lockpb.Reason_REASON_MOVED {
		return fmt.Errorf("%w: another client waits on with this request id", backend.ErrHeld)
	}
	return errAgain
}
