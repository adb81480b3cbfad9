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

// leg is one direction. Its queue holds what is kept back, in the order in which it was sent; a leg that passes has an
// empty one. Network.mu protects the fields.
type leg struct {
	// seen counts all messages, the lost ones too: see Seen.
	seen  int64
	mode  mode
	delay time.Duration
	queue []func() // kept back, in order
	// ripe is how many of the queue, from its head, may go. It is a number and no mark on each message, so that a
	// message can never go before an earlier one: a timer of Delay that fires lets one more go, and not necessarily its
	// own.
	ripe int
	// pumping: somebody delivers from the queue. A second goroutine leaves its message to that one, or it could
	// overtake what is just being delivered.
	pumping bool
	// generation is counted up by Pass and Reset. A timer of Delay that finds another one does nothing: its message has
	// gone, or is lost.
	generation int
}

// mode is what a leg does with a message that is sent.
type mode uint8

const (
	// pass delivers it, on the sender's goroutine.
	pass mode = iota
	// keep queues it until Pass.
	keep
	// swallow loses it, and notes the gap.
	swallow
	// slow queues it, and sets a timer for it.
	slow
)

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
		l.mode = pass
		l.ripe = len(l.queue)
		l.generation++
	}
	n.mu.Unlock()
	n.pump(requests)
	n.pump(replies)
}

// Hold keeps back what is sent in the given direction until Pass. Callers wait meanwhile, until their contexts end.
func (n *Network) Hold(dir Direction) { n.set(dir, keep, 0) }

// Drop swallows what is sent in the given direction from now on. Messages that are queued already are not lost. Nobody
// is told: callers wait until their contexts end, or until Pass.
func (n *Network) Drop(dir Direction) { n.set(dir, swallow, 0) }

// Delay delivers everything in the given direction d later, in order. Each message has a timer of its own; Pass and
// Reset do not wait for it.
func (n *Network) Delay(dir Direction, d time.Duration) { n.set(dir, slow, d) }

// set changes the mode of one direction or both. What is queued already stays, and so do its timers: only Pass and
// Reset outdate them.
func (n *Network) set(dir Direction, m mode, delay time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range n.legs {
		if dir&(1<<i) != 0 {
			n.legs[i].mode, n.legs[i].delay = m, delay
		}
	}
}

// Reset breaks the connection: what is under way is gone in both directions, and calls that wait for an answer learn
// that none will come. Acquire then asks again, and other calls are backend.ErrUnknown. The next call has a new
// connection. Modes stay as they are.
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
		l := &n.legs[i]
		l.queue, l.ripe = nil, 0
		l.generation++
	}
	n.breakConn()
}

// breakConn closes the connection and makes the next one. The caller holds n.mu.
func (n *Network) breakConn() {
	n.gap = false
	close(n.conn)
	n.conn = make(chan struct{})
}

// connection returns the present connection, which is closed when it breaks.
func (n *Network) connection() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.conn
}

// request sends m to the store. It returns the connection, which breaks if no answer will come, or false if there is no
// connection and nothing was sent.
func (n *Network) request(m func()) (<-chan struct{}, bool) {
	n.mu.Lock()
	conn, refusing := n.conn, n.refusing
	n.mu.Unlock()
	if refusing {
		return nil, false
	}
	n.send(requests, m)
	return conn, true
}

// send sends m over a leg: it runs m, loses it, or queues it. m runs without n.mu, on this goroutine or on the one that
// delivers already. A message that is sent while none may pass (refusing) has no connection to go on, and is lost.
func (n *Network) send(i int, m func()) {
	n.mu.Lock()
	l := &n.legs[i]
	l.seen++
	switch {
	case n.refusing:
	case l.mode == swallow:
		n.gap = true
	case l.mode == pass && len(l.queue) == 0 && !l.pumping:
		n.mu.Unlock()
		m()
		return
	default:
		l.queue = append(l.queue, m)
		switch generation := l.generation; l.mode {
		case pass:
			l.ripe = len(l.queue)
		case slow:
			time.AfterFunc(l.delay, func() { n.ripen(i, generation) })
		}
	}
	n.mu.Unlock()
	n.pump(i)
}

// ripen is the end of one message's delay, on the goroutine of its timer.
func (n *Network) ripen(i, generation int) {
	n.mu.Lock()
	l := &n.legs[i]
	if l.generation == generation {
		l.ripe = min(l.ripe+1, len(l.queue))
	}
	n.mu.Unlock()
	n.pump(i)
}

// pump delivers what is ripe, in order and one at a time. It runs on the goroutine that made something ripe; n.mu is
// free while a message runs, and what becomes ripe meanwhile is delivered by the same loop.
func (n *Network) pump(i int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := &n.legs[i]
	if l.pumping {
		return
	}
	l.pumping = true
	for l.ripe > 0 {
		m := l.queue[0]
		l.queue, l.ripe = l.queue[1:], l.ripe-1
		n.mu.Unlock()
		m()
		n.mu.Lock()
	}
	l.pumping = false
}
