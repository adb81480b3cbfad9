package zookeeper

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// provedAt returns the instant on which the validity of every hold of the session rests.
func (s *session) provedAt() backend.Instant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proof.proved
}

// prove makes sure that the leader has confirmed the session to a request sent at since or later. Concurrent callers
// share one request, which goes on when a caller's context ends: where an answer takes longer than anybody waits, the
// next one finds it. A request that waits too long for its answer is followed by another one, until ctx ends.
func (s *session) prove(ctx context.Context, since backend.Instant) error {
	for {
		s.mu.Lock()
		if s.Ended() {
			s.mu.Unlock()
			return errSessionLost
		}
		if s.last >= since {
			s.mu.Unlock()
			return nil
		}
		mine := s.startAsking()
		asked := s.asking
		s.mu.Unlock()
		select {
		case <-asked.done:
			late := kit.IsContext(asked.err) && !errors.Is(asked.err, errNoConnection)
			if mine && asked.err != nil && !late {
				return asked.err
			}
		case <-ctx.Done():
			if !s.connected() {
				return fmt.Errorf("%w: %w", errNoConnection, kit.Ended(ctx))
			}
			return kit.Ended(ctx)
		}
	}
}

// startAsking asks for a proof unless one is being asked for, or the session has ended. s.mu is held.
func (s *session) startAsking() bool {
	if s.Ended() || s.asking != nil {
		return false
	}
	q := &question{done: make(chan struct{})}
	s.asking = q
	s.calls.Go(func() { s.ask(q) })
	return true
}

// question is a request for a proof.
type question struct {
	done chan struct{} // closed when it is answered, or given up
	err  error         // valid after done
}

// proveUntil proves the session until what may be reported is since or later. One request does, unless the one before
// it was long ago: then another one follows half a tick later.
func (s *session) proveUntil(ctx context.Context, since backend.Instant) error {
	for {
		if s.provedAt() >= since {
			return nil
		}
		if err := s.prove(ctx, s.d.clock.Now()); err != nil {
			return err
		}
		if s.provedAt() >= since {
			return nil
		}
		if err := kit.Sleep(ctx, s.d.o.Tick/2); err != nil {
			return err
		}
	}
}

// ask sends one request that a majority must agree to, changes nothing, and waits for its answer. See proof.
func (s *session) ask(q *question) {
	ctx, cancel := context.WithTimeout(context.Background(), min(max(s.ttl/3, time.Second), attemptTime))
	defer cancel()
	var sent backend.Instant
	seen := s.d.zxid.Load()
	answered := func(_ struct{}, err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if err == nil {
			s.proof.answered(sent)
			s.last = max(s.last, sent)
		}
	}
	none, err := do(ctx, s, answered, func(c *zk.Conn) (struct{}, error) {
		sent = s.d.clock.Now()
		err := transaction(c, &zk.CheckVersionRequest{Path: "/", Version: -1})
		if errors.Is(err, zk.ErrNoAuth) {
			err = nil // a majority has agreed to that, too
		}
		return struct{}{}, err
	})
	if err == nil {
		if err = s.d.checkZxid(seen, s.zxid.Load()); err == nil {
			answered(none, nil)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	q.err = err
	s.asking = nil
	close(q.done)
}

// keepAlive runs while the session lives. A session without users is given up after one TTL, and so is one that could
// not be proved for that long: all of its holds have ended for their holders, and a client whose answers do not arrive
// would keep it alive for ever by coming back.
func (s *session) keepAlive() {
	every := max(min(s.ttl/4, max(s.ttl/10, s.d.o.Tick*2/5)), 10*time.Millisecond)
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-s.Over():
			return
		case <-s.d.ctx.Done():
			return // Close ends it
		}
		if s.d.sessions.Retire(s, s.ttl) {
			s.stopDial()
			return
		}
		if !s.proveAgain(every / 2) {
			return
		}
		timer.Reset(every)
	}
}

// proveAgain proves the session if the last proof is older than age. It is false if the session has ended, also by
// that: it waits no longer than until one TTL is over since the last one, whoever else asks.
func (s *session) proveAgain(age time.Duration) bool {
	now := s.d.clock.Now()
	ctx, cancel := context.WithTimeout(s.d.ctx, s.provedAt().Add(s.ttl).Sub(now))
	defer cancel()
	if err := s.prove(ctx, now.Add(-age)); errors.Is(err, errSessionLost) {
		return false
	}
	if s.d.clock.Now().Sub(s.provedAt()) < s.ttl {
		return true
	}
	s.end(backend.ReasonSessionExpired)
	return false
}
