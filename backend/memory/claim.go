package memory

// Claims: the store's timed entries beside the machine. Every function here is called with Store.mu held, except tick.

import (
	"maps"
	"slices"
	"time"

	"github.com/google/btree"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
)

// claim is a place in the queues of one or several names, a hold, or the rest of a hold that is over while its
// minimum keeps the name closed. It is in Store.claims and in Store.due until it ends, or until Wipe.
type claim struct {
	// number is the ticket of a place, and the order of the token of a hold. The machine gives no number twice.
	number uint64
	// due is when it ends by its time, and the store's alarm for that. For a hold and a place only requests move it,
	// and only to later.
	due backend.Instant
	// requests are the latest requests of the place, or the one of the hold; client sent them, and is notified. The
	// same request may come from another client later.
	requests []backend.Request
	client   *client

	// waits: this is a place in a queue.
	waits bool

	// Of a hold: closes is the end of its minimum, which keeps the name closed (zero without one), queued is set if it
	// was granted from the queue, and lingers if only its minimum is left.
	token   fencing.Token
	nonce   fencing.Nonce // Grant.Nonce
	closes  backend.Instant
	queued  bool
	lingers bool
}

// newAlarms returns an empty tree of claims in the order in which they are due. A heap would need the place of each
// claim in it to take one out, which every release does.
func newAlarms() *btree.BTreeG[*claim] {
	return btree.NewG(32, func(a, b *claim) bool { return a.due < b.due || a.due == b.due && a.number < b.number })
}

// keep makes the store time a claim, or time it for longer: a place in queues by its ticket, a hold by its token.
//
// It comes here on each repetition of its requests. That prolongs it and leaves a minimum alone, which counts from the
// first grant. A place without repeated requests ends like a hold would, or a queue of the dead would close the
// name for one TTL each.
func (s *Store) keep(now backend.Instant, by *client, rs []backend.Request, ticket uint64, t fencing.Token) *claim {
	number := max(ticket, t.Order())
	c := s.claims[number]
	if c == nil {
		c = &claim{number: number, token: t}
		if t != 0 {
			c.nonce = fencing.NewNonce()
		}
		if rs[0].MinHold > 0 {
			c.closes = now.Add(rs[0].MinHold)
		}
		s.claims[number] = c
	}
	c.requests, c.client = rs, by
	s.prolong(now, c, rs[0].TTL)
	return c
}

// prolong moves the end of the claim to ttl from now, unless it would end later anyway.
func (s *Store) prolong(now backend.Instant, c *claim, ttl time.Duration) {
	s.schedule(c, max(c.due, now.Add(ttl)))
}

// schedule moves the end of the claim. The tree finds it by its end, so it is removed before the end changes. The
// timer is left alone: arm sets it once for each request, however many claims the request has moved.
func (s *Store) schedule(c *claim, due backend.Instant) {
	s.due.Delete(c)
	c.due = due
	s.due.ReplaceOrInsert(c)
}

// forget takes the claim out of the store. A second call has no effect.
func (s *Store) forget(c *claim) {
	s.due.Delete(c)
	delete(s.claims, c.number)
}

// find returns the hold that g is, by request and by token, never by name alone.
//
// A client from before a wipe finds no hold: its tokens may belong to other holds now.
func (s *Store) find(by *client, g *backend.Grant) *claim {
	c := s.claims[g.Token.Order()]
	if c == nil || c.token != g.Token || c.lingers || c.token.String() != g.Incarnation || s.forgot(by) != nil ||
		c.requests[0].Name != g.Name || c.requests[0].RequestID != g.RequestID {
		return nil
	}
	return c
}

// held returns the holds of a name, except lingering ones, which only keep it closed.
func (s *Store) held(name string) (held []*claim) {
	for _, h := range s.machine.Holder(name).Holders {
		if !h.Lingering {
			held = append(held, s.claims[h.Token.Order()])
		}
	}
	return held
}

// waiting returns the places in queues, by arrival; with a name, only the places in its queue.
//
// It looks at all claims of the store, which only Stop and EvictWaiters ask for.
func (s *Store) waiting(name string) (found []*claim) {
	for _, number := range slices.Sorted(maps.Keys(s.claims)) {
		c := s.claims[number]
		here := func(r backend.Request) bool { return name == "" || r.Name == name }
		if c.waits && slices.ContainsFunc(c.requests, here) {
			found = append(found, c)
		}
	}
	return found
}

