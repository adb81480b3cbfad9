// This file waits for the turn of a request. The place in the queue is a row of the table waits; this file only
// decides how a waiter notices its turn. There are three ways:
//
//   - a release in this client or another one grants to the head of the queue in its own transaction, and then
//     notifies it (push.go): one round trip after the release;
//   - the holder dies: its session expires without a notification. The next poll of any waiter of the name finds that
//     and settles the name, which grants to the head;
//   - the notification is lost, or cannot arrive: the poll finds the grant.
//
// One loop of the driver polls for all waiters of the client, about once a second. That is one statement a second for
// any number of waiters.
//
// This file never grants. A woken waiter asks for the state of its request, and finds a hold or not.

package postgres

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/notify"
)

// waiter is an acquire that waits for its turn, in its caller's goroutine. turn has room for one wake-up, since a
// second look would find the same.
type waiter struct {
	d       *Driver
	r       *backend.Request
	leave   func()        // ends the call's interest in the request, see calling
	session *session      // protected by Driver.mu
	turn    notify.Signal // asks for a look at this waiter
}

// errGone: the request no longer has a hold or a place. It is repeated.
var errGone = errors.New("the place in the queue is gone")

// waitFor enters a waiter, before its request is sent: the notification may be faster than the answer. It starts the
// loops that look and listen, unless they run. stop follows.
func (d *Driver) waitFor(r *backend.Request) *waiter {
	w := &waiter{d: d, r: r, turn: notify.New()}
	d.mu.Lock()
	defer d.mu.Unlock()
	// Several waiters may have one hold id: it identifies the holder for people and is not the key of the request.
	if d.waiters[r.HoldID] == nil {
		d.waiters[r.HoldID] = map[*waiter]struct{}{}
	}
	d.waiters[r.HoldID][w] = struct{}{}
	if !d.polling {
		d.polling = d.gate.Go(d.pollAll)
	}
	d.listen()
	return w
}

// stop removes a waiter. The polling loop ends when it finds no waiter; the listening loop continues until
// Close, since the next waiter or holder will need it.
func (w *waiter) stop() {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	delete(w.d.waiters[w.r.HoldID], w)
	if len(w.d.waiters[w.r.HoldID]) == 0 {
		delete(w.d.waiters, w.r.HoldID)
	}
}

// place notes the session of the waiter's request.
func (w *waiter) place(s *session) {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	w.session = s
}

// waitersOf returns the waiters on s. The caller holds d.mu.
func (d *Driver) waitersOf(s *session) (all []*waiter) {
	for _, ws := range d.waiters {
		for w := range ws {
			if w.session == s {
				all = append(all, w)
			}
		}
	}
	return all
}

// look makes the waiter ask for the state of its request. It does not block, and may be called with d.mu held.
func (w *waiter) look() {
	w.turn.Notify()
}

// wait returns the answer to a request that was granted, or an error: errGone if it no longer has a place, the
// context's own error, or ErrClosed. A grant on a session other than the waiter's belongs to a call that moved it; a
// repetition finds it.
func (w *waiter) wait(ctx context.Context) (answer, error) {
	for {
		select {
		case <-w.turn:
		case <-ctx.Done():
			return answer{}, ctx.Err()
		case <-w.d.gate.Closing().Done():
			return answer{}, backend.ErrClosed
		}
		// A wake-up is no proof, so ask the database.
		states, err := w.d.poll(ctx, []*waiter{w})
		if errors.Is(err, backend.ErrHistoryLost) {
			return answer{}, err
		}
		if err != nil || len(states) == 0 {
			continue // the next look decides
		}
		switch st := states[0]; {
		case st.state == "gone", st.state == "granted" && st.session != w.session.id:
			// The session ended, or another call moved the grant.
			return answer{}, errGone
		case st.state == "granted":
			return answer{state: "granted", token: st.token, minLeft: st.minLeft, here: st.here, nonce: st.nonce}, nil
		}
	}
}

