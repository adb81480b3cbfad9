package postgres

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
)

// waiter is an acquire that waits for its turn. Nothing of it runs: a notification names its hold id, and one loop of
// the driver's looks at all waiters once a second.
type waiter struct {
	d       *Driver
	r       *backend.Request
	session *session      // protected by Driver.mu
	turn    chan struct{} // asks for a look at this one
}

// errGone: the request has neither a hold nor a place any more.
var errGone = errors.New("the place in the queue is gone")

// waitFor enters a waiter, before its request is sent: the notification may be faster than the answer.
func (d *Driver) waitFor(r *backend.Request) *waiter {
	w := &waiter{d: d, r: r, turn: make(chan struct{}, 1)}
	d.mu.Lock()
	defer d.mu.Unlock()
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

func (w *waiter) stop() {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	delete(w.d.waiters[w.r.HoldID], w)
	if len(w.d.waiters[w.r.HoldID]) == 0 {
		delete(w.d.waiters, w.r.HoldID)
	}
}

func (w *waiter) place(s *session) {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	w.session = s
}

// waitersOf returns who waits on s. The caller holds d.mu.
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

// look makes the waiter ask how it stands.
func (w *waiter) look() {
	select {
	case w.turn <- struct{}{}:
	default:
	}
}

// wait returns the answer to a request that was granted, or an error: errGone if it has no place any more, the
// context's own error, or ErrClosed.
func (w *waiter) wait(ctx context.Context) (answer, error) {
	for {
		select {
		case <-w.turn:
		case <-ctx.Done():
			return answer{}, ctx.Err()
		case <-w.d.gate.Closing().Done():
			return answer{}, backend.ErrClosed
		}
		states, err := w.d.poll(ctx, []*waiter{w})
		if errors.Is(err, backend.ErrHistoryLost) {
			return answer{}, err
		}
		if err != nil || len(states) == 0 {
			continue // the loop looks again
		}
		switch st := states[0]; {
		case st.state == "gone", st.state == "granted" && st.session != w.session.id:
			return answer{}, errGone
		case st.state == "granted":
			return answer{state: "granted", token: st.token, minLeft: st.minLeft, here: st.here}, nil
		}
	}
}

// standing is how it stands with one that waits.
type standing struct {
	i, token, minLeft, head, here int64
	state, session                string
	due                           bool
}

// poll asks how it stands with ws, in one statement, and settles the names where something is due.
func (d *Driver) poll(ctx context.Context, ws []*waiter) ([]standing, error) {
	names, ids := make([]string, len(ws)), make([]string, len(ws))
	for i, w := range ws {
		names[i], ids[i] = w.r.Name, w.r.RequestID
	}
	states := make([]standing, 0, len(ws))
	before := d.position()
	err := d.query(ctx, func(rows pgx.Rows) error {
		var st standing
		err := rows.Scan(&st.i, &st.state, &st.session, &st.token, &st.minLeft, &st.due, &st.head, &st.here)
		states = append(states, st)
		return err
	}, d.sql.poll, names, ids)
	if err != nil {
		return nil, err
	}
	var due []string
	for _, st := range states {
		if err := d.saw(before, st.here); err != nil {
			return nil, err
		}
		if st.due {
			due = append(due, names[st.i-1])
		}
	}
	if len(due) > 0 {
		err = d.exec(ctx, d.sql.settle, due)
	}
	return states, err
}

// pollAll looks at all who wait, for names whose holder died and for those whom no notification reached: about once a
// second, and while none reaches this client, up to twenty times a second while the queues move. It ends when nobody
// waits.
func (d *Driver) pollAll(ctx context.Context) {
	pause, seen := pollEvery, map[key]int64{}
	for {
		select {
		case <-d.polls:
		case <-time.After(pause/2 + rand.N(pause/2)):
		case <-ctx.Done():
		case <-d.gate.Closing().Done():
		}
		d.mu.Lock()
		if len(d.waiters) == 0 || d.gate.Closed() {
			d.polling = false
			d.mu.Unlock()
			return
		}
		all := make([]*waiter, 0, len(d.waiters))
		for _, ws := range d.waiters {
			for w := range ws {
				if w.session != nil {
					all = append(all, w)
				}
			}
		}
		d.mu.Unlock()
		pause = min(pause*3/2, pollEvery)
		var states []standing
		if len(all) > 0 {
			var err error
			if states, err = d.poll(ctx, all); err != nil {
				continue
			}
		}
		heads := make(map[key]int64, len(states))
		for _, st := range states {
			w := all[st.i-1]
			k := key{w.r.Name, w.r.RequestID}
			heads[k] = st.head
			if head, ok := seen[k]; !d.hears.Load() && (!ok || head != st.head) {
				pause = pollFast
			}
			if st.state != "waiting" {
				w.look()
			}
		}
		seen = heads
	}
}

// lookAtAll makes the loop look now.
func (d *Driver) lookAtAll() {
	select {
	case d.polls <- struct{}{}:
	default:
	}
}

const (
	pollEvery = time.Second
	pollFast  = 50 * time.Millisecond
)
