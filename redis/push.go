package redis

import (
	"sync/atomic"

	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// push is the one subscription of a client, made for its first waiter that finds its name taken, and kept until Close on
// one connection after the other.
type push struct {
	notify       func(engine.Push)
	subscription redisconn.Subscription
	up           atomic.Bool
}

// Listen is engine.Pushes's.
func (s *service) Listen(notify func(engine.Push)) { s.push.notify = notify }

// stands reports whether the subscription is confirmed, and starts it if necessary. Each confirmation makes PushGap
// have every waiter call Enter again.
func (p *push) stands(s *service) bool {
	if p.up.Load() {
		return true
	}
	p.subscription.Start(s.client, s.channel(s.identity), redisconn.Listener{
		Confirmed: func() {
			p.up.Store(true)
			s.probe.suspect() // it may be another server
			p.notify(engine.Push{What: engine.PushGap})
		},
		Message: func(text string) { p.message(s, text) },
		Lost: func(err error) (refused bool) {
			p.up.Store(false)
			return redisconn.FailureOf(err).Fatal
		},
	})
	return p.up.Load()
}

func (p *push) message(s *service, text string) {
	m, ok := redisscript.ParsePush(text)
	if !ok {
		return
	}
	if m.Kind == redisscript.PushOffered {
		if len(m.Nonce) == instantDigits+redisconn.KeyDigits {
			p.notify(engine.Push{What: engine.PushTurn, RequestID: m.Nonce[instantDigits:], Handed: m.Nonce})
		}
		return
	}
	if name, ok := redisscript.NameOf(s.o.KeyPrefix, m.Lock); ok {
		turns := engine.Push{What: engine.PushTurns, Name: name}
		if m.Kind == redisscript.PushClosed {
			turns.After = redisscript.SettleIn(m.For)
		}
		p.notify(turns)
	}
}
