package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/notify"
)

// session is an engine.Session: one row of the table sessions, which all its holds and waits share. The row is deleted
// by End, by any client's reap, or by the first statement that finds it expired: that deletion makes the end final,
// since a renewal only updates an existing row. A row with the same id is never made again.
type session struct {
	id       string
	ttl      time.Duration
	timeline int64 // on which it began
	beats    atomic.Int64
	alarm    notify.Signal // there are suspects

	mu       sync.Mutex         // protects the following fields
	entries  map[string][]entry // to notify, by hold id, which is in the notifications
	suspects map[string]bool    // hold ids of holds that may be gone
}

// entry is a waiter on a session, or a hold with a token.
type entry struct {
	name, requestID string
	token           fencing.Token
}

// TTL is engine.Session's.
func (own *session) TTL() time.Duration { return own.ttl }

// Open is engine.Sessions's.
func (s *service) Open(ctx context.Context, ttl time.Duration) (engine.Session, error) {
	own := &session{
		id: s.id + "-" + backend.NewRequestID()[:16], ttl: ttl, alarm: notify.New(),
		entries: map[string][]entry{}, suspects: map[string]bool{},
	}
	here, err := s.write(ctx, s.sql.begin, own.id, s.channel(), ttl.Milliseconds())
	if err != nil {
		if kit.Classified(err) && !errors.Is(err, backend.ErrUnknown) ||
			!kit.Classified(err) && s.Classify(err) != engine.Unknown {
			return nil, err
		}
		return own, err
	}
	own.timeline = here >> timelineShift
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live[own] = struct{}{}
	return own, nil
}

// Prove is engine.Sessions's. The server's clock sets the new end, which counts from the statement.
//
// A session of an earlier timeline is to be replaced: a standby that lagged behind brings back holds that were released
// since, and they would live as long as their session.
func (s *service) Prove(ctx context.Context, es engine.Session) error {
	own := es.(*session)
	err := s.renew(ctx, own)
	switch {
	case errors.Is(err, engine.ErrNoSession): // it has expired, or all tables were emptied
		if lost := s.probe(ctx); lost != nil && !errors.Is(lost, backend.ErrMisconfigured) {
			return lost
		}
	case misconfigured(err) && !kit.Classified(err):
		return fmt.Errorf("%w: %w", backend.ErrMisconfigured, err)
	case err == nil:
		if own.beats.Add(1)%4 == 0 {
			s.tend()
		}
		if s.position()>>timelineShift > own.timeline {
			return engine.ErrOutgrown
		}
	}
	return err
}

// End is engine.Sessions's.
func (s *service) End(ctx context.Context, es engine.Session) error {
	own := es.(*session)
	s.drop(own)
	err := s.exec(ctx, s.sql.sweep, own.id, []string{}, true, s.clockKnown())
	s.flush(ctx)
	return err
}

func (s *service) drop(own *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.live, own)
}

// absent are the holds that are not on a session: their places in the request, from 1, with the session of each, or, if
// that is empty, the reason why the hold is gone.
type absent struct {
	places     []int
	sessions   []string
	reasons    []string
	whys       []string // the reasons that were given to ForceRelease, and its callers
	bys        []string
	principals []string
}

// loss returns the reason for the j-th, if the server has kept one.
func (m absent) loss(j int) backend.Loss {
	return backend.Loss{Reason: backend.Reason(m.reasons[j]), Text: m.whys[j], By: m.bys[j], Principal: m.principals[j]}
}

// renew prolongs a session.
func (s *service) renew(ctx context.Context, own *session) error {
	var state string
	var here, clock int64
	before, sent := s.position(), s.clock.Now()
	err := s.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&state, &here, &clock) },
		s.sql.renew, own.id, s.clockKnown())
	if err == nil {
		s.clockWas(sent, clock)
		err = s.saw(before, here)
	}
	if err == nil && state == "no-session" {
		err = engine.ErrNoSession
	}
	return err
}

