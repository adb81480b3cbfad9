package redisconn

// This file is a subscription that stays: one goroutine, one connection after the other, until Close. go-redis' own
// PubSub reconnects without a notification; this package reports every loss and every confirmation, because a message
// may have been missed between them.

import (
	"context"
	"errors"
	mathrand "math/rand/v2"
	"net"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

const (
	// pushPing is the time without a message after which a subscription is pinged.
	pushPing = 10 * time.Second
	// pushAnswer is for its answer, and for connecting.
	pushAnswer = 3 * time.Second

	// refusedRest is the pause, at most, until a refused subscription is asked for again.
	refusedRest = 30 * time.Second
)

// Soon is the maximum time for the first answer of a healthy server under load.
const Soon = 250 * time.Millisecond

// Subscription listens on one channel until it is closed, over one connection after the other. The zero Subscription is
// ready to start. Start and Close may be called by several goroutines.
type Subscription struct {
	mu      sync.Mutex // protects the following fields
	started bool
	closed  bool
	// sub is the present connection; Close closes it to end a read.
	sub    *goredis.PubSub
	cancel context.CancelFunc
	// ended is closed by the goroutine as its last act.
	ended chan struct{}
}

// Listener receives the events of a subscription on its only goroutine: a function that blocks holds up all messages.
type Listener struct {
	// Messages arrive from now on; some may have been lost before.
	Confirmed func()
	// One has arrived.
	Message func(text string)
	// The connection has failed, or none came about. refused says that it may not be had, and has it tried less often.
	Lost func(err error) (refused bool)
}

// Subscriber is any client of go-redis.
type Subscriber interface {
	Subscribe(ctx context.Context, channels ...string) *goredis.PubSub
}

// Start begins to listen. Only the first call before Close has an effect.
func (s *Subscription) Start(client Subscriber, channel string, l Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started || s.closed {
		return
	}
	s.started = true
	s.ended = make(chan struct{})
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(context.Background())
	go s.run(ctx, client, channel, l)
}

// run keeps the subscription, with pauses that grow while connections fail.
func (s *Subscription) run(ctx context.Context, client Subscriber, channel string, l Listener) {
	defer close(s.ended)
	for failed := 1; ; failed++ {
		confirmed, err := s.listen(ctx, client, channel, l)
		// A connection that worked resets the count of failures.
		if confirmed {
			failed = 1
		}
		again := false
		if l.Lost(err) {
			again = PauseFor(ctx, refusedRest/2+mathrand.N(refusedRest/2))
		} else {
			again = Pause(ctx, failed)
		}
		if !again {
			return
		}
	}
}

// listen is the life of one connection. It pings where nothing is heard for pushPing: a network that swallows
// everything shows in nothing else, and waiters would rest on a subscription that is dead.
func (s *Subscription) listen(ctx context.Context, client Subscriber, channel string, l Listener) (
	confirmed bool, err error,
) {
	sub := client.Subscribe(ctx) // no channel yet, so no I/O yet
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return false, errors.Join(context.Canceled, sub.Close())
	}
	// Close finds it here. Whichever of the two takes mu second sees the other's work.
	s.sub = sub
	s.mu.Unlock()
	defer func() { _ = sub.Close() }() // closed already, or of no more use
	if err := sub.Subscribe(WithDeadline(ctx, time.Now().Add(pushAnswer)), channel); err != nil {
		return false, err
	}
	timeout, asked := pushAnswer, true
	for {
		message, err := sub.ReceiveTimeout(ctx, timeout)
		var silence net.Error
		switch {
		case err == nil:
			timeout, asked = pushPing, false
		// Nothing was heard for long: a live server answers a ping, and a timeout after that is the end.
		case errors.As(err, &silence) && silence.Timeout() && !asked:
			// The answer is not of a type that matters: any message is a sign of life.
			if err := sub.Ping(ctx); err != nil {
				return confirmed, err
			}
			timeout, asked = pushAnswer, true
			continue
		default:
			return confirmed, err
		}
		switch m := message.(type) {
		// The server's confirmation, by which alone it is known that messages will come.
		case *goredis.Subscription:
			confirmed = true
			l.Confirmed()
		case *goredis.Message:
			l.Message(m.Payload)
		}
	}
}

// Close ends the subscription. The channel is closed when its goroutine has ended: one that is just connecting over a
// silent network takes pushAnswer for that.
func (s *Subscription) Close() (ended <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed = true
		// There is no goroutine to wait for, and none will be started.
		if !s.started {
			s.ended = make(chan struct{})
			close(s.ended)
			return s.ended
		}
		// It ends pauses, and a connection that is being made; closing sub below ends a read.
		s.cancel()
		if sub := s.sub; sub != nil {
			go func() { _ = sub.Close() }() // it unblocks a read, and waits for one that connects
		}
	}
	return s.ended
}
