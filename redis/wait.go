package redis

// This file is one Acquire that waits. A round of it asks for a place in the name's queue and waits for one of four
// things: the push that offers the lock, a look that finds the place gone or turned into the hold, the end of the
// context, or Close. Without a confirmed subscription a round is a try and a pause.
//
// The waiter's goroutine only waits for waiter.event: the pushes and looks of waiting.go end the wait through it.

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// Polling: the first pause, and the longest. 50 ms keeps the next user of a short section close behind it; a server
// bears one poll a second from many long waiters.
const (
	pollFirst = 50 * time.Millisecond
	pollMost  = time.Second
)

// wait acquires, however long that takes. Each round asks for a place in the queue, and waits until the place has
// become the hold, or has gone: a client that could not be notified of its turn, or was not seen for long, loses its
// place.
//
// Without a subscription a round is a try that takes no place, and a pause: a free lock must not depend on more than
// the server's answer, and some servers, proxies and users have no subscriptions at all. Subscribing before the first
// try would cost more: an Acquire of a free name took 2.00 s at a server that took no more connections, against
// 0.36 ms for a TryAcquire.
//
// Faults are retried with growing pauses as long as the context lasts; their possible leftovers are removed in the end.
func (a *attempt) wait(ctx context.Context) (backend.Grant, error) {
	for faults, polls := 0, 0; ; {
		var g backend.Grant
		var err error
		if a.d.push.stands() {
			h := a.hold()
			w := a.d.waiting.add(a.keys, h) // before the request leaves: the push may overtake the answer
			g, err = a.round(ctx, h, w)
			a.d.waiting.remove(w)
		} else if g, err = a.once(ctx); errors.Is(err, backend.ErrHeld) {
			err = a.poll(ctx, polls, err)
			polls++
		}
		if err == nil {
			return g, nil
		}
		// The server was heard from, so earlier faults are no reason to pause.
		if errors.Is(err, errGone) {
			faults = 0
			a.again = true
			continue
		}
		if errors.Is(err, errPoll) {
			faults = 0
			continue
		}
		var f *redisconn.Failure
		if !errors.As(err, &f) || f.Fatal {
			return backend.Grant{}, a.d.giveUp(a.leftovers, err)
		}
		faults++
		if !redisconn.Pause(ctx, faults) {
			return backend.Grant{}, a.d.giveUp(a.leftovers, err)
		}
		// Close ends a waiter between two rounds too. Its leftovers are removed before Close returns, as far as
		// Close's context allows.
		if a.d.gate.Closed() {
			return backend.Grant{}, a.d.giveUp(a.leftovers, backend.ErrClosed)
		}
	}
}

// errPoll says that the lock is held and that the next poll is due.
var errPoll = errors.New("held")

// poll pauses until the next try. The pause doubles from 50 ms to about a second, with a fifth of jitter so that
// waiters who came together part. It is cut short to just behind the remaining time of the present hold, and ends when
// the subscription stands, since the next round can then take a place.
func (a *attempt) poll(ctx context.Context, n int, held error) error {
	// The first poll starts the subscription, so that a driver with names that are always free never makes one.
	up := a.d.push.start(a.d)
	d := redisscript.Jitter(min(pollFirst<<min(n, 5), pollMost*5/6)) // give or take a fifth
	var h *backend.HeldError
	if errors.As(held, &h) && h.RetryAfter > 0 {
		d = min(d, h.RetryAfter+redisscript.Jitter(pollFirst/10))
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-up:
	case <-ctx.Done():
		return ctx.Err()
	case <-a.d.gate.Closing().Done():
		return backend.ErrClosed
	}
	return errPoll
}

// errGone says that the place in the queue, or the hold that came of it, no longer exists. The next round repeats the
// request, as one that may have been there.
var errGone = errors.New("the place in the queue is gone")

// round is one try that takes a place. The waiter w was made known before the request left, as the push may overtake
// the answer. When the context or the driver ends, the place is removed in the background: a place that stays would be
// offered the lock and keep it closed for a second.
func (a *attempt) round(ctx context.Context, h redisscript.Hold, w *waiter) (backend.Grant, error) {
	g, won, answer, err := a.try(ctx, h, true)
	if won || err != nil {
		return g, err
	}
	if answer != int64(0) {
		return g, &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
	}
	a.d.waiting.queued(a.d, w)
	select {
	case e := <-w.event:
		if e.gone {
			return backend.Grant{}, errGone
		}
		// A look has found that the place is the hold already, and renewed it.
		if !e.at.IsZero() {
			return a.grant(h, e.at), nil
		}
		return a.accept(ctx, h)
	case <-ctx.Done():
		a.d.tidy([]leftover{{keys: a.keys, hold: h}})
		return backend.Grant{}, ctx.Err()
	case <-a.d.gate.Closing().Done():
		a.d.tidy([]leftover{{keys: a.keys, hold: h}})
		return backend.Grant{}, backend.ErrClosed
	}
}

// accept answers an offer, by which the hold gets its whole TTL. Validity counts from this exchange, not from the push:
// how long that was under way nobody knows. An answer that the hold is gone means that the offer had ended, which sends
// the waiter to the end of the queue.
func (a *attempt) accept(ctx context.Context, h redisscript.Hold) (backend.Grant, error) {
	code := codesOf(a.r.Kind).accept
	for n := 1; ; n++ {
		answer, sentAt, err := a.d.lines.Do(ctx, lines.NewStep(code, a.keys, h.Start(), redisscript.Millis(h.PX)))
		if err == nil {
			if answer == int64(1) {
				return a.grant(h, sentAt), nil
			}
			return backend.Grant{}, errGone
		}
		f := redisconn.FailureOf(err)
		if f.Fatal || a.d.gate.Closed() || !redisconn.Pause(ctx, n) {
			a.d.tidy([]leftover{{keys: a.keys, hold: h}})
			return backend.Grant{}, err
		}
	}
}
