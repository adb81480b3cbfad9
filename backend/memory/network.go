package memory

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
type Network struct {
	mu       sync.Mutex // protects the following fields
	refusing bool
	gap      bool // something was swallowed on the present connection
	legs     [2]leg
	conn     chan struct{} // the connection: closed when it breaks
}

// The legs of a Network.
const (
	requests = iota
	replies
)

// leg is one direction.
type leg struct {
	seen       int64
	mode       mode
	delay      time.Duration
	queue      []func() // kept back, in order
	ripe       int      // how many of the queue may go
	pumping    bool     // somebody delivers already; one at a time keeps the order
	generation int      // outdates the timers of messages that Pass or Reset has dealt with
}

type mode uint8

const (
	pass mode = iota
	keep
	swallow
	slow
)

// Pass heals the network and delivers what Hold or Delay kept back now, in order, also if its caller gave up long ago.
// If Drop swallowed something, the connection breaks.
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

// Hold keeps back what is sent in the given direction until Pass.
func (n *Network) Hold(dir Direction) { n.set(dir, keep, 0) }

// Drop swallows what is sent in the given direction.
func (n *Network) Drop(dir Direction) { n.set(dir, swallow, 0) }

// Delay delivers everything in the given direction d later, in order.
func (n *Network) Delay(dir Direction, d time.Duration) { n.set(dir, slow, d) }

func (n *Network) set(dir Direction, m mode, delay time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range n.legs {
		if dir&(1<<i) != 0 {
			n.legs[i].mode, n.legs[i].delay = m, delay
		}
	}
}

// Reset breaks the connection: what is under way is gone, and calls that wait for an answer learn that none will come.
func (n *Network) Reset() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reset()
}

// Refuse breaks the connection and refuses another one until Pass.
func (n *Network) Refuse() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.refusing = true
	n.reset()
}

// Seen returns how many messages were sent in the given direction so far, whatever became of them.
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

func (n *Network) reset() {
	for i := range n.legs {
		l := &n.legs[i]
		l.queue, l.ripe = nil, 0
		l.generation++
	}
	n.breakConn()
}

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

// send sends m over a leg.
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

func (n *Network) ripen(i, generation int) {
	n.mu.Lock()
	l := &n.legs[i]
	if l.generation == generation {
		l.ripe = min(l.ripe+1, len(l.queue))
	}
	n.mu.Unlock()
	n.pump(i)
}

// pump delivers what is ripe, in order and without a lock.
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
