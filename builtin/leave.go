package builtin

import (
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// lateGrace is how long a call outlives its context in order to leave nothing behind. The contract allows 50 ms.
const lateGrace = 25 * time.Millisecond

// leaving is the clean-up of one name after an acquire that was given up, or of an orphan. It goes on until the service
// has answered.
type leaving struct {
	s    *session
	k    key
	call *call
	done chan struct{} // closed when the service has answered, or nothing is left to ask
	none bool          // the service has nothing of the request; valid once done is closed
}

// giveUp ends an attempt whose caller goes. It returns nil if the attempt was decided meanwhile; otherwise why with,
// where it applies, ErrUnavailable (nothing was sent) or ErrUnknown (something may be left).
//
// A waiter takes whatever it has out of the service: the first clean-up ends the wait in all of its queues, or each
// ends its hold. An attempt without waiting leaves its holds, if it was granted, to the caller, who may ask for them
// again by the same ids or give them back; but it is not carried out from now on.
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
	var all []*leaving
	for _, w := range a.wishes {
		if len(s.attempts[w.key]) > 0 {
			continue // another attempt of the same request goes on
		}
		if a.wait {
			all = append(all, s.giveBack(w.key, 0, a.sequence))
		} else {
			all = append(all, s.cleanUp(w.key, &lockpb.Request{Call: &lockpb.Request_CancelWait{CancelWait: &lockpb.CancelWait{
				Name: w.name, RequestId: w.requestID, Target: a.sequence,
			}}}))
		}
	}
	d.mu.Unlock()
	if d.left(all) {
		return why
	}
	return fmt.Errorf("%w: %w", backend.ErrUnknown, why)
}

// left waits a moment for clean-ups, and reports whether the service has told meanwhile that nothing is left.
func (d *Driver) left(all []*leaving) bool {
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

// giveBack ends, in the background, the hold of a request with the token, or with zero whatever it has, on this
// session; target is the sequence of the acquire that is given up with it. What another client has taken over by the
// same request id is that client's. The caller holds d.mu.
func (s *session) giveBack(k key, token, target uint64) *leaving {
	return s.cleanUp(k, ownReleaseOf(k, token, target))
}

// cleanUp sends a clean-up at once, and again as long as it is not answered. The caller holds d.mu.
func (s *session) cleanUp(k key, r *lockpb.Request) *leaving {
	d := s.d
	s.overtake(k)
	l := &leaving{s: s, k: k, done: make(chan struct{}), call: &call{request: r, session: s, sequence: s.number()}}
	s.leavings[k] = l
	d.start(l.call)
	d.background(l.run)
	return l
}

// overtake stops a clean-up from being sent again on a later connection: there it would meet what comes now. The caller
// holds d.mu.
func (s *session) overtake(k key) {
	if l := s.leavings[k]; l != nil {
		l.call.once = true
		delete(s.leavings, k)
	}
}

func (l *leaving) run() {
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
		if s.leavings[l.k] == l {
			delete(s.leavings, l.k)
		}
		if grants := reply.GetAcquired().GetGrants(); len(grants) == 1 && d.holds[l.k] == nil && len(s.attempts[l.k]) == 0 {
			s.orphans[l.k] = orphan{grants[0].Token, d.clock.Now()}
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

// repeat sends the clean-up once more, unless it was overtaken.
func (l *leaving) repeat() bool {
	d := l.s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if l.s.Ended() || l.s.leavings[l.k] != l {
		return false
	}
	next := *l.call
	next.doubt = true
	l.call = &next
	d.start(l.call)
	return true
}
