package builtin

// Sessions: one for each TTL in use. Each hold and each wait of the driver belongs to a session in the service and
// lives as long as that session, so the driver renews a few sessions and not its holds.
//
// A session's own goroutine, keepAlive, renews it while it is used and closes it a TTL after its last user has left. It
// ends when the session does, and with Close, which ends all sessions itself.

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// session has all holds and waiters with one TTL.
//
// The first call that needs its TTL makes a session. The driver opens it in the service and attaches it to one
// connection after the other. It ends in the service when its time is over, or here when it has no users. An ended
// session is never used again: callers get another session, with another id, so that late requests of the old session
// cannot affect holds of the new one.
//
// All fields but the first ones are protected by Driver.mu.
type session struct {
	kit.Session // its users, and its end
	d           *Driver
	// id is 128 random bits. A client that knows it can act for the session, so no log and no error contains it.
	id  []byte
	ttl time.Duration

	// open: the service has it, as far as is known here. install attaches only open sessions.
	open bool
	// reason is the reason for its end; empty if the driver closed it.
	reason backend.Reason
	// on is the connection to which it is attached: only that connection carries its requests and receives its pushes.
	// nil: there is no connection, or the attachment is in progress.
	on *conn

	// proved is the instant just before the last request that renewed it was sent: its holds and waits are valid for ttl
	// from then on. The instant of the answer would be too late, by the time that the answer took.
	proved backend.Instant
	// asked is the instant at which another session's keepalive last included this one.
	asked backend.Instant

	// The service remembers the answer to each sequence until it is acknowledged, so that it executes a repeated request
	// once. Only settled sequences may be acknowledged: otherwise a repetition would get no answer.
	//
	// sequence is the last one; unsettled are sequences with pending answers; all up to acknowledged are settled.
	sequence     uint64
	unsettled    map[uint64]struct{}
	acknowledged uint64

	// attempts are the undecided acquires, by each of their names: usually one, and several if callers acquire
	// concurrently with one request id. A key without attempts is not in the map.
	attempts map[key][]*attempt
	// leftovers are possible leftovers in the service, one for a key at most.
	leftovers map[key]*leftover
}

// sessionFor returns an open session for ttl, and counts the caller among its users until the caller calls Leave. It
// makes a missing session, for which all concurrent callers wait. The errors are those of create, backend.ErrClosed,
// and ctx's error as unopened wraps it.
func (d *Driver) sessionFor(ctx context.Context, ttl time.Duration) (*session, error) {
	s, err := d.sessions.Join(ctx, ttl, func() *session { return d.newSession(ttl) }, func(s *session) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.byID[string(s.id)] = s
		d.background(s.create)
	})
	if kit.IsContext(err) {
		d.mu.Lock()
		defer d.mu.Unlock()
		err = s.unopened(err)
	}
	return s, err
}

// unopened returns the error of a call for which the session was not open in time. Once the request to open it may
// have been sent, the outcome is unknown, although no lock was requested: the error must not promise that nothing was
// sent. The caller holds d.mu.
func (s *session) unopened(err error) error {
	for _, x := range s.d.calls {
		if x.session == s && (x.doubt || x.sent != 0) {
			return fmt.Errorf("%w: %w", backend.ErrUnknown, err) // the session may have been opened
		}
	}
	return unavailable(err)
}

// newSession makes a session that the service does not know yet. Its id is new and random: a client that can guess the
// id can act for the session, and a reused id could meet requests of an earlier session. newSession is called under
// kit's mutex, and takes no mutex.
func (d *Driver) newSession(ttl time.Duration) *session {
	s := &session{
		Session: d.sessions.New(), d: d, id: make([]byte, 16), ttl: ttl,
		unsettled: map[uint64]struct{}{}, attempts: map[key][]*attempt{}, leftovers: map[key]*leftover{},
	}
	rand.Read(s.id) // never fails
	return s
}

// create opens the session in the background, since the end of one caller's context must not fail the other callers,
// and then runs keepAlive in the same goroutine. If the session cannot be opened, all waiting callers get the error,
// and the next call makes another session.
//
// sessionFor starts it as work of the gate, so Close waits until it has ended. The answer takes effect in then, before
// any later push on the connection.
func (s *session) create() {
	d := s.d
	_, err := d.ask(d.ctx, call{
		request: &lockpb.Request{Call: &lockpb.Request_OpenSession{
			OpenSession: &lockpb.OpenSession{TtlNanos: int64(s.ttl)},
		}},
		session: s, attaches: true, looks: true, // an empty session does no harm
		then: func(r *lockpb.Reply, err error) {
			if err == nil && r.GetSession() != nil {
				s.open, s.on = true, d.conn
			}
		},
	})
	if err != nil {
		if d.ctx.Err() != nil {
			err = backend.ErrClosed
		}
		d.mu.Lock()
		s.forget()
		d.mu.Unlock()
	}
	d.sessions.Opened(s, err)
	if err == nil {
		s.keepAlive()
	}
}

// forget removes the session from the driver: from now on the driver sends only its end. It returns true to the first
// caller only, so that one of several goroutines that end a session handles the consequences. The caller holds d.mu.
//
// The order of mutexes is d.mu, then kit's.
func (s *session) forget() bool {
	s.open = false
	delete(s.d.byID, string(s.id))
	return s.d.sessions.End(s)
}

// end handles the end of the session in the service, which ends its holds, waits and leftovers: it notifies holders,
// lets waiters queue again in another session, and ends calls with errSessionEnded. The caller holds d.mu, and unlocks
// it with unlockAndTell.
//
// A second call has no effect, so every goroutine that notices the end may call it. keepAlive ends with the session.
func (s *session) end(reason backend.Reason) {
	if !s.forget() {
		return
	}
	s.reason = reason
	for k, h := range s.d.holds {
		if h.session == s {
			s.d.lose(k, h, backend.Loss{Reason: reason})
		}
	}
	for _, all := range s.attempts {
		for _, a := range all {
			a.decide(nil, errSessionEnded)
		}
	}
	s.finishCalls()
}

