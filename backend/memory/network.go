package memory

// The network between a driver and its store, as two queues of functions. Nothing is encoded: a message is a function
// that does at the other end what the message would bring about there. What a test breaks is when it runs, whether it
// runs, and whether its sender learns that it will not.
//
// A network that is whole has no goroutine and no queue: the sender runs the message itself, the store's answer
// included, so that one call costs no switch of goroutines and a test in simulated time needs no waiting for messages.

import (
	"sync"
	"time"
)

// Direction selects one or both directions of a Network.
type Direction uint8

const (
	// Requests is the direction from driver to store.
	Requests Direction = 1 << iota
	// Replies is the direction from store to driver, for answers and for pushed losses.
	Replies
	// Both directions.
	Both = Requests | Replies
)

// Network lies between one driver and its store. It passes everything until told otherwise. Methods are safe for
// concurrent use and take effect before they return.
//
//	d := store.Driver()
//	d.Network().Drop(memory.Replies) // requests are carried out, and their answers are lost
//	_, err := d.Acquire(ctx, r)      // backend.ErrUnknown, when ctx ends
//	d.Network().Pass()               // whole again, on another connection
//
// No message runs under its mutex, because messages lock the store and call holders, who may call the network.
type Network struct {
	mu sync.Mutex // protects the following fields
	// refusing: there is no connection, and none can be made until Pass.
	refusing bool
	// gap: something was swallowed on the present connection. A stream cannot go on behind a hole, so Pass breaks the
	// connection; its callers would otherwise wait for an answer that is gone.
	gap  bool
	legs [2]leg
	// conn stands for the connection: it is closed when that breaks, and another one is made in the same step. Callers
	// that wait for an answer select on the one on which they sent. Only Network closes it.
	conn chan struct{}
}

// The legs of a Network.
const (
	requests = iota
	replies
)

// leg is one direction. Network.mu protects the fields.
type leg struct {
	// seen counts all messages, the lost ones too: see Seen.
	seen int64
	// lossy: what is sent is lost.
	lossy bool
	// delay is how long a message takes; untilPass: it waits for Pass.
	delay time.Duration
	// queue holds what is kept back, in the order in which it was sent. A message that is not ripe keeps back those
	// behind it, ripe or not, so that none overtakes another.
	queue []*message
	// pumping: a goroutine delivers from the queue. Others leave their messages to it, or they could overtake the one
	// that is just being delivered.
	pumping bool
}

// untilPass is the delay of what Hold keeps back.
const untilPass = -1

// message is one of a queue.
type message struct {
	deliver func()
	// ripe: it may go. A timer of Delay that fires after Pass or Reset ripens what has gone already, or is lost.
	ripe bool
}

// Pass heals the network and delivers what Hold or Delay kept back now, in order, also if its caller gave up long ago:
// this is how a test has a request arrive late. It returns when all has been delivered, unless another goroutine is
// delivering already. If Drop swallowed something, the connection breaks as with Reset, but what was kept back is
// delivered.
func (n *Network) Pass() {
	n.mu.Lock()
	n.refusing = false
	if n.gap {
		n.breakConn()
	}
	for i := range n.legs {
		l := &n.legs[i]
		l.lossy, l.delay = false, 0
		for _, m := range l.queue {
			m.ripe = true
		}
	}
	n.mu.Unlock()
	n.pump(requests)
	n.pump(replies)
}

// Hold keeps back what is sent in the given direction until Pass. Callers wait meanwhile, until their contexts end.
func (n *Network) Hold(dir Direction) { n.set(dir, false, untilPass) }

// Drop swallows what is sent in the given direction from now on. Messages that are queued already are not lost. Nobody
// is told: callers wait until their contexts end, or until Pass.
func (n *Network) Drop(dir Direction) { n.set(dir, true, 0) }

// Delay delivers everything in the given direction d later, in order: a message does not overtake one that takes
// longer. Each message has a timer of its own; Pass and Reset do not wait for it.
func (n *Network) Delay(dir Direction, d time.Duration) { n.set(dir, false, d) }

// set changes what becomes of messages from now on. What is queued already stays, and so do its timers.
func (n *Network) set(dir Direction, lossy bool, delay time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range n.legs {
		if dir&(1<<i) != 0 {
			n.legs[i].lossy, n.legs[i].delay = lossy, delay
		}
	}
}

// Reset breaks the connection: what is under way is gone in both directions, and calls that wait for an answer learn
// that none will come. Acquire then asks again, and other calls are backend.ErrUnknown. The next call has a new
// connection. What Hold, Drop and Delay have set stays as it is.
func (n *Network) Reset() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reset()
}

// Refuse breaks the connection and refuses another one until Pass: new calls are backend.ErrUnavailable at once, and
// nothing of theirs was done.
func (n *Network) Refuse() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.refusing = true
	n.reset()
}

// Seen returns how many messages were sent in the given direction so far, whatever became of them: answers and pushed
// losses count as Replies, and so do the signals by which the store has a waiter or a watch ask.
func (n *Network) Seen(dir Direction) (sum int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range n.legs {
		if dir&(1<<i) != 0 {
			sum += n.legs[i].seen
		}
	}
	return sum
}

// reset loses what is queued, and breaks the connection. The caller holds n.mu.
func (n *Network) reset() {
	for i := range n.legs {
		n.legs[i].queue = nil
	}
	n.breakConn()
}

// breakConn closes the connection and makes the next one. The caller holds n.mu.
func (n *Network) breakConn() {
	n.gap = false
	close(n.conn)
	n.conn = make(chan struct{})
}

// connection returns the present connection, which is closed when it breaks; nil if there is none.
func (n *Network) connection() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refusing {
		return nil
	}
	return n.conn
}

// send sends a message over a leg: it delivers, loses, or queues it. Messages are delivered without n.mu, on this
// goroutine or on the one that delivers already. One that is sent while the network refuses is lost: its connection has
// broken, which tells its sender.
func (n *Network) send(i int, deliver func()) {
	n.mu.Lock()
	l := &n.legs[i]
	l.seen++
	switch {
	case n.refusing:
	case l.lossy:
		n.gap = true
	case l.delay == 0 && len(l.queue) == 0 && !l.pumping:
		n.mu.Unlock()
		deliver()
		return
	default:
		m := &message{deliver: deliver, ripe: l.delay == 0}
		l.queue = append(l.queue, m)
		if l.delay > 0 {
			time.AfterFunc(l.delay, func() { n.ripen(i, m) })
		}
	}
	n.mu.Unlock()
	n.pump(i)
}

// ripen is the end of a message's delay, on the goroutine of its timer.
func (n *Network) ripen(i int, m *message) {
	n.mu.Lock()
	m.ripe = true
	n.mu.Unlock()
	n.pump(i)
}

// pump delivers what is ripe, in order and one at a time. It runs on the goroutine that made something ripe; n.mu is
// free while a message is delivered, and what becomes ripe meanwhile is delivered by the same loop.
func (n *Network) pump(i int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := &n.legs[i]
	if l.pumping {
		return
	}
	l.pumping = true
	for len(l.queue) > 0 && l.queue[0].ripe {
		m := l.queue[0]
		l.queue = l.queue[1:]
		n.mu.Unlock()
		m.deliver()
		n.mu.Lock()
	}
	l.pumping = false
}
