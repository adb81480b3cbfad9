package builtin

// Leaving: what happens to an acquire whose caller goes before it is decided, and what removes that which it may have
// in the service.

import (
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// lateGrace is how long a call outlives its context in order to leave nothing behind. The contract allows 50 ms.
const lateGrace = 25 * time.Millisecond

// leftover is what a request may have in the service although nobody here has it: after an acquire that was given up,
// or found on a new connection. A release by the session removes it, once it is due, and is sent until it is answered.
//
// It is forgotten when the same request is asked for again: see overtake. A release that is sent again after that would
// end what is granted then. It stays while its caller releases it, which may fail.
//
// Driver.mu protects it. There is one for a key at most, in session.leftovers:
//
//	leave ─► due in one TTL ─► remove ─► run ─► answered: forgotten
//	giveBack ───────────────────►┘       │
//	                                     └─ overtaken, or the session ended: forgotten
//
// CancelWait of the protocol is not used: a release with a target does the same for a wait, ends a hold as well, and
// stops an acquire that has not arrived yet.
type leftover struct {
	s      *session
	k      key
	token  uint64 // of the hold; zero: whatever the request has
	target uint64 // sequence of the acquire that was given up; zero if it is not known
	due    backend.Instant

	call *call         // the release; nil before it is due
	done chan struct{} // closed when the service has answered, or nothing is left to ask
	none bool          // the service has nothing of the request; valid once done is closed
}

// giveUp ends an attempt whose caller goes. It returns nil if the attempt was decided meanwhile; otherwise why with,
// where it applies, ErrUnavailable (nothing was sent) or ErrUnknown (something may be left).
//
// A waiter takes whatever it has out of the service: the first release ends the wait in all of its queues, or each ends
// its hold. An attempt without waiting leaves its holds, if it is granted, to the caller, who may ask for them again by
// the same ids or give them back, for one TTL: for so long they would stand in a service without sessions.
//
//	decided meanwhile            nil: the attempt's own outcome counts
//	Close                        ErrClosed; the session ends with all that it has
//	nothing was sent             ErrUnavailable
//	waited, and all is out       why, alone
//	otherwise                    ErrUnknown
func (s *session) giveUp(a *attempt, why error) error {
	d := s.d
	d.mu.Lock()
	if a.decided() {
		d.mu.Unlock()
		return nil
	}
	sent := a.heir || a.queued || a.call.doubt || a.call.sent != 0
	a.decide(nil, why)
	switch {
	case errors.Is(why, backend.ErrClosed):
		d.mu.Unlock()
		return why
	case !sent:
		d.mu.Unlock()
		return unavailable(why)
	}
	var all []*leftover
	for _, w := range a.wishes {
		if len(s.attempts[w.key]) > 0 {
			continue // another attempt of the same request goes on
		}
		if a.wait {
			all = append(all, s.giveBack(w.key, 0, a.sequence))
		} else {
			s.leave(w.key, 0, a.sequence)
		}
	}
	d.mu.Unlock()
	if a.wait && d.left(all) {
		return why
	}
	return fmt.Errorf("%w: %w", backend.ErrUnknown, why)
}

// left waits a moment for releases, and reports whether the service has told meanwhile that nothing is left.
//
// The releases go on after that; only the caller's wait is bounded.
func (d *Driver) left(all []*leftover) bool {
	grace := time.NewTimer(lateGrace)
	defer grace.Stop()
	for _, l := range all {
		select {
		case <-l.done:
			if !l.none {
				return false
			}
		case <-grace.C:
			return false
		case <-d.ctx.Done():
			return false
		}
	}
	return true
}

// leave notes a leftover that is due in one TTL. The caller holds d.mu. That is for how long its caller may still ask
// for it; see giveUp.
func (s *session) leave(k key, token, target uint64) *leftover {
	s.overtake(k)
	l := &leftover{s: s, k: k, token: token, target: target, due: s.d.clock.Now().Add(s.ttl), done: make(chan struct{})}
	s.leftovers[k] = l
	return l
}

// giveBack is leave for what is due now. The caller holds d.mu. The release is queued before giveBack returns, so it
// comes behind the acquire on the same connection.
func (s *session) giveBack(k key, token, target uint64) *leftover {
	l := s.leave(k, token, target)
	l.remove()
	return l
}

// clear removes what is due. The session's own loop calls it whenever it wakes: about three times in a TTL, while the
// server answers. The caller holds d.mu.
func (s *session) clear(now backend.Instant) {
	for _, l := range s.leftovers {
		if l.call == nil && now >= l.due {
			l.remove()
		}
	}
}

// remove sends the release, in the background. What another client has taken over by the same request id is that
// client's. The caller holds d.mu.
func (l *leftover) remove() {
	s := l.s
	l.call = &call{request: ownReleaseOf(l.k, l.token, l.target), session: s, sequence: s.number()}
	s.d.start(l.call)
	s.d.background(l.run)
}

// overtake forgets a leftover. Its release is not sent again on a later connection: there it would meet what comes now.
// The caller holds d.mu.
//
// A release that is on its way is not taken back: on the same connection it comes before what is asked for now. Its run
// notices that it was overtaken.
func (s *session) overtake(k key) {
	if l := s.leftovers[k]; l != nil {
		if l.call != nil {
			l.call.once = true
		}
		delete(s.leftovers, k)
	}
}

// run repeats the release until it is answered, or overtaken, or the session has ended. It is work of the gate: one
// goroutine for each release that is under way, which ends with d.ctx at the latest. Before it ends it settles the
// sequence and closes done.
func (l *leftover) run() {
	s, d := l.s, l.s.d
	for {
		reply, err := d.await(d.ctx, l.call)
		if err == nil {
			if wire := reply.GetError(); wire != nil {
				err = replyError(wire)
			}
		}
		again := errors.Is(err, backend.ErrUnavailable) || errors.Is(err, backend.ErrUnknown)
		if again && d.pause(d.ctx, busyPause) == nil && l.repeat() {
			continue
		}
		d.mu.Lock()
		if s.leftovers[l.k] == l {
			delete(s.leftovers, l.k)
		}
		s.settled(l.call.sequence)
		l.none = reply.GetDone() != nil || errors.Is(err, backend.ErrNotHeld) || errors.Is(err, errSessionEnded)
		close(l.done)
		if errors.Is(err, errSessionEnded) {
			s.end(backend.ReasonSessionExpired)
		}
		d.unlockAndTell()
		return
	}
}

// repeat sends the release once more, unless it was overtaken.
//
// The sequence is the same, so the server carries out one of them.
func (l *leftover) repeat() bool {
	d := l.s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if l.s.Ended() || l.s.leftovers[l.k] != l {
		return false
	}
	next := *l.call
	next.doubt = true
	l.call = &next
	d.start(l.call)
	return true
}
