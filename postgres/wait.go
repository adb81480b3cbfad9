package postgres

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend/engine"
)

// A waiter's place is a row of the table waits. A release grants to the head of the queue in its own transaction, and
// notifies it. If the holder dies, its session expires without a notification: the next check of any waiter of the name
// finds that and settles the name, which grants to the head. So it is with a notification that is lost.

// standing is the state of one waiter: i is its place in the request, from 1; ahead is the number of waiters before
// it, 20 at most; due is true if settling the name would have an effect.
type standing struct {
	i, token, minLeft, ahead, here, clock int64
	state, session, nonce                 string
	due                                   bool
}

// poll asks for the state of waiters, in one statement that only reads, and settles the names that are due.
func (s *service) poll(ctx context.Context, all []engine.Entering) ([]standing, error) {
	names, ids := make([]string, len(all)), make([]string, len(all))
	for i, r := range all {
		names[i], ids[i] = r.Name, r.RequestID
	}
	states := make([]standing, 0, len(all)) // in any order
	before, sent := s.position(), s.clock.Now()
	err := s.query(ctx, func(rows pgx.Rows) error {
		var st standing
		err := rows.Scan(&st.i, &st.state, &st.session, &st.token, &st.minLeft, &st.due, &st.ahead, &st.here,
			&st.nonce, &st.clock)
		states = append(states, st)
		return err
	}, s.sql.poll, names, ids)
	if err != nil {
		return nil, err
	}
	var due []string
	for _, st := range states {
		s.clockWas(sent, st.clock)
		if err := s.saw(before, st.here); err != nil {
			return nil, err
		}
		if st.due {
			due = append(due, names[st.i-1])
		}
	}
	if len(due) > 0 {
		err = s.exec(ctx, s.sql.settle, due, s.clockKnown())
	}
	return states, err
}

// Check is engine.Checks's: one statement for all waiters of the client.
func (s *service) Check(ctx context.Context, all []engine.Waiters, _ int) ([]engine.Found, error) {
	type place struct{ queue, waiter int }
	var asked []engine.Entering
	var places []place
	for i, q := range all {
		for n, r := range q.All {
			asked, places = append(asked, r), append(places, place{i, n})
		}
	}
	states, err := s.poll(ctx, asked)
	s.flush(ctx)
	if err != nil {
		return nil, err
	}
	out, ahead := make([]engine.Found, len(all)), map[int]int64{} // of the first waiter, by queue
	for _, st := range states {
		at := places[st.i-1]
		if st.state != "waiting" {
			out[at.queue].Turns = append(out[at.queue].Turns, at.waiter)
		} else if n, seen := ahead[at.queue]; !seen || st.ahead < n {
			ahead[at.queue] = st.ahead
		}
	}
	for i, q := range all {
		out[i].Again = s.nextCheck(q.Name, ahead[i])
	}
	return out, nil
}

// pace is when a queue was found, and the pause after that.
type pace struct {
	ahead int64
	pause time.Duration
}

const (
	// pollEvery is Description.Polling behind a pooler; pollFast is the longest pause there for the first in line. Each
	// pause is drawn between half of it and all of it.
	pollEvery = time.Second
	pollFast  = 50 * time.Millisecond
	// restEvery is the time between two checks where notifications arrive.
	restEvery = 3 * pollEvery / 4
)

// nextCheck returns when to check a queue again. Where notifications arrive, all queues of the client are checked
// together. Elsewhere it is checked more often while it moves: for the first in line up to forty times a second, and
// with n ahead an n-th as often, so that a long queue costs the server hardly more than a short one.
func (s *service) nextCheck(name string, ahead int64) time.Duration {
	if s.hears.Load() {
		rest := restEvery - (time.Duration(s.clock.Now())+s.phase)%restEvery
		if rest < restEvery/3 {
			rest += restEvery
		}
		return rest
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p, seen := s.paces[name]
	if !seen {
		if len(s.paces) > maxPaces {
			clear(s.paces) // of waiters that have left
		}
		p.pause = pollEvery
	}
	p.pause = min(p.pause*3/2, pollEvery)
	if !seen || p.ahead != ahead {
		p.pause = min(p.pause, pollFast*time.Duration(max(1, ahead)))
	}
	p.ahead = ahead
	s.paces[name] = p
	return p.pause/2 + rand.N(p.pause/2)
}

// maxPaces bounds the names in service.paces.
const maxPaces = 10000
