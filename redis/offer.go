package redis

// This file monitors offers. A release hands the lock to the first waiter as an offer of one second. If that waiter is
// dead, only the next look of a waiter behind it would end the offer. So the driver that made the offer
// settles it when it has run out, and the following offers, until a waiter accepts.
//
// Each offered name has one timer, in waiting.offers under waiting.mu. A timer ends when the offer was
// accepted or the queue is empty, and all of them end with Close.

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// maxOffers bounds the offers that are monitored at a time. The waiters behind a further offer rely on their own
// client's looks.
const maxOffers = 10000

// follow monitors an offer that this driver has made for keys. If the name has a timer already, that timer sees the new
// offer too. It sets a timer and returns. Waiting for the answer of the offered client would cost every contended
// release a second, and the releaser is not the one who waits.
func (w *waiting) follow(d *Driver, keys redisscript.Keys) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// Beyond the bound the next look of somebody who waits does the same, later.
	if w.shut || w.offers[keys.Lock] != nil || len(w.offers) >= maxOffers {
		return
	}
	// One timer a name: it settles successive offers in turn.
	w.offers[keys.Lock] = time.AfterFunc(redisscript.SettleIn(redisscript.OfferTime), func() { d.settleOffer(keys) })
}

// settleOffer has the server take back an offer that has run out, and goes on as long as the next one stands. The
// server answers with the time that the present hold has left: more than an offer's second says that it was accepted.
// It runs on its timer's goroutine and counts as a call at the gate.
func (d *Driver) settleOffer(keys redisscript.Keys) {
	if d.gate.Enter() != nil {
		return
	}
	defer d.gate.Leave()
	ctx, cancel := context.WithTimeout(d.gate.Work(), lookTime)
	defer cancel()
	answer, _, err := d.lines.Do(ctx, lines.NewStep(redisscript.Settle, keys))
	again := time.Duration(-1)
	if ms, ok := answer.(int64); ok {
		again = time.Duration(ms) * time.Millisecond
	}
	w := &d.waiting
	w.mu.Lock()
	defer w.mu.Unlock()
	switch t := w.offers[keys.Lock]; {
	case t == nil || w.shut:
	// The server did not answer: the offer may stand or not, so the timer is set again.
	case err != nil:
		t.Reset(redisscript.Jitter(lookAgain))
	case again >= 0 && again <= redisscript.OfferTime: // an offer, or a hold about to end
		t.Reset(redisscript.SettleIn(again))
	default:
		delete(w.offers, keys.Lock)
	}
}
