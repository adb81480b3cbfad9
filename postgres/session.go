// This file keeps sessions. A session is one row of the table sessions, shared by all holds and places in queues of
// one TTL of this client: renewing ten thousand holds writes one row. With a row for each hold, a renewal would write
// all of them. The price is that the holds of one TTL end together when their client dies.
//
// kit.Sessions records the session of a TTL and its users. For the server a session is in one of three states: not
// begun, until a begin has been answered; alive, while its row exists and expires_at has not passed; or ended, when
// the row has been deleted. The row is deleted by remove, by any client's reap, or by the first statement that finds
// it expired: that deletion makes the end final, since a renewal only updates an existing row. A row with the same id
// is never recreated.
//
// The client counts from an earlier instant: a session is proved at the instant before the last answered renewal was
// sent, and every grant on it is valid from that instant. So a hold expires at the client before it expires at the
// server, whatever the readings of the two clocks.

package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// session is one row of the table sessions, on which all holds and waits of one TTL live.
type session struct {
	kit.Session
	d   *Driver
	id  string
	ttl time.Duration

	// renewing holds a token while a renewal is in progress: one at a time. It is a channel and not a mutex, so that a
	// waiting caller can leave with its context.
	renewing chan struct{}
	begun    backend.Instant // when its row was asked for first; touched with the token only

	// The following fields are protected by d.mu.

	proved backend.Instant // when the last renewal that was confirmed was sent; zero before the first

	// A request on the session may run late, or a lagging standby has restored one.
	doubt bool
}

// errNoSession: the session is over. A call that needs a session joins another.
var errNoSession = errors.New("the session is over")

// join returns the session for ttl, proved within the last half of its TTL, and counts one more user of it. s.Leave
// follows.
func (d *Driver) join(ctx context.Context, ttl time.Duration) (*session, error) {
	s, err := d.sessions.Join(ctx, ttl, func() *session {
		id := d.id + "-" + backend.NewRequestID()[:16]
		return &session{Session: d.sessions.New(), d: d, id: id, ttl: ttl, renewing: make(chan struct{}, 1)}
	}, func(s *session) {
		d.sessions.Opened(s, nil) // for the server the first renewal begins it
		d.gate.Go(s.keepAlive)
	})
	if err != nil {
		return nil, err
	}
	if err := s.fresh(ctx); err != nil {
		s.Leave(1)
		return nil, err
	}
	return s, nil
}

// provedAt returns when the last renewal that was confirmed was sent; zero without one.
func (s *session) provedAt() backend.Instant {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	return s.proved
}

// doubts reports whether the session may have a hold or place unknown to this client.
func (s *session) doubts() bool {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	return s.doubt
}

// fresh renews the session, unless it was proved within the last half of its TTL.
func (s *session) fresh(ctx context.Context) error {
	for {
		proved := s.provedAt()
		switch {
		case s.Ended():
			return errNoSession
		case !proved.IsZero() && s.d.clock.Now().Sub(proved) < s.ttl/2:
			return nil
		}
		if _, err := s.renew(ctx, nil, s.ttl/2); err != nil {
			return err
		}
	}
}

// missing is a renewal's answer about holds that have left its session, by their places in the request, from 1. gone
// has a reason each, and moved a session: a call that moves such a hold is in progress, or was not answered.
type missing struct {
	gone       []int // with the reasons, the reason given to ForceRelease, and its caller
	reasons    []string
	whys       []string
	bys        []string
	principals []string
	moved      []int // to these sessions: a call that moves them is in progress, or was not answered
	sessions   []string
}

// loss returns the reason for the j-th of gone: evicted, if the server has kept no reason.
func (m missing) loss(j int) backend.Loss {
	return backend.Loss{
		Reason: cmp.Or(backend.Reason(m.reasons[j]), backend.ReasonEvicted), Text: m.whys[j],
		By: m.bys[j], Principal: m.principals[j],
	}
}

// renew prolongs the session and asks which of the holds have ended. Without holds it has no effect if the session was
// proved within recent, so that concurrent callers share one renewal. The token in renewing limits a session to one
// renewal at a time: a second one would only wait for the row.
//
// The session's proof is the instant before the statement was sent; an overtaken statement never sets it back.
func (s *session) renew(ctx context.Context, holds []backend.Grant, recent time.Duration) (
	seen missing, err error,
) {
	// One renewal at a time. A caller that has waited for another renewal checks below whether that was enough.
	select {
	case s.renewing <- struct{}{}:
		defer func() { <-s.renewing }()
	case <-ctx.Done():
		return seen, fmt.Errorf("%w: %w", backend.ErrUnavailable, ctx.Err())
	}
	proved, now := s.provedAt(), s.d.clock.Now()
	switch {
	case s.Ended():
		return seen, errNoSession
	case len(holds) == 0 && !proved.IsZero() && now.Sub(proved) < recent:
		return seen, nil
	case proved.IsZero():
		// The first renewal makes the row, and asks about holds only if some moved here.
		if err := s.begin(ctx); err != nil || len(holds) == 0 {
			return seen, err
		}
		now = s.d.clock.Now()
	}
	names, ids, tokens := columns(holds)
	var state string
	var here, clock int64
	before, sent := s.d.position(), s.d.clock.Now()
	err = s.d.query(ctx, func(rows pgx.Rows) error {
		return rows.Scan(&state, &seen.gone, &seen.reasons, &seen.whys, &seen.bys, &seen.principals,
			&seen.moved, &seen.sessions, &here, &clock)
	}, s.d.sql.renew, s.id, names, ids, tokens, s.d.clockKnown())
	if err == nil {
		s.d.clockWas(sent, clock)
		err = s.d.saw(before, here)
	}
	if err != nil {
		return seen, err
	}
	if state == "no-session" {
		return seen, s.expired(ctx)
	}
	s.d.mu.Lock()
	s.proved = max(s.proved, now)
	s.d.mu.Unlock()
	return seen, nil
}

