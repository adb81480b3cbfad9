package redis

import (
	"context"
	"sync"

	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// push is the one subscription of a driver. It is made for the first waiter and stays until Close. As long as there is
// none, waiters poll.
type push struct {
	subscription redisconn.Subscription

	mu   sync.Mutex // protects the following fields
	isUp bool
	up   chan struct{} // closed while the subscription is confirmed
}

func (p *push) init() { p.up = make(chan struct{}) }

// start makes the subscription, unless there is one, and returns what is closed when it is confirmed: a release that
// finds nobody listening passes a waiter by.
func (p *push) start(d *Driver) (up <-chan struct{}) {
	p.subscription.Start(d.client, redisscript.Channel(d.prefix, d.identity), redisconn.Listener{
		Confirmed: func() {
			p.confirmed()
			d.suspect() // it may be another server
			d.waiting.lookAll()
		},
		Message: d.heard,
		Lost:    p.lost,
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.up
}

// stands reports whether the subscription is confirmed.
func (p *push) stands() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.isUp
}

func (p *push) confirmed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.isUp {
		p.isUp = true
		close(p.up)
	}
}

// lost notes the end of a connection.
func (p *push) lost(err error) (refused bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isUp {
		p.isUp, p.up = false, make(chan struct{})
	}
	return redisconn.FailureOf(err).Fatal
}

// close ends the subscription and waits for its goroutine, or for ctx.
func (p *push) close(ctx context.Context) error {
	select {
	case <-p.subscription.Close():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// heard acts on one message.
func (d *Driver) heard(text string) {
	m, ok := redisscript.ParsePush(text)
	switch {
	case !ok:
	case m.Kind == redisscript.PushClosed:
		d.waiting.closed(m.Lock, m.For)
	case m.Kind == redisscript.PushAsked:
		d.waiting.asked(m.Lock)
	case !d.waiting.offered(m.Nonce):
		// The lock is of no use to anybody until it is given back.
		d.gate.Go(func(ctx context.Context) {
			ctx, cancel := context.WithTimeout(ctx, lookTime)
			defer cancel()
			// Without an answer it is given back by the end of the offer.
			_, _, _ = d.batch.do(ctx, newStep(redisscript.Decline, redisscript.KeysOfLock(m.Lock), d.identity, m.Nonce))
		})
	}
}