// compare returns which of some grants are not on a session.
func (s *service) compare(
	ctx context.Context, own *session, grants []backend.Grant, some []int,
) (m absent, err error) {
	names, ids, tokens := columns(grants, some)
	var exists bool
	var here int64
	before := s.position()
	err = s.query(ctx, func(rows pgx.Rows) error {
		return rows.Scan(&exists, &here, &m.places, &m.sessions, &m.reasons, &m.whys, &m.bys, &m.principals)
	}, s.sql.compare, own.id, names, ids, tokens)
	if err == nil {
		err = s.saw(before, here)
	}
	if err == nil && !exists {
		err = engine.ErrNoSession
	}
	return m, err
}

// Follow is engine.Follower's. A notification names a hold id and proves nothing: the holds with that id are compared.
func (s *service) Follow(ctx context.Context, es engine.Session, notify func(engine.Push)) error {
	own := es.(*session)
	defer func() {
		if ctx.Err() != nil {
			s.drop(own)
		}
	}()
	for {
		select {
		case <-own.alarm:
		case <-ctx.Done():
			return ctx.Err()
		}
		grants, all := own.suspected()
		bounded, cancel := context.WithTimeout(ctx, callTime)
		seen, err := s.compare(bounded, own, grants, all)
		cancel()
		switch {
		case errors.Is(err, engine.ErrNoSession):
			return nil
		case err != nil:
			own.suspect(grants)
			return err
		}
		for j, place := range seen.places {
			if seen.sessions[j] != "" {
				continue
			}
			g, loss := grants[place-1], seen.loss(j)
			if loss.Reason == "" {
				loss.Reason = backend.ReasonEvicted
			}
			own.forget(g.HoldID, g.RequestID)
			notify(engine.Push{What: engine.PushLost, RequestID: g.RequestID, Loss: loss, Incarnation: g.Incarnation})
		}
	}
}

// note notes who is to be notified. An entry replaces the request's last one.
func (own *session) note(holdID string, e entry) {
	own.mu.Lock()
	defer own.mu.Unlock()
	all := own.entries[holdID]
	if i := slices.IndexFunc(all, func(x entry) bool { return x.requestID == e.requestID }); i >= 0 {
		all[i] = e
		return
	}
	own.entries[holdID] = append(all, e)
}

// forget drops a request that has ended.
func (own *session) forget(holdID, requestID string) {
	own.mu.Lock()
	defer own.mu.Unlock()
	all := slices.DeleteFunc(own.entries[holdID], func(x entry) bool { return x.requestID == requestID })
	if len(all) == 0 {
		delete(own.entries, holdID)
		return
	}
	own.entries[holdID] = all
}

// noteAnswer notes the answer to an Enter.
func (own *session) noteAnswer(r engine.Entering, p engine.Position, err error) {
	switch {
	case err != nil:
	case p.Held && r.Lost != nil:
		own.note(r.HoldID, entry{r.Name, r.RequestID, p.Token})
	case p.Held || r.Wait && !p.Placed:
		own.forget(r.HoldID, r.RequestID)
	}
}

// notified returns the requests that wait with a hold id. The holds with that id are suspects.
func (own *session) notified(holdID string) (waiters []string) {
	own.mu.Lock()
	defer own.mu.Unlock()
	for _, e := range own.entries[holdID] {
		if e.token == 0 {
			waiters = append(waiters, e.requestID)
			continue
		}
		own.suspects[holdID] = true
		own.alarm.Notify()
	}
	return waiters
}

// suspected returns the suspects, which are none any more, and their numbers.
func (own *session) suspected() (grants []backend.Grant, all []int) {
	own.mu.Lock()
	defer own.mu.Unlock()
	for holdID := range own.suspects {
		for _, e := range own.entries[holdID] {
			if e.token != 0 {
				all = append(all, len(grants))
				grants = append(grants, backend.Grant{
					Name: e.name, RequestID: e.requestID, HoldID: holdID, Token: e.token, Incarnation: e.token.String(),
				})
			}
		}
	}
	clear(own.suspects)
	return grants, all
}

// suspect makes holds suspects again.
func (own *session) suspect(grants []backend.Grant) {
	own.mu.Lock()
	defer own.mu.Unlock()
	for _, g := range grants {
		own.suspects[g.HoldID] = true
		own.alarm.Notify()
	}
}

// suspectAll makes all holds suspects: notifications may be lost.
func (own *session) suspectAll() {
	own.mu.Lock()
	defer own.mu.Unlock()
	for id := range own.entries {
		own.suspects[id] = true
		own.alarm.Notify()
	}
}
