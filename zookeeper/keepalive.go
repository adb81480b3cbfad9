// This file keeps sessions alive and proved. proof.go computes the proof of an answer; this file sends the question,
// shares it among the callers, and repeats it at intervals.
//
// The library pings the server, which keeps the session alive but is no proof about the leader. So each session asks
// with a transaction, at most one at a time: prove waits for a recent one, keepAlive asks often enough, and ask sends
// the question.

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

// prove makes sure that the leader has confirmed the session to a request that was sent at since or later. Concurrent
// callers share one request: a thousand holds that are renewed together cost one transaction.
//
// The request continues when a caller's context ends, so that a later caller finds an answer that took longer than the
// wait. Another request follows one without a timely answer, until ctx ends: a call must not return a context's error
// while its own context has not ended.
//
// Only the caller that asked gets the question's error immediately; the other callers ask again, since the question
// may have been sent before they came.
func (s *session) prove(ctx context.Context, since backend.Instant) error {
	for {
		s.mu.Lock()
		if s.Ended() {
			s.mu.Unlock()
			return errSessionLost
		}
		// A request that was sent late enough has already been answered.
		if s.last >= since {
			s.mu.Unlock()
			return nil
		}
		// Wait for this call's question, or for one in progress that may have been sent too early: then the next turn asks
		// again.
		mine := s.startAsking()
		asked := s.asking
		s.mu.Unlock()
		select {
		case <-asked.done:
			// The question has its own, shorter timeout, which does not end a caller with time left.
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

// startAsking asks for a proof unless a question is in progress, or the session has ended, and reports whether it did.
// The caller holds s.mu.
func (s *session) startAsking() bool {
	if s.Ended() || s.asking != nil {
		return false
	}
	q := &question{done: make(chan struct{})}
	s.asking = q
	s.calls.Go(func() { s.ask(q) })
	return true
}

// question is one request for a proof. done is closed by ask, under session.mu, when it is answered or times out.
type question struct {
	done chan struct{} // closed when it is answered, or times out
	err  error         // valid after done
}

// proveUntil proves the session until the reported instant is since or later. One request is enough, unless the
// previous one was long ago: a request proves no more than a tick beyond the previous one (see proof), so that another
// follows half a tick later.
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

// ask sends one read-only request that a majority must agree to, waits for its answer, and ends the question. It runs
// on its own goroutine, bounded by a third of the TTL or a second, and by 3 s.
//
// The instant is read right before the request is sent, in the goroutine that sends it: an instant read at the arrival
// of the answer would promise time that no server granted. An answer after the question's timeout still counts.
//
// The request is not sync: an overtaken leader that does not know it answers sync alone (docs/decisions, no leader is
// believed alone). A user without the right to read "/" is refused by the same agreement of a majority, so that the
// refusal proves as much.
func (s *session) ask(q *question) {
	ctx, cancel := context.WithTimeout(context.Background(), min(max(s.ttl/3, time.Second), callTime))
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
	// The highest zxid before the question is sent. A leader that answers with a lower one has lost its history: see
	// checkZxid.
	none, err := do(ctx, s, answered, func(c *zk.Conn) (struct{}, error) {
		sent = s.d.clock.Now()
		err := transaction(c, &zk.CheckVersionRequest{Path: "/", Version: -1})
		if errors.Is(err, zk.ErrNoAuth) {
			err = nil // a majority has agreed to the refusal as well
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
	// The question ends: a later caller asks a new one.
	q.err = err
	s.asking = nil
	close(q.done)
}

// keepAlive proves the session at intervals of a tenth of its TTL, or of 0.4 ticks if that is longer, but four times
// per TTL at least. It runs while the session lives, and ends with the session or with Close.
//
// A session without users is dropped after one TTL, and so is one that could not be proved for that long: all of its
// holds have ended for their holders, and a client that reconnects without answers would keep it alive indefinitely.
func (s *session) keepAlive() {
	// See the package comment for the cost; 10 ms keeps very short ticks of tests from a busy loop.
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
		// No call can join it from here on. closeAfterEnd closes it.
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

// proveAgain proves the session if the last proof is older than age. It returns false if the session has ended, even
// by proveAgain itself: it waits until one TTL after the last proof, and not longer, however often other callers ask.
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
