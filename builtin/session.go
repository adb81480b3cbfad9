package builtin

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

// session is what all holds and waiters with one TTL hang on. Its own loop keeps it alive, and records when each
// request was sent that proved it.
//
// All fields but the first ones are protected by Driver.mu.
type session struct {
	kit.Session
	d   *Driver
	id  []byte // 128 random bits
	ttl time.Duration

	open   bool
	reason backend.Reason // why the service ended it; valid once ended, unless it was closed here
	on     *conn          // the connection that it is attached to

	proved backend.Instant // just before the last request was sent that renewed it

	sequence     uint64              // the last one
	unsettled    map[uint64]struct{} // sequences whose answers are still needed
	acknowledged uint64              // all up to here are settled

	attempts  map[key][]*attempt // acquires that are not decided
	leftovers map[key]*leftover
}

// sessionFor returns an open session for ttl, with a user more. It makes one if there is none.
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

// unopened is the error of a call for which the session was not open in time. The caller holds d.mu.
func (s *session) unopened(err error) error {
	for _, x := range s.d.calls {
		if x.session == s && (x.doubt || x.sent != 0) {
			return fmt.Errorf("%w: %w", backend.ErrUnknown, err) // the session, at least, may be there
		}
	}
	return unavailable(err)
}

func (d *Driver) newSession(ttl time.Duration) *session {
	s := &session{
		Session: d.sessions.New(), d: d, id: make([]byte, 16), ttl: ttl,
		unsettled: map[uint64]struct{}{}, attempts: map[key][]*attempt{}, leftovers: map[key]*leftover{},
	}
	rand.Read(s.id) // never fails
	return s
}

// create opens the session, in the background: the end of one caller's context must not fail the others.
func (s *session) create() {
	d := s.d
	_, err := d.ask(d.ctx, call{
		request: &lockpb.Request{Call: &lockpb.Request_OpenSession{
			OpenSession: &lockpb.OpenSession{TtlNanos: int64(s.ttl)},
		}},
		session: s, attaches: true, looks: true, // an empty session does nobody harm
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

// forget takes the session out of the driver. It is true once. The caller holds d.mu.
func (s *session) forget() bool {
	s.open = false
	delete(s.d.byID, string(s.id))
	return s.d.sessions.End(s)
}

// end takes note that the service has ended the session, and with it all that hung on it. The caller holds d.mu.
func (s *session) end(reason backend.Reason) {
	if !s.forget() {
		return
	}
	s.reason = reason
	for k, h := range s.d.holds {
		if h.session == s {
			s.d.drop(k, h)
			s.d.tellLost(h, reason)
		}
	}
	for _, all := range s.attempts {
		for _, a := range all {
			a.decide(nil, errSessionEnded)
		}
	}
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
func (s *session) number() uint64 {
	s.sequence++
	s.unsettled[s.sequence] = struct{}{}
	return s.sequence
}

// settled notes that the answer to a sequence is not needed any more. The caller holds d.mu.
func (s *session) settled(sequence uint64) {
	delete(s.unsettled, sequence)
	for s.acknowledged < s.sequence {
		if _, open := s.unsettled[s.acknowledged+1]; open {
			break
		}
		s.acknowledged++
	}
}

// prove has the service renew the session, by a request that is sent after this call.
func (s *session) prove(ctx context.Context) error {
	reply, err := s.d.ask(ctx, call{
		request: &lockpb.Request{Call: &lockpb.Request_KeepAlive{KeepAlive: &lockpb.KeepAlive{}}}, session: s,
	})
	if err == nil && !reply.Renewed {
		err = errNoAnswer
	}
	if err == nil {
		return nil
	}
	s.d.mu.Lock()
	defer s.d.unlockAndTell()
	switch {
	case errors.Is(err, errSessionEnded):
		s.end(backend.ReasonSessionExpired)
	case errors.Is(err, errConflict) && s.on != nil:
		s.on.cancel(errPushLost) // the server does not know where to push
	}
	return err
}

// keepAlive runs while the session lives. A session that nobody has used for one TTL is closed.
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
		retire := d.sessions.Retire(s, s.ttl)
		d.mu.Unlock()
		switch {
		case retire:
			s.retire()
			return
		case now >= due:
			// Also beyond the TTL: whether the session has ended, the service alone knows.
			ctx, cancel := context.WithTimeout(d.ctx, s.ttl)
			err := s.prove(ctx)
			cancel()
			if err != nil {
				timer.Reset(spread(min(max(s.ttl/20, 25*time.Millisecond), time.Second)))
				continue
			}
		}
		timer.Reset(s.next())
	}
}

// next is how long the loop sleeps.
func (s *session) next() time.Duration {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	return max(s.proved.Add(s.ttl/3).Sub(s.d.clock.Now()), s.ttl/20)
}

// retire closes a session that has retired.
func (s *session) retire() {
	d := s.d
	d.mu.Lock()
	s.forget()
	x := s.closing()
	d.start(x)
	d.mu.Unlock()
	ctx, cancel := context.WithTimeout(d.ctx, s.ttl)
	defer cancel()
	_, _ = d.await(ctx, x) // without keepalives it ends by itself
}

// closing is the call that ends the session in the service. Not attached, since it is the last thing that is said of
// it.
func (s *session) closing() *call {
	return &call{
		request: &lockpb.Request{Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}}},
		session: s, attaches: true,
	}
}

// closeSessions ends all sessions in the service.
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
