package builtin

// Holds: what counts as granted, and how its holder learns that it is lost.

import (
	"cmp"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// hold is a lock that counts as granted. It says nothing about time, which is the session's matter and the core's,
// except until when a renewal for less time must leave it where it is.
//
// Driver.holds has it, by name and request id, and Driver.mu protects its fields. While it is there its session has one
// user more. It ends by drop: released, lost, moved away, or replaced by a later grant of the same request.
type hold struct {
	session *session
	// token tells this grant from an earlier and a later one of the same request. It is the server's, also where it
	// does not fence.
	token uint64
	// on is the connection on which the service told of it last: misses compares.
	on *conn
	// lost is nil if nobody listens.
	lost func(backend.Reason)
	// busy counts the calls under way that end it or move it. Their answers decide what becomes of it, so neither a
	// push that it has moved nor its absence from a page is taken for a loss meanwhile.
	busy int
	// unsure: it may hang on another session, because a move was not answered. The next renewal moves it again.
	unsure bool
	// until is an instant until which it was granted or renewed at least.
	until backend.Instant
}

// stays reports whether a renewal for ttl leaves the hold on its session: it is the one for that TTL, or one for a
// longer TTL that the hold was promised and that a move would cut short.
func (h *hold) stays(ttl time.Duration, now backend.Instant) bool {
	return !h.unsure && (h.session.ttl == ttl || h.session.ttl > ttl && h.until > now.Add(ttl))
}

// hold notes a lock as granted. A later grant of the same request takes the place of the earlier one, whose holder is
// the same caller: it is told nothing. The caller holds d.mu.
//
// It is called in the step that takes the answer or the push, and not by the caller that waits for it: a loss that is
// pushed right behind the grant must find the hold in its place.
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
//
// A hold that is not the present one of its key is dropped already.
func (d *Driver) drop(k key, h *hold) {
	if d.holds[k] == h {
		delete(d.holds, k)
		h.session.Leave(1)
	}
}

// lose drops a hold and has its holder told, once d.mu is unlocked by unlockAndTell. The caller holds d.mu.
func (d *Driver) lose(k key, h *hold, reason backend.Reason) {
	d.drop(k, h)
	if h.lost != nil {
		d.tell = append(d.tell, func() { h.lost(reason) })
	}
}

// lost takes the news that something has ended: a session, a wait, or a hold. News of what is not known here, or of an
// earlier grant, changes nothing; the token tells. That a hold has moved is no loss while this driver moves it itself.
// The caller holds d.mu.
//
//	a session    it ends, with all that hangs on it
//	a wait       the attempts that wait end, as waitLost says; one whose request is under way has an answer to come
//	a hold       dropped, and its holder is told why; backend.ReasonEvicted where the server does not say
//
// The caller unlocks with unlockAndTell.
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
	d.lose(k, h, cmp.Or(reasonOf(l.Reason), backend.ReasonEvicted))
}

// waitLost is the error of a waiter that lost its place. errAgain has it queue again; but if another client has taken
// over its request id, the other client waits with it now, and the two would take the place from each other for ever.
func waitLost(r lockpb.Reason) error {
	if r == lockpb.Reason_REASON_MOVED {
		return fmt.Errorf("%w: another client waits on with this request id", backend.ErrHeld)
	}
	return errAgain
}
