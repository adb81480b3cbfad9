package redisscript

// This file is the pace at which both drivers look after their waiters. It is here, beside the script, because the
// offers that the script makes and the times at which clients settle them belong together: an offer of one second is
// worthless if all clients settle after three.

import (
	mathrand "math/rand/v2"
	"time"
)

// How often a client looks after its waiters of one name. A push makes all of this unnecessary as long as no push is lost
// and no holder dies, so it may be slow.
const (
	firstLook   = 200 * time.Millisecond // after the first place of a name: perhaps all earlier waiters are gone
	lookEvery   = 3 * time.Second
	lookPerSpot = 5 * time.Millisecond // more, for every place in the queue
	lookAtMost  = 8 * time.Second
	settleFirst = 5 * time.Millisecond   // after a hold should have run out, at the earliest
	settleLast  = 100 * time.Millisecond // and at the latest
)

// FirstLook returns the time from the first place in a queue to a look.
func FirstLook() time.Duration { return Jitter(firstLook) }

// NextLook returns the time from a look that found so many places in the queue to the next look.
func NextLook(places int) time.Duration {
	return Jitter(min(lookEvery+time.Duration(places)*lookPerSpot, lookAtMost))
}

// SettleIn is when to settle a hold that ends in d unless it is renewed: soon afterwards, at a time of this client's
// own, so that of many clients one is first and the others find it done.
func SettleIn(d time.Duration) time.Duration {
	return d + settleFirst + mathrand.N(settleLast-settleFirst)
}

// Jitter returns d give or take a fifth.
func Jitter(d time.Duration) time.Duration { return d - d/5 + mathrand.N(2*d/5+1) }
