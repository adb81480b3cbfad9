package redis

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/internal/redisscript"
)

const maxOffers = 10000 // that are looked after; who waits behind one more finds out by a look

// follow looks after an offer that this driver's release has made: if it is not accepted, the next in line gets it.
// Those who wait would find out by themselves, with their next look.
func (w *waiting) follow(d *Driver, keys redisscript.Keys) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.shut || w.offers[keys.Lock] != nil || len(w.offers) >= maxOffers {
		return
	}
	w.offers[keys.Lock] = time.AfterFunc(redisscript.SettleIn(redisscript.OfferTime), func() { d.settleOffer(keys) })
}

// settleOffer has the server take back an offer that has run out, and goes on as long as the next one stands.
func (d *Driver) settleOffer(keys redisscript.Keys) {
	if d.gate.Enter() != nil {
		return
	}
	defer d.gate.Leave()
	ctx, cancel := context.WithTimeout(d.gate.Work(), lookTime)
	defer cancel()
	answer, _, err := d.batch.do(ctx, newStep(redisscript.Settle, keys))
	again := time.Duration(-1)
	if ms, ok := answer.(int64); ok {
		again = time.Duration(ms) * time.Millisecond
	}
	w := &d.waiting
	w.mu.Lock()
	defer w.mu.Unlock()
	switch t := w.offers[keys.Lock]; {
	case t == nil || w.shut:
	case err != nil:
		t.Reset(redisscript.Jitter(lookAgain))
	case again >= 0 && again <= redisscript.OfferTime: // an offer, or a hold that is about to end
		t.Reset(redisscript.SettleIn(again))
	default:
		delete(w.offers, keys.Lock)
	}
}
