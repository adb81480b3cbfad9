package redlock

// This file listens to the servers: one subscription for each node, on which its script tells that it offers its vote,
// that a name stays closed there, or that it wants a sign of life. Messages can be lost and may be stale, so they only
// make a waiter look or accept; no vote counts by a push.

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const (
	// pushWait bounds the wait for subscriptions, before waiters go ahead with the confirmed ones.
	pushWait = 2 * time.Second
	// pushRest bounds the wait for the minority's, once a majority's are confirmed.
	pushRest = 50 * time.Millisecond
)

// push is the subscription of one node. It is made for the driver's first waiter and stays until Close.
type push struct {
	subscription redisconn.Subscription
	// Confirmed, so that a place in this node's queue gets a push for its turn.
	up atomic.Bool
	// The last attempt to subscribe has failed.
	failed atomic.Bool
	// Done when the subscription is up for the first time.
	first sync.Once
}

// listen starts the subscriptions, and returns when a majority, or after a short wait all of them, are
// confirmed: a release that finds nobody listening passes a waiter by. Only the first waits of a driver wait for that,
// pushWait at most: waiters that begin with different leaders split votes, and later on the subscriptions stand or
// their servers are ill.
//
// It returns an error only when ctx ends.
func (d *Driver) listen(ctx context.Context) error {
	d.subscribe()
	began := time.Now()
	select {
	case <-d.listened:
	case <-d.gate.Closing().Done(): // the wait will see it
	case <-ctx.Done():
		return &redisconn.Failure{Cause: ctx.Err(), Fatal: d.listening(began)}
	}
	return nil
}

// listening reports whether a majority may still have time to confirm: a context that ends by then is no evidence about
// the servers, so the call's error is the context's alone and not that the service is unavailable.
func (d *Driver) listening(began time.Time) bool {
	failed := 0
	for _, n := range d.nodes {
		if n.push.failed.Load() {
			failed++
		}
	}
	return failed <= len(d.nodes)-d.quorum && time.Since(began) < redisconn.Soon
}

// subscribeAll begins to listen to all nodes. After a loss redisconn subscribes anew, at its own pace; after each
// confirmation all waiters look, as pushes may have been lost in between. The first waiters go ahead with all
// subscriptions, pushRest after a majority's, or after pushWait: a server that is down must not cost them more. The
// timers may fire after Close, and close a channel that nobody reads.
func (d *Driver) subscribeAll() {
	for _, n := range d.nodes {
		p := &n.push
		p.subscription.Start(n.client, redisscript.Channel(d.o.KeyPrefix, d.identity), redisconn.Listener{
			Confirmed: func() {
				p.up.Store(true)
				p.failed.Store(false)
				p.first.Do(d.confirmed)
				d.waiters.tell("", event{node: n.index}) // pushes may have been lost
			},
			Message: n.heard,
			Lost: func(error) bool {
				p.up.Store(false)
				p.failed.Store(true)
				return false // for any reason: the server may come back, or become fit
			},
		})
	}
	time.AfterFunc(pushWait, d.goAhead)
}

// confirmed counts a subscription that stands for the first time.
func (d *Driver) confirmed() {
	switch int(d.standing.Add(1)) {
	case d.quorum:
		time.AfterFunc(pushRest, d.goAhead)
	case len(d.nodes):
		d.goAhead()
	}
}

// heard acts on one message, on the goroutine that reads the subscription. It never waits: waiters are notified without
// blocking, and a useless vote is declined by the line, without reading the answer.
func (n *node) heard(text string) {
	m, ok := redisscript.ParsePush(text)
	switch {
	case !ok:
	case m.Kind == redisscript.PushClosed:
		n.d.waiters.tell(m.Lock, event{node: n.index, closed: m.For})
	case m.Kind == redisscript.PushAsked:
		n.d.waiters.tell(m.Lock, event{node: n.index}) // a look tells the node that they live
	case !n.d.waiters.offered(n.index, m.Nonce):
		// The vote is useless to all until it is declined.
		s := n.stepFor(make(chan *step, 1), redisscript.KeysOfLock(m.Lock), redisscript.Decline, n.d.identity, m.Nonce)
		s.Deadline = time.Now().Add(time.Second)
		n.submit(s)
	}
}