// finishCalls ends the calls of an ended session, which will get no answers. The caller holds d.mu.
func (s *session) finishCalls() {
	for _, x := range s.d.inOrder() {
		if x.session == s {
			s.d.finish(x, nil, errSessionEnded)
		}
	}
}

// lostHold returns the error for a hold that ended with the session. The caller holds d.mu.
func (s *session) lostHold() error {
	return &backend.NotHeldError{Reason: cmp.Or(s.reason, backend.ReasonSessionExpired)}
}

// number returns the next sequence. The caller holds d.mu.
//
// Every sequence has to be settled: otherwise acknowledged stops, and the server remembers all later answers for the
// life of the session, of which it allows only a limited number (unacked: see docs/SERVER.md).
func (s *session) number() uint64 {
	s.sequence++
	s.unsettled[s.sequence] = struct{}{}
	return s.sequence
}

// settled notes that the answer to a sequence is no longer needed. The caller holds d.mu.
//
// Settling a sequence twice does no harm. acknowledged advances over consecutive settled sequences; one slow call
// holds it back.
func (s *session) settled(sequence uint64) {
	delete(s.unsettled, sequence)
	for s.acknowledged < s.sequence {
		if _, open := s.unsettled[s.acknowledged+1]; open {
			break
		}
		s.acknowledged++
	}
}

// keepAlive is the request that renews a session. It is shared and read-only.
var keepAlive = &lockpb.Request{Call: &lockpb.Request_KeepAlive{KeepAlive: &lockpb.KeepAlive{}}}

// prove makes the service renew the session, by a request that is sent after this call. An earlier proof would not
// show whether a hold exists now.
//
// If the server answers that the session is not attached to this connection, the session receives no pushes: prove
// ends the connection, and the next one begins with an attachment.
//
//	nil                   the session existed when the request was sent, at s.proved or earlier
//	errSessionEnded       it has ended: end has been called, and its holders are notified
//	other errors          the state of the session is unknown
func (s *session) prove(ctx context.Context) error {
	reply, err := s.d.ask(ctx, call{
		request: keepAlive, session: s,
	})
	if err == nil && !reply.Renewed {
		err = errNoAnswer
	}
	if err == nil {
		return nil
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if errors.Is(err, errConflict) && s.on != nil {
		s.on.cancel(errPushLost) // the server does not know where to push
	}
	return err
}

// keepAlive runs while the session lives. It closes a session that has been unused for one TTL, and not earlier,
// because a new session for each lock would cost two more log entries.
//
// It renews a third of the TTL after the last proof, so that two renewals may fail before the session expires. It also
// releases due leftovers, which need no exact timing and so no goroutine each.
//
// due is a twentieth of the TTL before that third is over, so that a timer which fires a little early still renews.
// A request that proves the session meanwhile (each acquire does) moves the next renewal, so a busy session sends no
// separate keepalives. After a failure the next try comes after kit.RetryPause.
func (s *session) keepAlive() {
	d := s.d
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-s.Over():
			return
		case <-d.ctx.Done():
			return // Close ends the session
		}
		d.mu.Lock()
		now := d.clock.Now()
		due := s.proved.Add(s.ttl/3 - s.ttl/20)
		s.clear(now)
		retired := d.sessions.Retire(s, s.ttl)
		if retired {
			s.retire()
		}
		d.mu.Unlock()
		switch {
		case retired:
			return
		case now >= due:
			// Even beyond the TTL: only the service knows whether the session has ended.
			ctx, cancel := context.WithTimeout(d.ctx, s.ttl)
			err := s.prove(ctx)
			cancel()
			if err != nil {
				timer.Reset(kit.RetryPause(s.ttl))
				continue
			}
		}
		timer.Reset(s.next())
	}
}

// next returns the time for which keepAlive sleeps: until the next renewal is due, if no other request renews the
// session before.
//
// It is at least a twentieth of the TTL, so that keepAlive does not spin if the clock does not advance or a proof comes
// late.
func (s *session) next() time.Duration {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	return max(s.proved.Add(s.ttl/3).Sub(s.d.clock.Now()), s.ttl/20)
}

// retire closes a retired session. No caller waits for the answer, since the session expires without keepalives. No
// caller can join it any more, so the request comes after all of its other requests. Its remaining calls are releases
// of leftovers, which end with the session. The caller holds d.mu.
func (s *session) retire() {
	s.forget()
	s.finishCalls()
	s.d.start(s.closing())
}

// closing returns the call that ends the session in the service. It needs no attachment, since it is the session's
// last request.
func (s *session) closing() *call {
	return &call{
		request: &lockpb.Request{Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}}},
		session: s, attaches: true,
	}
}

// closeSessions ends all sessions in the service concurrently, and their holds with them. Close calls it after it has
// ended the waiters.
//
// Holders are not notified: the caller of Close has asked for the end. The error is the first one, or
// backend.ErrUnavailable if ctx ended first; after an error the sessions may end only with their TTL.
func (d *Driver) closeSessions(ctx context.Context) error {
	d.mu.Lock()
	var last []*call
	for _, s := range d.byID {
		s.forget()
		x := s.closing()
		d.start(x)
		last = append(last, x)
	}
	clear(d.holds)
	d.mu.Unlock()
	var err error
	for _, x := range last {
		select {
		case <-x.done:
			if err == nil {
				err = x.err
			}
		case <-ctx.Done():
			return unavailable(ctx.Err())
		}
	}
	return err
}
