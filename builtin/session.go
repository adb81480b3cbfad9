package builtin

// Sessions: one for each TTL in use. All holds and waits of the driver belong to one of them in the service, and live
// as long as it does; so the driver renews a few sessions, not its holds.
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

// session has all holds and waiters with one TTL. Its own loop keeps it alive, and records when each request was sent
// that proved it.
//
// The first call that needs its TTL makes a session; it is opened in the service, attached to one connection after
// the other, and ended: by the service, when its time is over, or here, when nobody uses it. It never comes back: the
// caller then takes another session, with another id, so that late requests of the old one cannot
// touch the holds of the new one.
//
// All fields but the first ones are protected by Driver.mu.
type session struct {
	kit.Session // its users, and whether it has ended
	d           *Driver
	// id is 128 random bits. Anybody who knows it can speak for the session, so no log and no error has it.
	id  []byte
	ttl time.Duration

	// open: the service has it, as far as is known here. install attaches only open sessions.
	open bool
	// reason is why the service ended it; valid once ended, unless it was closed here.
	reason backend.Reason
	// on is the connection that it is attached to, which alone may speak for it and receives its pushes; nil: no
	// connection, or the attachment is under way.
	on *conn

	// proved is just before the last request was sent that renewed it: its holds and waits are valid for ttl from
	// then on. It is the instant of sending, never that of the answer, which may have been on its way for long.
	proved backend.Instant
	// asked is when another session's keepalive last included this one.
	asked backend.Instant

	// The service remembers the answer to each sequence until it is acknowledged, so that a request that is sent
	// twice is carried out once. Acknowledged sequences must be settled: otherwise a repetition would get no answer.
	//
	// sequence is the last one; unsettled are sequences with pending answers; all up to acknowledged are settled.
	sequence     uint64
	unsettled    map[uint64]struct{}
	acknowledged uint64

	// attempts are the undecided acquires, by each of their names: usually one, and several if a caller asks twice at
	// a time with one request id. A key without attempts is not in the map.
	attempts map[key][]*attempt
	// leftovers are possible leftovers in the service, one for a key at most.
	leftovers map[key]*leftover
}

// sessionFor returns an open session for ttl and counts the caller among its users: it has to Leave. It makes a
// missing session, for which all concurrent callers wait. The errors are those of opening it,
// backend.ErrClosed, and ctx's with what unopened says.
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

// unopened returns the error of a call for which the session was not open in time. Once the request to open it has
// left, the outcome is unknown, although no lock was requested: the error must not promise that no request was sent.
// The caller holds d.mu.
func (s *session) unopened(err error) error {
	for _, x := range s.d.calls {
		if x.session == s && (x.doubt || x.sent != 0) {
			return fmt.Errorf("%w: %w", backend.ErrUnknown, err) // at least the session may be there
		}
	}
	return unavailable(err)
}

// newSession makes a session that the service does not know yet. Its id is new and random, never derived from
// anything: anybody who knows it can speak for the session, and a reused id could meet requests of its predecessor.
// It is called under kit's mutex, and takes no mutex.
func (d *Driver) newSession(ttl time.Duration) *session {
	s := &session{
		Session: d.sessions.New(), d: d, id: make([]byte, 16), ttl: ttl,
		unsettled: map[uint64]struct{}{}, attempts: map[key][]*attempt{}, leftovers: map[key]*leftover{},
	}
	rand.Read(s.id) // never fails
	return s
}

// create opens the session, in the background: the end of one caller's context must not fail the others. It then goes
// on as the session's own goroutine. If the session cannot be opened, all waiting callers get the error, and the next
// call makes another one.
//
// sessionFor has started it, as work of the gate: Close waits until it has ended. It holds no mutex during the
// request, and the answer takes effect in then, before any later push on the connection.
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

// forget removes the session from the driver: from now on only its end is sent. It is true once, so that only one of
// several goroutines that end a session at the same time draws the consequences. The caller holds d.mu.
//
// The order of mutexes is d.mu, then kit's.
func (s *session) forget() bool {
	s.open = false
	delete(s.d.byID, string(s.id))
	return s.d.sessions.End(s)
}

// end takes note that the service has ended the session, and with it all its holds and waits: holders are notified,
// waiters queue anew in another session, and calls fail with errSessionEnded. Leftovers are gone with the session.
// The caller holds d.mu, and unlocks it with unlockAndTell.
//
// A second end has no effect, so every goroutine that hears of the end may call it. The session's own goroutine ends
// with it.
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

// lostHold is the error for a hold that ended with the session. The caller holds d.mu.
func (s *session) lostHold() error {
	return &backend.NotHeldError{Reason: cmp.Or(s.reason, backend.ReasonSessionExpired)}
}

// number returns the next sequence. The caller holds d.mu.
//
// Every number has to be settled once, or acknowledged stops and the server remembers all later answers for the life
// of the session; it accepts only a limited number of them (unacked: see docs/SERVER.md).
func (s *session) number() uint64 {
	s.sequence++
	s.unsettled[s.sequence] = struct{}{}
	return s.sequence
}

// settled notes that the answer to a sequence is no longer needed. The caller holds d.mu.
//
// Settling a sequence twice does no harm. acknowledged moves over all settled sequences without a gap; one slow call
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

// keepAlive is the request of all sessions. Nobody writes to it.
var keepAlive = &lockpb.Request{Call: &lockpb.Request_KeepAlive{KeepAlive: &lockpb.KeepAlive{}}}

// prove makes the service renew the session, by a request that is sent after this call. An earlier proof does not
// help a caller that has to know whether a hold lives now.
//
// A session that is not attached to the connection on which it speaks receives no pushes: prove ends that connection,
// and the next one begins with an attachment.
//
//	nil                   the session lived when the request was sent; s.proved says when that was
//	errSessionEnded       it is gone: end has been called, and its holders are notified
//	other errors          unknown: the session may live or not
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

// keepAlive runs while the session lives. It closes a session that has been unused for one TTL, not earlier: a new
// session for each lock would cost two log entries more for each.
//
// It renews a third of the TTL after the last proof, so that two renewals may fail before time runs out. It also
// sweeps the leftovers: they need no goroutine each, as no leftover is urgent to the millisecond.
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

// next returns the time that the loop sleeps: until the session is to be renewed, if no other request has done so by
// then.
//
// It never is less than a twentieth of the TTL, so that a clock that stands still, or a proof that came late, cannot
// make the loop spin.
func (s *session) next() time.Duration {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	return max(s.proved.Add(s.ttl/3).Sub(s.d.clock.Now()), s.ttl/20)
}

// retire closes a session that has retired. Nobody waits for the answer: without keepalives it expires. Nobody can
// join it any more, so the request comes after all its other requests. Waiting calls are clean-ups: their leftovers
// end with the session. The caller holds d.mu.
func (s *session) retire() {
	s.forget()
	s.finishCalls()
	s.d.start(s.closing())
}

// closing is the call that ends the session in the service. It needs no attachment, since it is the session's last
// request.
func (s *session) closing() *call {
	return &call{
		request: &lockpb.Request{Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}}},
		session: s, attaches: true,
	}
}

// closeSessions ends all sessions in the service, at the same time. Close calls it after it has ended the waiters;
// their holds end with their session.
//
// Holders are not notified: the caller of Close has asked for the end. The error is the first one, or
// backend.ErrUnavailable if ctx ended first; in both cases the sessions end with their TTL.
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
