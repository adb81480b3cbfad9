package engine

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// waiter registers an attempt for pushes of the service: that its turn may have come, and that its hold is gone.
type waiter struct {
	d      *Driver
	first  *backend.Request
	key    string        // by which the service knows it
	woken  chan struct{} // has room for one wake; nil without Wait
	memory chan struct{} // of woken, for the next attempt

	began  backend.Instant // earlier messages belong to another attempt
	handed string          // Push.Handed of the last PushTurn; Driver.mu protects it

	// With Watches: the context of the watches, the watched key, and the number of waits that ended by time.
	watching context.Context
	unwatch  context.CancelFunc
	behind   string
	place    string
	timeouts int
	failed   bool // a watch has failed; Driver.mu protects it

	polls int // waits without a place in the queue, in a row
}

// enter registers an attempt until leave.
func (w *waiter) enter(d *Driver, first *backend.Request) {
	w.d, w.first, w.began = d, first, d.clock.Now()
	_, pushes := d.service.(Pushes)
	if _, watches := d.service.(Watches); (pushes || watches) && w.first.Wait {
		if w.memory == nil {
			w.memory = make(chan struct{}, 1)
		}
		w.key, w.woken = d.key(w.first.RequestID), w.memory
		d.mu.Lock()
		defer d.mu.Unlock()
		d.waiters[w.key] = w
	}
}

// leave ends the notifications for its turn.
func (w *waiter) leave() {
	if w.woken == nil {
		return
	}
	w.stopWatching()
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	if w.d.waiters[w.key] == w {
		delete(w.d.waiters, w.key)
	}
	w.forgetWake() // of this attempt: the next one has the same channel
}

// forgetWake drops a pending wake.
func (w *waiter) forgetWake() {
	select {
	case <-w.woken:
	default:
	}
}

// wait returns when the attempt has to repeat Enter: when it is woken, and after a while. It repeats within a third
// of the TTL, since Enter is a waiter's sign of life, and within Description.Polling. The error is the reason for the
// end of the attempt.
//
// A waiter on a session sends no sign of life: it repeats when the watched key has changed, and now and then in case
// a watch is lost. Its own place is watched after the first repetition by time, since a name that changes hands quickly
// would pay for a watch that it never needs.
//
// With Checks it repeats when it is woken: see check.go. Without a place in the queue it repeats more often, and when
// its holder's time is over.
func (w *waiter) wait(ctx context.Context, a *attempt, pos Position) error {
	s := a.s
	if _, ok := w.d.service.(Checks); ok && pos.Placed && !pos.Poll {
		w.polls = 0
		w.d.enqueue(w, Entering{Request: *w.first, Attempt: a.name, Again: true, Place: pos.Place})
		defer w.d.dequeue(w, w.first.Name)
		return w.sleepOn(ctx, s, w.first.TTL+time.Hour)
	}
	pause := lookInterval
	if pos.Poll {
		pause = min(pause, firstPoll<<min(w.polls, 8))
		if h := pos.Holder; h != nil && h.RetryAfter > 0 {
			pause = min(pause, h.RetryAfter+firstPoll/5)
		}
		w.polls++
	}
	if s == nil {
		pause = min(pause, w.first.TTL/3)
	}
	if polling := w.d.Describe().Polling; polling > 0 {
		pause = min(pause, polling*4/5) // the longest is a quarter more
	}
	if watches, ok := w.d.service.(Watches); ok && pos.Behind != "" {
		w.d.mu.Lock()
		failed := w.failed
		w.failed = false
		w.d.mu.Unlock()
		switch {
		case w.behind != pos.Behind || failed:
			w.stopWatching()
			w.watching, w.unwatch = context.WithCancel(ctx)
			w.behind, w.timeouts = pos.Behind, 0
			w.watch(watches, pos.Behind)
		case w.timeouts > 0 && pos.Place != "" && pos.Place != w.place:
			w.place = pos.Place
			w.watch(watches, pos.Place)
		case w.timeouts > 0:
			pause = watchedInterval
		}
	}
	return w.sleepOn(ctx, s, pause*3/4+time.Duration(w.d.chance()*float64(pause/2)))
}

// pause is the time between the beginnings of two tries, of which the first one took some already.
func (w *waiter) pause(ctx context.Context, took time.Duration) error {
	return w.sleep(ctx, w.d.retryPause(w.first.TTL)-took)
}

func (d *Driver) retryPause(ttl time.Duration) time.Duration {
	return kit.RetryPauseAt(ttl, d.chance())
}

func (w *waiter) sleep(ctx context.Context, d time.Duration) error { return w.sleepOn(ctx, nil, d) }

