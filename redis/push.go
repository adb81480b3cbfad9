package redis

// This file is the driver's one subscription. Each driver has its own channel, named by its random identity, on which
// the script sends three messages: a waiter is offered the lock, the lock stays closed for some time, and waiters are
// asked whether they live.
//
// A message of Redis' PUBLISH is delivered at most once and can be lost with the connection, so a push is never the
// only way to learn something: waiting.go looks for itself, more often where no push can come. redisconn.Subscription
// owns the connection and the goroutine that reads it, and calls the functions of this file on it.

import (
	"context"
	"sync"

	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// push is the one subscription of a driver. It is made for the first waiter, since a driver that only tries needs no
// second connection, and stays until Close. As long as it is not confirmed, waiters poll.
type push struct {
	subscription redisconn.Subscription

	mu   sync.Mutex // protects the following fields
	isUp bool
	// Closed while the subscription is confirmed, and made anew when it is lost. Pollers wait for it.
	up chan struct{}
}

// init makes up; the rest is ready as it is.
func (p *push) init() { p.up = make(chan struct{}) }

// start makes the subscription unless there is one, and returns a channel that is closed on confirmation. A
// waiter has to be in no queue before that: a release that finds nobody listening passes it by.
//
// With every confirmation, the first and each later one, the server is looked at anew, as it may be another one; and
// every group looks at once, because pushes may have been lost in between.
func (p *push) start(d *Driver) (up <-chan struct{}) {
	p.subscription.Start(d.client, redisscript.Channel(d.o.KeyPrefix, d.identity), redisconn.Listener{
		Confirmed: func() {
			// In this order: a waiter may be pushed as soon as it sees the subscription stand, and the looks find
			// earlier pushes.
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

// confirmed lets waiters stand in queues from now on.
func (p *push) confirmed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.isUp {
		p.isUp = true
		close(p.up)
	}
}

// lost notes the end of a connection, or a failure to open one. refused says that an early retry cannot help, such as
// for a user that may not subscribe: redisconn then retries every half minute, and waiters poll. Waiters in queues keep
// their places meanwhile, and find their turn by looks.
func (p *push) lost(err error) (refused bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isUp {
		p.isUp, p.up = false, make(chan struct{})
	}
	return redisconn.FailureOf(err).Fatal
}

// heard acts on one message. It runs on the goroutine that reads the subscription and must not wait for the server: the
// answer to an offer that nobody takes is sent from a goroutine of the gate's, which ends after lookTime. Messages that
// this version does not understand are ignored.
func (d *Driver) heard(text string) {
	m, ok := redisscript.ParsePush(text)
	switch {
	case !ok:
	case m.Kind == redisscript.PushClosed:
		d.waiting.closed(m.Lock, m.For)
	case m.Kind == redisscript.PushAsked:
		d.waiting.asked(m.Lock)
	// The try was abandoned, and the lock is useless until it is declined.
	case !d.waiting.offered(m.Nonce):
		d.gate.Go(func(ctx context.Context) {
			ctx, cancel := context.WithTimeout(ctx, lookTime)
			defer cancel()
			// Without an answer the offer ends when its time is over.
			_, _, _ = d.lines.Do(ctx, lines.NewStep(redisscript.Decline, redisscript.KeysOfLock(m.Lock), d.identity, m.Nonce))
		})
	}
}
