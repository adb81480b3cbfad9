package redlock

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const (
	pushWait = 2 * time.Second       // for subscriptions, before waiters go ahead with those that are there
	pushRest = 50 * time.Millisecond // for the minority's, once a majority's are there
)

// push is the subscription of one node. It is made for the driver's first waiter and stays until Close.
type push struct {
	subscription redisconn.Subscription
	up           atomic.Bool   // confirmed, so that a place in this node's queue is told of its turn
	failed       atomic.Bool   // the last attempt has
	first        chan struct{} // closed when it is up for the first time
	once         sync.Once     // closes first
}

func (p *push) init() { p.first = make(chan struct{}) }

// listen starts the subscriptions, and returns when those of a majority, and with a little patience all of them, are
// confirmed: a release that finds nobody listening passes a waiter by.
func (d *Driver) listen(ctx context.Context) error {
	for _, n := range d.nodes {
		n.push.start(n)
	}
	began := time.Now()
	limit := time.NewTimer(pushWait)
	defer limit.Stop()
	var rest <-chan time.Time
	for {
		up, missing := 0, (*push)(nil)
		for _, n := range d.nodes {
			if n.push.up.Load() {
				up++
			} else if missing == nil || n.sick.Load() {
				missing = &n.push
			}
		}
		if missing == nil || d.listened.Load() {
			return nil
		}
		if up >= d.quorum && rest == nil {
			t := time.NewTimer(pushRest)
			defer t.Stop()
			rest = t.C
		}
		tick := time.NewTimer(5 * time.Millisecond)
		select {
		case <-missing.first:
		case <-tick.C:
		case <-rest:
			d.listened.Store(true)
		case <-limit.C:
			d.listened.Store(true)
		case <-d.gate.Closing().Done():
			d.listened.Store(true) // the wait will see it
		case <-ctx.Done():
			tick.Stop()
			return &redisconn.Failure{Cause: ctx.Err(), Fatal: d.listening(began)}
		}
		tick.Stop()
	}
}

// listening reports whether a majority may still have time to confirm: a context that ends by then says nothing about
// the servers.
func (d *Driver) listening(began time.Time) bool {
	failed := 0
	for _, n := range d.nodes {
		if n.push.failed.Load() {
			failed++
		}
	}
	return failed <= len(d.nodes)-d.quorum && time.Since(began) < redisconn.Soon
}

func (p *push) start(n *node) {
	p.subscription.Start(n.client, redisscript.Channel(n.d.o.KeyPrefix, n.d.identity), redisconn.Listener{
		Confirmed: func() {
			p.up.Store(true)
			p.failed.Store(false)
			p.once.Do(func() { close(p.first) })
			n.d.waiters.tell("", event{node: n.index}) // pushes may have been lost
		},
		Message: n.heard,
		Lost: func(error) bool {
			p.up.Store(false)
			p.failed.Store(true)
			return false // whatever the reason: the server may come back, or become fit
		},
	})
}

// heard acts on one message.
func (n *node) heard(text string) {
	m, ok := redisscript.ParsePush(text)
	switch {
	case !ok:
	case m.Kind == redisscript.PushClosed:
		n.d.waiters.tell(m.Lock, event{node: n.index, closed: m.For})
	case m.Kind == redisscript.PushAsked:
		n.d.waiters.tell(m.Lock, event{node: n.index}) // a look tells the node that they live
	case !n.d.waiters.offered(n.index, m.Nonce):
		// The vote is of no use to anybody until it is given back.
		s := n.stepFor(make(chan *step, 1), redisscript.KeysOfLock(m.Lock), redisscript.Decline, n.d.identity, m.Nonce)
		s.Deadline = time.Now().Add(time.Second)
		n.submit(s)
	}
}