// end ends a claim as its time does.
//
// A place is left in all queues, since cancelling the wait for one name ends the wait for all. Its waiter is not
// notified: it notices with its next request, and then gets a place at the end.
//
// A hold moves to a separate session, which expires immediately. The machine knows expiry of sessions only, and
// watchers should see the hold expired, not released. The holder is notified first, while the hold is known.
func (s *Store) end(now backend.Instant, c *claim) {
	r := &c.requests[0]
	switch {
	case c.waits:
		s.forget(c)
		s.apply(now, machine.Command{Op: machine.OpCancelWait, Name: r.Name, RequestID: r.RequestID})
	case c.lingers:
		s.forget(c)
		s.apply(now, machine.Command{Op: machine.OpFree, Name: r.Name, Token: c.token})
	default:
		s.lose(c, backend.Loss{Reason: backend.ReasonExpired})
		s.apply(now, machine.Command{Op: machine.OpOpenSession, Session: expired, TTL: maxTTL})
		s.apply(now, machine.Command{
			Op: machine.OpMove, Session: expired, Name: r.Name, RequestID: r.RequestID, Token: c.token,
		})
		s.apply(now, machine.Command{Op: machine.OpExpire, Session: expired, Linger: now < c.closes})
		if !c.lingers {
			s.forget(c)
		}
	}
}

// lose notifies the holder of a hold why it is gone.
func (s *Store) lose(c *claim, loss backend.Loss) {
	s.endings[c.token.Order()%endingsKept] = ending{c.token, loss}
	s.notify(c, engine.Push{What: engine.PushLost, RequestID: c.requests[0].RequestID, Loss: loss})
}

// notifyTurn makes a waiter repeat its request. The push carries no token, so that the validity counts from the
// waiter's own request, however long it has waited.
func (s *Store) notifyTurn(c *claim) {
	s.notify(c, engine.Push{What: engine.PushTurn, RequestID: c.requests[0].RequestID})
}

func (s *Store) notify(c *claim, p engine.Push) {
	push := c.client.push
	s.outbox = append(s.outbox, func() { push(p) })
}

// ending is the reason for a hold's loss, for a holder that was not notified and renews or releases it.
type ending struct {
	token fencing.Token
	loss  backend.Loss
}

// endingsKept bounds the endings that the store remembers. A call about an older one is answered without a reason.
const endingsKept = 1024

// loss returns the reason why the hold that g names is gone, if the store remembers. After a wipe the endings that the
// store remembers are of other tokens.
func (s *Store) loss(by *client, g *backend.Grant) backend.Loss {
	if s.forgot(by) != nil {
		return backend.Loss{Reason: backend.ReasonHistoryLost}
	}
	if last := s.endings[g.Token.Order()%endingsKept]; last.token == g.Token {
		return last.loss
	}
	return backend.Loss{}
}

// expire ends all due claims, if the server is at work, and returns the present instant.
//
// Every request begins with it, so that the answer does not depend on whether the timer or the request comes first: a
// hold is over at its instant, also where the timer is late. A loop is needed because an end may grant to a waiter
// that is itself due at the same moment.
func (s *Store) expire() backend.Instant {
	now := s.clock.Now()
	for s.state == serving {
		c, some := s.due.Min()
		if !some || c.due > now {
			break
		}
		s.end(now, c)
	}
	return now
}

// arm sets the timer to the first due claim, if the server is at work. A timer that fires too early (its claim was
// moved or has ended) finds no due claim and is rearmed; moving it on every release would cost more.
//
// There is one timer for the life of the store, and it is never stopped. One for each claim would cost more than the
// lock does. On an unused store it fires until the last claim has ended, and is then no longer set.
func (s *Store) arm() {
	first, some := s.due.Min()
	if s.state != serving || !some || !s.armed.IsZero() && s.armed <= first.due {
		return
	}
	s.armed = first.due
	wait := max(first.due.Sub(s.clock.Now()), time.Microsecond)
	if s.timer == nil {
		s.timer = time.AfterFunc(wait, s.tick)
		return
	}
	s.timer.Reset(wait)
}

// tick is the timer's function, in its own goroutine, which ends with it. Losses that it causes are reported from
// that goroutine, after s.mu is unlocked.
func (s *Store) tick() {
	s.lock()
	defer s.unlock()
	s.armed = 0
}