// standing is the state of one waiter: i is its place in the request, from 1; ahead is the number of waiters before
// it, 20 at most; due is true if settling the name would have an effect.
type standing struct {
	i, token, minLeft, ahead, here, clock int64
	state, session, nonce                 string
	due                                   bool
}

// poll asks for the state of ws, in one statement that only reads, and settles the names that are due. So a queue with
// a dead holder moves on when any of its waiters looks.
func (d *Driver) poll(ctx context.Context, ws []*waiter) ([]standing, error) {
	names, ids := make([]string, len(ws)), make([]string, len(ws))
	for i, w := range ws {
		names[i], ids[i] = w.r.Name, w.r.RequestID
	}
	// One row for each waiter, in any order: i is its place in ws, from 1.
	states := make([]standing, 0, len(ws))
	before, sent := d.position(), d.clock.Now()
	err := d.query(ctx, func(rows pgx.Rows) error {
		var st standing
		err := rows.Scan(&st.i, &st.state, &st.session, &st.token, &st.minLeft, &st.due, &st.ahead, &st.here,
			&st.nonce, &st.clock)
		states = append(states, st)
		return err
	}, d.sql.poll, names, ids)
	if err != nil {
		return nil, err
	}
	// Names with an expired holder, or a place that can be granted, without a notification.
	var due []string
	for _, st := range states {
		d.clockWas(sent, st.clock)
		if err := d.saw(before, st.here); err != nil {
			return nil, err
		}
		if st.due {
			due = append(due, names[st.i-1])
		}
	}
	// settle writes, and is therefore sent only for names that are due.
	if len(due) > 0 {
		err = d.exec(ctx, d.sql.settle, due, d.clockKnown())
	}
	return states, err
}

// pollAll looks at all waiters: about once a second, and, while notifications do not reach this client, more often
// while the queues move: for the first in line up to forty times a second, and with n ahead an n-th as often, so that
// a long queue costs the server hardly more than a short one. It ends with Close, or without waiters, which it decides
// under d.mu, so that the next waiter starts another loop.
func (d *Driver) pollAll(ctx context.Context) {
	// seen is the number ahead of each waiter at the last look, to detect a moving queue.
	pause, seen := pollEvery, map[key]int64{}
	for {
		select {
		case <-d.polls:
		case <-time.After(pause/2 + rand.N(pause/2)):
		case <-ctx.Done():
		case <-d.gate.Closing().Done():
		}
		d.mu.Lock()
		// The end is decided and noted under one lock: a later waiter sees that no loop runs, and starts one.
		if len(d.waiters) == 0 || d.gate.Closed() {
			d.polling = false
			d.mu.Unlock()
			return
		}
		all := make([]*waiter, 0, len(d.waiters))
		for _, ws := range d.waiters {
			for w := range ws {
				// The requests of other waiters have not been sent yet.
				if w.session != nil {
					all = append(all, w)
				}
			}
		}
		d.mu.Unlock()
		// The pause grows unless a queue has moved; with notifications it stays at a second.
		pause = min(pause*3/2, pollEvery)
		var states []standing
		if len(all) > 0 {
			var err error
			if states, err = d.poll(ctx, all); err != nil {
				continue
			}
		}
		// A new map each time drops names without waiters.
		ahead := make(map[key]int64, len(states))
		for _, st := range states {
			w := all[st.i-1]
			k := key{w.r.Name, w.r.RequestID}
			ahead[k] = st.ahead
			if before, ok := seen[k]; !d.hears.Load() && (!ok || before != st.ahead) {
				pause = min(pause, pollFast*time.Duration(max(1, st.ahead)))
			}
			// The request was granted or has ended: the waiter asks itself, and returns that answer.
			if st.state != "waiting" {
				w.look()
			}
		}
		seen = ahead
	}
}

// lookAtAll makes the loop look now. It does not block.
func (d *Driver) lookAtAll() {
	d.polls.Notify()
}

const (
	// pollEvery is Description.Polling behind a pooler; pollFast is the shortest pause there, for the first in line. Each
	// pause is drawn between half of it and all of it.
	pollEvery = time.Second
	pollFast  = 50 * time.Millisecond
)