// begin makes the session's row, unless an earlier unanswered begin has made it. The client cannot know which of them
// did, so the proof counts from the first: counted from a later one, the holds would be valid for longer than the row
// lives. If the first never arrived, the next renewal makes up for the difference. The caller has the token.
func (s *session) begin(ctx context.Context) error {
	if s.begun.IsZero() {
		s.begun = s.d.clock.Now()
	}
	if err := s.d.write(ctx, s.d.sql.begin, s.id, s.d.channel(), s.ttl.Milliseconds()); err != nil {
		return err
	}
	s.d.mu.Lock()
	s.proved = s.begun
	s.d.mu.Unlock()
	return nil
}

// expired finds out why the server does not have the session: it expired, or all tables were emptied, which is a lost
// history and not a lost session.
func (s *session) expired(ctx context.Context) error {
	if err := s.d.probe(ctx); err != nil && !errors.Is(err, backend.ErrMisconfigured) {
		return err
	}
	s.ended(backend.ReasonSessionExpired)
	return errNoSession
}

// ended notifies the holders and waiters of the session that it is over, and makes room for another one. Only the
// first call has an effect. The callbacks are called without d.mu, in the goroutine that found the end: a renewal, a
// call, or a probe that found another history. Waiters look, find that their places have ended, and repeat their
// requests.
func (s *session) ended(reason backend.Reason) {
	d := s.d
	if !d.sessions.End(s) {
		return
	}
	d.mu.Lock()
	// One critical section, so that a loss is reported once, here or by the call that finds it.
	lost := d.holdsOf(s)
	waiting := d.waitersOf(s)
	d.mu.Unlock()
	for _, h := range lost {
		h.lose(backend.Loss{Reason: reason})
	}
	for _, w := range waiting {
		w.look() // its place has ended: it asks for another
	}
}

// keepAlive renews the session about three times per TTL while it has users, and ends it after three TTLs without a
// user. It runs from the session's first use until its end or Close. A failed renewal is retried after a short pause
// (kit.RetryPause), so that one lost answer does not cost a third of the TTL.
//
// Unknown holds are swept after a successful renewal: the sweep must not end a hold that a call is about to be
// granted, and known lists those calls. Every fourth round also reaps the sessions of clients that died, a few at a
// time and by one client at a time, and probes the server. By that probe a program that only renews notices a
// promotion.
func (s *session) keepAlive(ctx context.Context) {
	d, beats := s.d, 0
	for {
		// A tenth of the interval earlier than a third of the TTL, and not right after a failed renewal.
		pause := s.ttl/3 - s.ttl/30
		if proved := s.provedAt(); !proved.IsZero() {
			pause = max(pause-d.clock.Now().Sub(proved), kit.RetryPause(s.ttl))
		}
		if !d.pause(ctx, pause) {
			return
		}
		// No call can join it from here on, so that the sweep ends no hold in use.
		if d.sessions.Retire(s, 3*s.ttl) {
			_ = s.remove(ctx) // the row ends by its TTL
		}
		if s.Ended() {
			return
		}
		// A longer renewal is useless: the next one is due.
		bounded, cancel := context.WithTimeout(ctx, max(s.ttl/3, time.Second))
		if _, err := s.renew(bounded, nil, s.ttl/4); err == nil && s.doubts() {
			// A failed sweep is repeated after the next renewal. If the server refuses it, unknown holds end with the
			// session.
			if err := d.exec(bounded, d.sql.sweep, s.id, d.known(), false, d.clockKnown()); undone(err) {
				d.sessions.Abandon(s)
			}
		}
		// Any client does this for all: clients with ended sessions may be dead.
		if beats++; beats%4 == 0 {
			_ = d.exec(bounded, d.sql.reap, d.clockKnown())
			_ = d.probe(bounded)
		}
		cancel()
	}
}

// remove ends the session on the server, with all holds and places on it. If that fails, they end after the TTL.
func (s *session) remove(ctx context.Context) error {
	if s.provedAt().IsZero() { // it has not begun there
		return nil
	}
	return s.d.exec(ctx, s.d.sql.sweep, s.id, []string{}, true, s.d.clockKnown())
}

// pause waits, and returns false if ctx ends or the driver closes meanwhile.
func (d *Driver) pause(ctx context.Context, pause time.Duration) bool {
	bound, done := d.gate.Bind(ctx)
	defer done()
	return kit.Sleep(bound, pause) == nil
}

// columns returns the columns of holds for the SQL functions: arrays of names, request ids and tokens.
func columns(holds []backend.Grant) (names, ids []string, tokens []int64) {
	names, ids, tokens = make([]string, len(holds)), make([]string, len(holds)), make([]int64, len(holds))
	for i := range holds {
		names[i], ids[i], tokens[i] = holds[i].Name, holds[i].RequestID, int64(holds[i].Token.Order())
	}
	return names, ids, tokens
}
