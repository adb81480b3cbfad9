package builtin

// Holds: the granted locks, and the notification of their loss.

import (
	"cmp"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// hold is a granted lock. The session and the core keep its time, except for the instant until which a renewal for
// less time must leave it on its session.
//
// Driver.holds has it, by name and request id, and Driver.mu protects its fields. While it is there, it counts as a
// user of its session. drop ends it when it is released, lost, moved away, or replaced by a later grant of the same
// request.
type hold struct {
	session *session
	// token distinguishes this grant from earlier and later grants of the same request. It is the server's token, even if
	// it does not fence.
	token uint64
	// on is the connection on which the service listed or granted it last; misses compares it with the present one.
	on *conn
	// lost is nil without a listener.
	lost func(backend.Loss)
	// busy counts the calls in progress that end it or move it. Until they are answered, neither a push that it has moved
	// nor its absence from a page counts as a loss.
	busy int
	// unsure: it may be on another session, because a move was not answered. The next renewal repeats the move.
	unsure bool
	// until is an instant until which it was granted or renewed: renewals for a shorter TTL do not move it.
	until backend.Instant
	// last is an instant before which the service does not end it for its maximum hold time; zero without a maximum.
	last backend.Instant
}

// renewal returns the renewal of a hold for ttl, if its session was proved by a request that was sent at the instant
// sent.
func (h *hold) renewal(sent backend.Instant, ttl time.Duration) backend.Renewal {
	switch left := validUntil(sent, ttl, h.last).Sub(sent); {
	case left == ttl:
		return backend.Renewal{SentAt: sent, TTL: ttl}
	case left > 0:
		return backend.Renewal{SentAt: sent, TTL: left, Last: true}
	}
	return backend.Renewal{Err: &backend.NotHeldError{Reason: backend.ReasonMaxHold}}
}

// validUntil returns the end of a hold's validity for ttl, if its session was proved by a request that was sent at the
// instant sent. last is hold.last.
func validUntil(sent backend.Instant, ttl time.Duration, last backend.Instant) backend.Instant {
	if until := sent.Add(ttl); last.IsZero() || until <= last {
		return until
	}
	return last
}

// lastOf returns the instant until which a hold with a maximum hold time certainly lasts, or zero without a maximum.
// from is no later than the instant from which the service counts. The clocks of client and service may differ in rate
// by 1 %.
func lastOf(g *lockpb.Grant, from backend.Instant) backend.Instant {
	bound := time.Duration(g.LastNanos)
	if bound <= 0 {
		return 0
	}
	return from.Add(bound - bound/100)
}

// stays reports whether a renewal for ttl leaves the hold on its session. It does if that is the session of ttl, or if
// it has a longer TTL and a move would shorten the hold.
func (h *hold) stays(ttl time.Duration, now backend.Instant) bool {
	return !h.unsure && (h.session.ttl == ttl || h.session.ttl > ttl && h.until > now.Add(ttl))
}

// hold records a granted lock and returns hold.last. A later grant of the same request replaces the earlier one,
// without a notification, since both have the same caller. from is as in lastOf. The caller holds d.mu.
//
// It is called in the step that handles the answer or the push, and not by the caller that waits for the grant: a loss
// that is pushed right behind the grant must find the hold.
func (d *Driver) hold(
	s *session, g *lockpb.Grant, lost func(backend.Loss), from backend.Instant,
) (last backend.Instant) {
	k := key{g.Name, g.RequestId}
	last = lastOf(g, from)
	if old := d.holds[k]; old != nil {
		if old.token == g.Token && !old.last.IsZero() {
			last = old.last // a new leader restarts the count
		}
		d.drop(k, old)
	}
	s.overtake(k)
	d.holds[k] = &hold{session: s, token: g.Token, on: d.conn, lost: lost, until: s.proved.Add(s.ttl), last: last}
	s.Add(1)
	return last
}

// drop removes a hold, which is then no longer a user of its session. The caller holds d.mu.
//
// A hold that is not the present one of its key has been dropped already.
func (d *Driver) drop(k key, h *hold) {
	if d.holds[k] == h {
		delete(d.holds, k)
		h.session.Leave(1)
	}
}

// lose drops a hold and queues the notification of its holder, for unlockAndTell. The caller holds d.mu.
func (d *Driver) lose(k key, h *hold, loss backend.Loss) {
	d.drop(k, h)
	if h.lost != nil {
		d.tell = append(d.tell, func() { h.lost(loss) })
	}
}

// lost handles the end of a session, a wait, or a hold. A message about an unknown session, wait or hold, or about an
// earlier grant (by its token), has no effect. The move of a hold is no loss while this driver makes it. The caller
// holds d.mu.
//
//	a session    it ends, with all of its holds and waits
//	a wait       the attempts that wait end, as waitLost says; an attempt with a request in flight awaits its answer
//	a hold       dropped, and its holder is notified with the reason; backend.ReasonEvicted where the server does not say
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
	loss := backend.Loss{Reason: cmp.Or(reasonOf(l.Reason), backend.ReasonEvicted)}
	if loss.Reason == backend.ReasonForceReleased {
		loss.Text, loss.By, loss.Principal = l.Message, l.By, l.Principal
	}
	d.lose(k, h, loss)
}

// waitLost returns the error of a waiter that lost its place. After errAgain it queues again; but if another client
// has taken over its request id, that client waits with it now, and the two would take the place from each other
// indefinitely.
func waitLost(r lockpb.Reason) error {
	if r == lockpb.Reason_REASON_MOVED {
		return fmt.Errorf("%w: another client has taken over this request id", backend.ErrHeld)
	}
	return errAgain
}
