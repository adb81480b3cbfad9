package memory

// Claims: what the store keeps, beside the machine, of everything that ends with time. Every function here is called
// with Store.mu held, but for tick.

import (
	"maps"
	"slices"
	"time"

	"github.com/google/btree"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
)

// claim is a place in the queues of one or several names, a hold, or what is left of a hold that is over while its
// minimum keeps the name closed. It is in Store.claims and in Store.due until it ends, or until Wipe.
type claim struct {
	// number is the ticket of a place, and the order of the token of a hold. The machine gives no number twice.
	number uint64
	// due is when it ends by its time, and the store's alarm for that. For a hold and a place only requests move it,
	// and only to later.
	due backend.Instant
	// requests are those of the place, or the one of the hold, as they came last; driver is who sent them, and through
	// whose network the answer goes that nobody asked for. The same request may come again from another.
	requests []backend.Request
	driver   *Driver

	// ring tells a waiter to ask. It does so at every grant, and at a wipe. Nil: this is no place in a queue.
	ring func()

	// Of a hold: closes is until when its minimum keeps the name closed (zero: it has none), queued says that it was
	// granted out of the queue, and lingers that only its minimum is left.
	token   fencing.Token
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
// It comes here again whenever its requests do. That prolongs it and leaves a minimum alone, which counts from the
// first grant. A place that nobody asks for any more ends like a hold would, or a queue of the dead would close the
// name for one TTL each.
func (s *Store) keep(now backend.Instant, d *Driver, rs []backend.Request, ticket uint64, t fencing.Token) *claim {
	number := max(ticket, t.Order())
	c := s.claims[number]
	if c == nil {
		c = &claim{number: number, token: t}
		if rs[0].MinHold > 0 {
			c.closes = now.Add(rs[0].MinHold)
		}
		s.claims[number] = c
	}
	c.requests, c.driver = rs, d
	s.prolong(now, c, rs[0].TTL)
	return c
}

// prolong has the claim end ttl from now, or when it would have ended anyway, if that is later.
func (s *Store) prolong(now backend.Instant, c *claim, ttl time.Duration) {
	s.schedule(c, max(c.due, now.Add(ttl)))
}

// schedule moves the end of the claim. The tree finds it by its end, so it is taken out before that is changed. The
// timer is left alone: arm sets it once for each request, however many claims the request has moved.
func (s *Store) schedule(c *claim, due backend.Instant) {
	s.due.Delete(c)
	c.due = due
	s.due.ReplaceOrInsert(c)
}

// forget takes the claim out of the store. Forgetting it again does nothing.
func (s *Store) forget(c *claim) {
	s.due.Delete(c)
	delete(s.claims, c.number)
}

// find returns the hold that g is, by request and by token, never by name alone.
//
// A driver from before a wipe finds nothing: its tokens may be those of other holds now.
func (s *Store) find(d *Driver, g *backend.Grant) *claim {
	c := s.claims[g.Token.Order()]
	if c == nil || c.token != g.Token || c.lingers || c.token.String() != g.Incarnation || s.forgot(d) != nil ||
		c.requests[0].Name != g.Name || c.requests[0].RequestID != g.RequestID {
		return nil
	}
	return c
}

// held returns the holds of a name, without those that are over and only keep it closed.
func (s *Store) held(name string) (held []*claim) {
	for _, h := range s.machine.Holder(name).Holders {
		if !h.Lingering {
			held = append(held, s.claims[h.Token.Order()])
		}
	}
	return held
}

// waiting returns the places in queues, by arrival; with a name, those in the queue of that.
//
// It looks at all claims of the store, which only Stop and EvictWaiters ask for.
func (s *Store) waiting(name string) (found []*claim) {
	for _, number := range slices.Sorted(maps.Keys(s.claims)) {
		c := s.claims[number]
		here := func(r backend.Request) bool { return name == "" || r.Name == name }
		if c.ring != nil && slices.ContainsFunc(c.requests, here) {
			found = append(found, c)
		}
	}
	return found
}

// end ends a claim as its time does.
//
// A place is left in all queues, since cancelling the wait for one name ends the wait for all. Its waiter is told
// nothing: it notices when it asks again, and then gets a place at the end.
//
// A hold moves to a session of its own, which expires at once. The machine knows expiry of sessions only, and watchers
// are to see the hold expired: a release would be shown as one. The holder is told first, while the hold is known.
func (s *Store) end(now backend.Instant, c *claim) {
	r := &c.requests[0]
	switch {
	case c.ring != nil:
		s.forget(c)
		s.apply(now, machine.Command{Op: machine.OpCancelWait, Name: r.Name, RequestID: r.RequestID})
	case c.lingers:
		s.forget(c)
		s.apply(now, machine.Command{Op: machine.OpFree, Name: r.Name, Token: c.token})
	default:
		s.lose(c, backend.ReasonExpired)
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

// lose tells the holder of a hold why it is gone, through the network of the holder's driver, which may delay or lose
// that as any message. A driver that was closed meanwhile tells nobody.
func (s *Store) lose(c *claim, reason backend.Reason) {
	s.endings[c.token.Order()%endingsKept] = ending{c.token, reason}
	if lost, d := c.requests[0].Lost, c.driver; lost != nil {
		s.outbox = append(s.outbox, func() {
			d.net.send(replies, func() {
				if !d.gate.Closed() {
					lost(reason)
				}
			})
		})
	}
}

// ending is why a hold ended against its holder's will, for a holder that was not told and renews or releases it.
type ending struct {
	token  fencing.Token
	reason backend.Reason
}

// endingsKept is how many tokens the store remembers the ends of, at most. What is older is answered without a reason.
const endingsKept = 1024

// notHeld tells why the hold that g names is gone, if the store remembers.
//
// After a wipe the reason is always that: the endings that the store remembers are of other tokens.
func (s *Store) notHeld(d *Driver, g *backend.Grant) error {
	gone := &backend.NotHeldError{Name: g.Name}
	if last := s.endings[g.Token.Order()%endingsKept]; last.token == g.Token {
		gone.Reason = last.reason
	}
	if s.forgot(d) != nil {
		gone.Reason = backend.ReasonHistoryLost
	}
	return gone
}

// expire ends everything whose time has come, if the server is at work, and returns the moment.
//
// Every request begins with it, so that the answer does not depend on whether the timer or the request comes first: a
// hold is over at its instant, also where the timer is late. A loop is needed because an end may grant to a waiter
// whose own time is over at the same moment.
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

// arm sets the timer to the first claim that is due, if the server is at work. A timer that fires too early (its claim
// was moved or has ended) finds nothing due and is armed again; moving it on every release would cost more than that.
//
// There is one timer for the life of the store, and nothing stops it. One for each claim would cost more than the lock
// does. On a store that nobody uses any more it fires until the last claim has ended, and is not set again.
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

// tick is what the timer runs, in a goroutine of its own that ends with it. Losses that it brings about are told from
// that goroutine, after s.mu is unlocked.
func (s *Store) tick() {
	s.lock()
	defer s.unlock()
	s.armed = 0
}
