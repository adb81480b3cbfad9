package fencelock

import (
	"container/heap"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// heart renews the leases of a client and is the only place where time decides that one is lost.
//
// All leases stand in one heap, ordered by the instant at which something is due: a renewal, or the deadline. One timer
// serves the heap, and one call of Driver.Renew serves all leases that are due together, so that ten thousand leases cost
// no goroutine and no timer each. A renewal runs beside the timer: however long it hangs, the deadline fires.
type heart struct {
	client *Client

	mu      sync.Mutex // protects the following fields and those of all leases
	leases  leaseHeap
	timer   *time.Timer
	timerAt backend.Instant // when the timer fires; zero: not armed
	closed  bool

	renewals sync.WaitGroup
	ctx      context.Context // ends the renewals in flight
	stop     context.CancelFunc
}

// maxSleep is how long the timer sleeps at most while there are leases. Go's timers stand still while the machine is
// suspended and the lease clock does not; waking often notices soon after.
const maxSleep = 250 * time.Millisecond

func (h *heart) init(c *Client) {
	h.client = c
	h.ctx, h.stop = context.WithCancel(context.Background())
}

// add puts a granted lease under watch. It fails with a *LostError if the grant has ended already, and with ErrClosed.
func (h *heart) add(l *Lease, g backend.Grant) error {
	c := h.client
	d := c.driver.Describe()
	h.mu.Lock()
	defer h.mu.Unlock()
	now := c.set.Clock.Now()
	l.grant = g
	l.since = now
	l.deadline = g.SentAt.Add(c.set.validity(d, g.TTL))
	switch {
	case h.closed:
		return ErrClosed
	case l.lost != nil: // pushed before we got here
		return l.lost
	case now >= l.deadline:
		return &LostError{Name: l.name, Token: l.Token(), Reason: ReasonExpired}
	}
	l.state = stateHeld
	l.nextAt = l.renewalDue()
	heap.Push(&h.leases, l)
	h.arm(now)
	return nil
}

// renewalDue is a third of the validity after the last proof; the deadline for a lease that is not renewed.
func (l *Lease) renewalDue() backend.Instant {
	if !l.renew {
		return l.deadline
	}
	return l.grant.SentAt.Add(l.deadline.Sub(l.grant.SentAt) / 3)
}

// drop takes a lease out of the heap.
func (h *heart) drop(l *Lease) {
	if l.index >= 0 {
		heap.Remove(&h.leases, l.index)
	}
}

// expire declares l lost if its deadline has passed, and reports whether it did. The caller holds h.mu, and calls
// announceLoss after unlocking.
func (h *heart) expire(l *Lease) bool {
	if l.state != stateHeld && l.state != stateSuspect || h.client.set.Clock.Now() < l.deadline {
		return false
	}
	return h.lose(l, ReasonExpired, nil)
}

// lose declares l lost and reports whether it was not before. The caller holds h.mu, and calls announceLoss after
// unlocking.
func (h *heart) lose(l *Lease, reason Reason, err error) bool {
	if l.state != stateHeld && l.state != stateSuspect {
		return false
	}
	l.state = stateLost
	l.lost = &LostError{Name: l.name, Token: l.Token(), Reason: reason, Err: err}
	h.drop(l)
	return true
}

// announceLoss tells the holder first and the observer second. The service may still have the entry of a lease that
// expired, and its session may keep it alive: it is given back when its TTL is over, and not before, since until then the
// holder may still be stopping.
func (h *heart) announceLoss(l *Lease) {
	c := h.client
	for _, cancel := range h.cancels(l) {
		cancel(l.lost)
	}
	if l.lost.Reason == ReasonExpired {
		end := l.grant.SentAt.Add(l.grant.TTL)
		c.cleaner.addAfter(l.grant, granted, max(end.Sub(c.set.Clock.Now()), time.Millisecond))
	}
	if c.set.Observer != nil {
		c.set.Observer.Observe(Event{
			Type: EventLost, Name: l.name, Owner: c.set.Owner, Token: l.Token(),
			Held: c.set.Clock.Now().Sub(l.since), Reason: l.lost.Reason, Err: l.lost.Err,
		})
	}
}

// cancels returns what ends the contexts of a hold's leases. Those that are asked for later begin ended.
func (h *heart) cancels(hold *Lease) []context.CancelCauseFunc {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []context.CancelCauseFunc
	for _, l := range append([]*Lease{hold}, hold.again.inner...) {
		if l.cancel != nil {
			all = append(all, l.cancel)
		}
	}
	return all
}

// arm makes the timer fire when the first lease is due, but within maxSleep. The caller holds h.mu.
func (h *heart) arm(now backend.Instant) {
	if h.closed || len(h.leases) == 0 {
		return
	}
	at := min(h.leases[0].nextAt, now.Add(maxSleep))
	if !h.timerAt.IsZero() && h.timerAt <= at {
		return
	}
	h.timerAt = at
	sleep := max(at.Sub(now), time.Millisecond/2) // the two clocks differ a little: never spin
	if h.timer == nil {
		h.timer = time.AfterFunc(sleep, h.tick)
	} else {
		h.timer.Reset(sleep)
	}
}

// tick ends what has reached its deadline and starts the renewals that are due.
func (h *heart) tick() {
	h.mu.Lock()
	h.timerAt = 0
	if h.closed {
		h.mu.Unlock()
		return
	}
	now := h.client.set.Clock.Now()
	var lost []*Lease
	var batches []*batch
	for len(h.leases) > 0 {
		l := h.leases[0]
		if now >= l.deadline {
			h.lose(l, ReasonExpired, nil)
			lost = append(lost, l)
			continue
		}
		if due := l.nextAt <= now; !due && (len(batches) == 0 || l.nextAt > now.Add(l.early())) {
			break
		}
		batches = enlist(batches, l, now)
		l.nextAt = l.deadline
		heap.Fix(&h.leases, l.index)
	}
	h.arm(now)
	h.renewals.Add(len(batches))
	h.mu.Unlock()

	for _, l := range lost {
		h.announceLoss(l)
	}
	for _, b := range batches {
		go h.renew(b)
	}
}

// early is how long before its time a renewal may ride along with one that is due.
func (l *Lease) early() time.Duration {
	if l.nextAt == l.deadline {
		return 0 // not a renewal
	}
	return l.deadline.Sub(l.grant.SentAt) / 6
}

// batch is the leases of one Driver.Renew call.
type batch struct {
	leases  []*Lease
	grants  []backend.Grant
	least   time.Duration // the shortest time to a deadline
	longest time.Duration // the longest
}

// enlist adds l to a batch. Leases whose deadlines are near do not share a call with those that have much time: each call
// is bounded by its nearest deadline. The caller holds heart.mu.
func enlist(batches []*batch, l *Lease, now backend.Instant) []*batch {
	if l.renewing != nil {
		return batches // Extend is at it
	}
	l.renewing = make(chan struct{})
	left := l.deadline.Sub(now)
	for _, b := range batches {
		if max(b.longest, left) <= 4*min(b.least, left) {
			b.leases, b.grants = append(b.leases, l), append(b.grants, l.grant)
			b.least, b.longest = min(b.least, left), max(b.longest, left)
			return batches
		}
	}
	return append(batches, &batch{
		leases: []*Lease{l}, grants: []backend.Grant{l.grant}, least: left, longest: left,
	})
}

// renew makes one attempt for a batch. It is bounded by a third of the time that is left to the nearest of the current
// deadlines, so that an attempt that hangs leaves time for others.
func (h *heart) renew(b *batch) {
	defer h.renewals.Done()
	ctx, cancel := context.WithTimeout(h.ctx, b.least/3)
	defer cancel()
	began := h.client.set.Clock.Now()
	renewals := h.client.driver.Renew(ctx, b.grants)
	for i, l := range b.leases {
		r := backend.Renewal{Err: errors.New("fencelock: driver answered fewer renewals than it was asked for")}
		if i < len(renewals) {
			r = renewals[i]
		}
		_ = h.settle(l, began, b.grants[i].TTL, r) // the lease and the observer know
	}
}

// beginExtend returns what to ask for to give the lease another TTL, and how long there is time for that. A service that
// gets the request cuts a longer TTL short at once, whenever its answer comes: until settle, the hold is believed for the
// shorter of both.
func (h *heart) beginExtend(l *Lease, ttl time.Duration) (g backend.Grant, began backend.Instant, left time.Duration) {
	c := h.client
	h.mu.Lock()
	defer h.mu.Unlock()
	g, began = l.grant, c.set.Clock.Now()
	g.TTL = ttl
	l.uncut = l.deadline
	if cut := began.Add(c.set.validity(c.driver.Describe(), ttl)); cut < l.deadline {
		l.deadline = cut
		l.nextAt = min(l.nextAt, cut)
		if l.index >= 0 {
			heap.Fix(&h.leases, l.index)
			h.arm(began)
		}
	}
	return g, began, l.deadline.Sub(began)
}

// settle applies the outcome of a renewal that began at began and asked for ttl, and returns an error if the lease was
// not renewed.
//
// A renewal without an answer may have been carried out, or may still be on its way and be carried out late. If it asked
// for a shorter TTL than an earlier or a later one, it cuts that one short in the service. Hence the deadline is taken
// back to what it may have left, and the shortest TTL of any unanswered renewal bounds what is believed from then on.
func (h *heart) settle(l *Lease, began backend.Instant, ttl time.Duration, r backend.Renewal) error {
	c := h.client
	d := c.driver.Describe()
	h.mu.Lock()
	close(l.renewing)
	l.renewing = nil
	now := c.set.Clock.Now()
	lost := h.expire(l)
	uncut := l.uncut
	l.uncut = 0
	var event Event
	switch {
	case l.state != stateHeld && l.state != stateSuspect:
		// Lost or released meanwhile; there is no un-losing.
	case r.Err == nil:
		believed := r.TTL
		if l.leastTTL > 0 {
			believed = min(believed, l.leastTTL)
		}
		l.grant.TTL = ttl
		if r.SentAt >= l.grant.SentAt {
			l.grant.SentAt = r.SentAt
			l.deadline = r.SentAt.Add(c.set.validity(d, believed))
		}
		if now >= l.deadline {
			lost = h.lose(l, ReasonExpired, nil)
			break
		}
		l.state = stateHeld
		l.nextAt = l.renewalDue()
		event = Event{Type: EventRenewed, Left: l.deadline.Sub(now)}
	case errors.Is(r.Err, ErrNotHeld):
		reason := ReasonEvicted
		if notHeld := (*backend.NotHeldError)(nil); errors.As(r.Err, &notHeld) && notHeld.Reason != "" {
			reason = notHeld.Reason
		}
		lost = h.lose(l, reason, r.Err)
	default:
		if !errors.Is(r.Err, ErrUnavailable) || errors.Is(r.Err, ErrUnknown) {
			if l.leastTTL == 0 || ttl < l.leastTTL {
				l.leastTTL = ttl
			}
			l.deadline = min(l.deadline, began.Add(c.set.validity(d, ttl)))
			if now >= l.deadline {
				lost = h.lose(l, ReasonExpired, r.Err)
				break
			}
		} else if uncut != 0 { // the service has not heard of it
			l.deadline = uncut
		}
		l.state = stateSuspect
		left := l.deadline.Sub(now)
		l.nextAt = l.deadline
		if l.renew {
			l.nextAt = min(l.deadline, now.Add(retryIn(left)))
		}
		event = Event{Type: EventSuspect, Left: left, Err: r.Err}
	}
	if l.index >= 0 {
		heap.Fix(&h.leases, l.index)
		h.arm(now)
	}
	err := l.endedLocked()
	if err == nil {
		err = r.Err
	}
	h.mu.Unlock()

	if lost {
		h.announceLoss(l)
	} else if event.Type != "" && c.set.Observer != nil {
		event.Name, event.Owner, event.Token = l.name, c.set.Owner, l.Token()
		c.set.Observer.Observe(event)
	}
	return err
}

// retryIn spreads retries: a twentieth to a tenth of the time left, between 5 ms and 1 s.
func retryIn(left time.Duration) time.Duration {
	longest := min(max(left/10, 5*time.Millisecond), time.Second)
	return longest/2 + rand.N(longest/2+1)
}

// close ends every lease with ReasonClosed, waits for the renewals in flight and returns the leases that were held.
func (h *heart) close() []*Lease {
	h.mu.Lock()
	h.closed = true
	if h.timer != nil {
		h.timer.Stop()
	}
	held := append([]*Lease(nil), h.leases...)
	for _, l := range held {
		h.lose(l, ReasonClosed, nil)
	}
	h.mu.Unlock()
	for _, l := range held {
		h.announceLoss(l)
	}
	h.stop()
	h.renewals.Wait()
	return held
}

// leaseHeap orders leases by nextAt; container/heap works on it.
type leaseHeap []*Lease

func (q leaseHeap) Len() int           { return len(q) }
func (q leaseHeap) Less(i, j int) bool { return q[i].nextAt < q[j].nextAt }
func (q leaseHeap) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

func (q *leaseHeap) Push(x any) {
	l := x.(*Lease)
	l.index = len(*q)
	*q = append(*q, l)
}

func (q *leaseHeap) Pop() any {
	old := *q
	l := old[len(old)-1]
	old[len(old)-1] = nil
	l.index = -1
	*q = old[:len(old)-1]
	return l
}
