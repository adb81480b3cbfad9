package builtin

// Leaving: the caller of an undecided acquire leaves, and the driver removes its state from the service.

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// lateGrace is the maximum time for which a call outlives its context, for cleanup. The contract allows 50 ms.
const lateGrace = 25 * time.Millisecond

// leftover is state that a request may have in the service although no caller here uses it: after an abandoned
// acquire, after a failed release, or found on a new connection. Once it is due, the session sends a release of it
// until the release is answered.
//
// When the same request comes again, overtake forgets the leftover: a release that is repeated after that would end
// the new grant. While a caller of Release releases it, the leftover stays, since that call may fail.
//
// Driver.mu protects it. session.leftovers has at most one for a key:
//
//	leave ─► due in one TTL ─► remove ─► answered: over
//	giveBack ───────────────────►┘       └─ overtaken, or the session ended: over
//
// The driver does not use CancelWait of the protocol: a release with a target does the same for a wait, ends a hold as
// well, and stops an acquire that has not arrived yet.
type leftover struct {
	s      *session
	k      key
	token  uint64 // of the hold; zero: any hold or wait of the request
	target uint64 // sequence of the abandoned acquire; zero if unknown
	due    backend.Instant

	call *call         // the release, or its last repetition; nil before it is due
	done chan struct{} // closed by over: the service has answered, or there is no release to wait for
	none bool          // the service has no hold or wait of the request; valid once done is closed
}

// giveUp ends an attempt when its caller leaves. It returns nil if the attempt was decided meanwhile, and otherwise
// why, alone or together with ErrUnavailable (no request was sent) or ErrUnknown (a hold or a wait may remain).
//
// For a waiter, giveUp removes all state from the service: the first release ends the wait in all of its queues, or
// each release ends a hold. The holds of an attempt that does not wait, if it is granted, remain for one TTL, which is
// their lifetime in a service without sessions: until then the caller may repeat the request or release it.
//
//	decided meanwhile            nil: the attempt's own outcome counts
//	Close                        ErrClosed; the session ends with its holds and waits
//	no request was sent          ErrUnavailable
//	waited, and all is removed   why, alone
//	otherwise                    ErrUnknown
func (s *session) giveUp(a *attempt, why error) error {
	d := s.d
	d.mu.Lock()
	if a.decided {
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
			continue // another attempt of the same request continues
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

// left waits up to lateGrace for releases, and reports whether the service has confirmed that no hold or wait remains.
//
// It bounds only the caller's wait: the releases continue.
func (d *Driver) left(all []*leftover) bool {
	ctx, cancel := context.WithTimeout(d.ctx, lateGrace)
	defer cancel()
	for _, l := range all {
		select {
		case <-l.done:
			if !l.none {
				return false
			}
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// leave records a leftover that is due in one TTL: until then a caller may repeat or release its request, see giveUp.
// The caller holds d.mu.
func (s *session) leave(k key, token, target uint64) *leftover {
	s.overtake(k)
	l := &leftover{s: s, k: k, token: token, target: target, due: s.d.clock.Now().Add(s.ttl), done: make(chan struct{})}
	s.leftovers[k] = l
	return l
}

// giveBack is leave with an immediate release. The caller holds d.mu. The release is queued before giveBack returns,
// so it comes behind the acquire on the same connection.
func (s *session) giveBack(k key, token, target uint64) *leftover {
	l := s.leave(k, token, target)
	l.remove()
	return l
}

// clear releases due leftovers. keepAlive calls it about three times in a TTL, while the server answers. The caller
// holds d.mu.
func (s *session) clear(now backend.Instant) {
	for _, l := range s.leftovers {
		if l.call == nil && now >= l.due {
			l.remove()
		}
	}
}

// remove sends the release. It does not end holds that another client has taken over by the same request id. The
// caller holds d.mu.
func (l *leftover) remove() {
	s := l.s
	l.call = &call{
		request: ownReleaseOf(l.k, l.token, l.target), session: s, sequence: s.number(), patient: true,
		then: l.answered,
	}
	s.d.start(l.call)
}

// overtake forgets a leftover. Its release is not repeated on a later connection, where it would follow the new
// request. The caller holds d.mu.
//
// A release in flight is not cancelled: on the same connection it comes before the new request, and answered finds
// that it was overtaken.
func (s *session) overtake(k key) {
	if l := s.leftovers[k]; l != nil {
		if l.call != nil {
			l.call.once = true
		}
		delete(s.leftovers, k)
	}
}

// answered handles the answer to the release. While the service cannot serve, it repeats the release after a pause,
// unless the leftover was overtaken; the sequence is the same, so the server executes only one of them. The release
// survives a time without a leader (patient), and ends with the session or with the driver. The caller holds d.mu.
func (l *leftover) answered(r *lockpb.Reply, err error) {
	s := l.s
	if wire := r.GetError(); wire != nil {
		err = replyError(wire)
	}
	// Without an answer, a refused token or a wrong setting says nothing about the hold either.
	refused := r == nil && (errors.Is(err, errToken) || errors.Is(err, backend.ErrMisconfigured))
	if !refused && !errors.Is(err, backend.ErrUnavailable) && !errors.Is(err, backend.ErrUnknown) {
		l.over(r.GetDone() != nil || errors.Is(err, backend.ErrNotHeld) || errors.Is(err, errSessionEnded))
		return
	}
	s.d.later(func() {
		if s.leftovers[l.k] != l {
			l.over(false)
			return
		}
		next := *l.call
		next.doubt = true
		l.call = &next
		s.d.start(l.call)
	})
}

// over ends the leftover, once. none is as in leftover. The caller holds d.mu.
func (l *leftover) over(none bool) {
	if l.s.leftovers[l.k] == l {
		delete(l.s.leftovers, l.k)
	}
	l.s.settled(l.call.sequence)
	l.none = none
	close(l.done)
}
