package memory

// The network between a driver and its store, as two queues of functions. There is no encoding: a message is a
// function that has the message's effect at the other end. A test changes when it runs, whether it runs, and whether
// its sender gets an error if it will not.
//
// An undisturbed network has no goroutine and no queue: the sender runs the message itself, the store's answer
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

// Network lies between one driver and its store. It passes everything until a method changes that. Methods are safe for
// concurrent use and take effect before they return.
//
//	d := store.Driver()
//	d.Network().Drop(memory.Replies) // requests are carried out, and their answers are lost
//	_, err := d.Acquire(ctx, r)      // backend.ErrUnknown, when ctx ends
//	d.Network().Pass()               // undisturbed, on another connection
//
// No message runs under its mutex, because messages lock the store and call holders, who may call the network.
type Network struct {
	mu sync.Mutex // protects the following fields
	// refusing: there is no connection, nor can a new one be made until Pass.
	refusing bool
	// gap: a message was swallowed on the present connection. A stream cannot continue after a gap, so Pass breaks the
	// connection; its callers would otherwise wait for a lost answer.
	gap  bool
	legs [2]leg
	// conn stands for the connection: it is closed when that breaks, and another one is made in the same step. Callers
	// that wait for an answer select on the one on which they sent. Only Network closes it.
	conn chan struct{}
	// broken is called when the connection has broken, without mu.
	broken func()
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
	// lossy: sent messages are lost.
	lossy bool
	// delay is a message's travel time; untilPass: it waits for Pass.
	delay time.Duration
	// queue holds delayed messages, in the order of sending. A message that is not ripe delays the ones behind it, ripe
	// or not, so that the order stays.
	queue []*message
	// pumping: a goroutine delivers from the queue. Others leave their messages to it, or they could overtake the
	// message just being delivered.
	pumping bool
}

// untilPass is the delay of messages that Hold keeps back.
const untilPass = -1

// message is one of a queue.
type message struct {
	deliver func()
	// ripe: it may go. A timer of Delay that fires after Pass or Reset ripens a message that has left already, or is
	// lost.
	ripe bool
}

// Pass heals the network and delivers messages that Hold or Delay kept back now, in order, even if their callers
// returned long ago: a test makes a request arrive late this way. It returns when all have been delivered, unless
// another goroutine is delivering already. If Drop swallowed a message, the connection breaks as with Reset, but kept
// messages are
// delivered.
func (n *Network) Pass() {
	n.mu.Lock()
	n.refusing = false
	broken := n.gap
	if broken {
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
	if broken {
		n.broken()
	}
}

// Hold keeps back messages in the given direction until Pass. Callers wait meanwhile, until their contexts end.
func (n *Network) Hold(dir Direction) { n.set(dir, false, untilPass) }

// Drop swallows messages in the given direction from now on. Queued messages are not lost. Callers get no error: they
// wait until their contexts end, or until Pass.
func (n *Network) Drop(dir Direction) { n.set(dir, true, 0) }

// Delay delivers all messages in the given direction d later, in order: a message does not overtake a slower one. Each
// message has its own timer; Pass and Reset do not wait for it.
func (n *Network) Delay(dir Direction, d time.Duration) { n.set(dir, false, d) }

// set changes the treatment of messages from now on. Queued messages and their timers stay.
func (n *Network) set(dir Direction, lossy bool, delay time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range n.legs {
		if dir&(1<<i) != 0 {
			n.legs[i].lossy, n.legs[i].delay = lossy, delay
		}
	}
}

// Reset breaks the connection: messages in flight are lost in both directions, and calls that wait for an answer get
// an error. Acquire then retries, and other calls are backend.ErrUnavailable. The next call has a new connection. The
// settings of Hold, Drop and Delay stay.
func (n *Network) Reset() { n.reset(false) }

// Refuse breaks the connection and refuses another one until Pass: new calls are backend.ErrUnavailable immediately,
// and have no effect.
func (n *Network) Refuse() { n.reset(true) }

// Seen returns how many messages were sent in the given direction so far, delivered or not: answers and pushed
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

// reset drops queued messages, and breaks the connection.
func (n *Network) reset(refuse bool) {
	n.mu.Lock()
	n.refusing = n.refusing || refuse
	for i := range n.legs {
		n.legs[i].queue = nil
	}
	n.breakConn()
	n.mu.Unlock()
	n.broken()
}

// breakConn closes the connection and makes the next one. The caller holds n.mu.
func (n *Network) breakConn() {
	n.gap = false
	close(n.conn)
	n.conn = make(chan struct{})
}

// connection returns the present connection, which is closed when it breaks; nil without one.
func (n *Network) connection() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refusing {
		return nil
	}
	return n.conn
}

// send sends a message over a leg: it delivers, loses, or queues it. Messages are delivered without n.mu, on this
// goroutine or on the goroutine that is already delivering. A message sent while the network refuses is lost: its
// connection has broken, and its sender gets an error.
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

// pump delivers ripe messages, in order and one at a time. It runs on the goroutine that made one ripe; n.mu is free
// while a message is delivered, and messages that become ripe meanwhile are delivered by the same loop.
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
