package redis

import (
	"context"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const pushWait = 2 * time.Second // for the subscription, before waiters go ahead on looks alone

// push is the one subscription of a driver. It is made for the first waiter and stays until Close.
type push struct {
	subscription redisconn.Subscription

	mu     sync.Mutex // protects the following fields
	isUp   bool
	up     chan struct{} // closed while the subscription is confirmed, or will never be
	failed bool          // the last attempt has
	fatal  error         // why it will never be
}

func (p *push) init() { p.up = make(chan struct{}) }

// ensure returns when the subscription is confirmed: a release that finds nobody listening passes a waiter by.
func (p *push) ensure(ctx context.Context, d *Driver) error {
	began := time.Now()
	p.subscription.Start(d.client, redisscript.Channel(d.prefix, d.identity), redisconn.Listener{
		Confirmed: func() {
			p.confirmed()
			d.waiting.lookAll()
		},
		Message: d.heard,
		Lost:    p.lost,
	})
	p.mu.Lock()
	up := p.up
	p.mu.Unlock()
	select {
	case <-up:
	default:
		t := time.NewTimer(pushWait)
		defer t.Stop()
		select {
		case <-up:
		case <-t.C:
		case <-ctx.Done():
			p.mu.Lock()
			defer p.mu.Unlock()
			// A context that ends while the service still had time to answer says nothing about the service.
			return &redisconn.Failure{Cause: ctx.Err(), Fatal: !p.failed && time.Since(began) < redisconn.Soon}
		case <-d.gate.Closing().Done(): // the wait will see it
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.fatal
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
	p.failed = false
	if !p.isUp {
		p.isUp = true
		close(p.up)
	}
}

// lost notes the end of a connection. It is false if no other one can be any better.
func (p *push) lost(err error) (again bool) {
	f := redisconn.FailureOf(err)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed = true
	if p.isUp {
		p.isUp, p.up = false, make(chan struct{})
	}
	if f.Fatal {
		p.fatal = f
		close(p.up)
	}
	return !f.Fatal
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
	case !d.waiting.granted(m.Nonce, m.Kind == redisscript.PushOffered):
		// The lock is of no use to anybody until it is given back.
		d.gate.Go(func(ctx context.Context) {
			ctx, cancel := context.WithTimeout(ctx, lookTime)
			defer cancel()
			s := newStep(redisscript.Decline, redisscript.KeysOfLock(m.Lock), d.identity, m.Nonce)
			if d.batch.do(ctx, s) == nil {
				s.free()
			}
		})
	}
}