// sleepOn is sleep, and also ends when the attempt has to move to another session. The next Enter answers every wake
// that came before it: a pending wake would cost one more.
func (w *waiter) sleepOn(ctx context.Context, s *session, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	var over, outgrown <-chan struct{}
	if s != nil {
		over, outgrown = s.Over(), s.outgrown
	}
	select {
	case <-w.woken:
	case <-timer.C:
		w.timeouts++
		w.forgetWake()
	case <-over:
		w.forgetWake()
	case <-outgrown:
		w.forgetWake()
	case <-ctx.Done():
		return w.d.ended(ctx)
	case <-w.d.gate.Closing().Done():
		return backend.ErrClosed
	}
	return nil
}

// key returns the name of a request in notifications.
func (d *Driver) key(requestID string) string {
	if keys, ok := d.service.(Keys); ok {
		return keys.Key(requestID)
	}
	return requestID
}

// notify receives a push of the service.
func (d *Driver) notify(p Push) {
	of := backend.Grant{RequestID: p.RequestID, Incarnation: p.Incarnation}
	if p.What == PushLost && p.Incarnation != "" && d.sessions.holdsAnother(of) {
		return
	}
	if p.What == PushLost {
		d.sessions.lose(of, p.Loss)
	}
	d.mu.Lock()
	var lost func(backend.Loss)
	switch p.What {
	case PushTurn:
		if w := d.waiters[p.RequestID]; w != nil {
			w.handed = p.Handed
			wake(w.woken)
		}
	case PushTurns:
		if q := d.queues[p.Name]; q != nil {
			d.checkSoon(q, p.After)
			break
		}
		for _, w := range d.waiters {
			if w.first.Name == p.Name && p.After == 0 {
				wake(w.woken)
			}
		}
	case PushGap:
		checked := map[*waiter]bool{}
		for _, q := range d.queues {
			for w := range q.waiters {
				checked[w] = true
			}
			d.checkSoon(q, 0)
		}
		for _, w := range d.waiters {
			if !checked[w] {
				wake(w.woken)
			}
		}
	case PushLost:
		if l := d.losses[p.RequestID]; l != nil && !d.gate.Closed() {
			lost = l.lost
			delete(d.losses, p.RequestID)
		}
	}
	d.mu.Unlock()
	if lost != nil {
		lost(p.Loss)
	}
}

// wake does not block: a pending wake stands for later ones.
func wake(woken chan struct{}) {
	select { // a nil channel is never ready
	case woken <- struct{}{}:
	default:
	}
}

// loss is Request.Lost of one attempt.
type loss struct {
	lost   func(backend.Loss)
	before *loss // of an earlier attempt with the same request id, which may hold
}

// listen registers the attempt for losses. A loss may come before the grant. cancel ends that, for an attempt without
// a hold.
func (d *Driver) listen(rs []backend.Request) (cancel func()) {
	if _, ok := d.service.(Pushes); !ok && d.sessions == nil || rs[0].Lost == nil {
		return func() {}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	own := make([]*loss, len(rs))
	for i := range rs {
		own[i] = &loss{rs[i].Lost, d.losses[rs[i].RequestID]}
		d.losses[rs[i].RequestID] = own[i]
	}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		for i := range rs {
			switch id := rs[i].RequestID; {
			case d.losses[id] != own[i]:
			case own[i].before != nil:
				d.losses[id] = own[i].before
			default:
				delete(d.losses, id)
			}
		}
	}
}

// forget removes a lost hold from the engine's memory. One that an Enter may bring back stays in doubt.
func (d *Driver) forget(g backend.Grant) {
	if !d.sessions.doubtLate(g) {
		d.sessions.drop(g, false)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.losses, g.RequestID)
}

// watch wakes the waiter when the watched key has changed, until unwatch. A watch that fails wakes it too, after a
// pause, so that it looks, and watches again if it still has to wait.
func (w *waiter) watch(watches Watches, what string) {
	ctx, unwatch := w.watching, w.unwatch
	w.d.gate.Go(func(context.Context) {
		defer context.AfterFunc(w.d.gate.Closing(), unwatch)()
		err := watches.Watch(ctx, what, func() { wake(w.woken) })
		if ctx.Err() == nil && err != nil && kit.Sleep(ctx, w.d.retryPause(w.first.TTL)) == nil {
			w.d.mu.Lock()
			w.failed = true
			w.d.mu.Unlock()
			wake(w.woken)
		}
	})
}

func (w *waiter) stopWatching() {
	if w.unwatch != nil {
		w.unwatch()
	}
	w.behind, w.place = "", ""
}
