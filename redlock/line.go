package redlock

import (
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
)

// Limits of a line.
const (
	maxFlight  = 4096            // steps in one exchange
	flightTime = 3 * time.Second // for one exchange, whatever its steps allow
	maxOwn     = 16              // steps that their caller writes itself: they fit into an idle connection's buffers
)

// line carries steps to one server: one exchange after the other, in the order of submission, with all that is pending
// in each. The order matters: the release of a hold must not overtake its acquire on a node whose answer nobody
// awaited. So a node that hangs holds up its own line, and no other.
//
// While nothing is under way, whoever submits writes the request itself: handing it to another goroutine first would
// cost as much as all the rest. The line's goroutine (exchange.go) connects, reads, and writes what has piled up
// meanwhile.
type line struct {
	mu       sync.Mutex // protects the following fields
	pending  []*step
	busy     bool      // an exchange, or a connection for one, is under way
	wire     *wire     // nil while there is none
	deadline time.Time // of the present exchange
	started  bool
	closed   bool
	wake     chan struct{} // something is pending and there is no wire, or the line was closed
	ended    chan struct{}

	flight []*step // the present exchange: of its starter until it is sent, then of the line's goroutine

	// Of the line's goroutine alone.
	refused *redisconn.Failure // why the last attempt to connect failed
	misses  int                // how many did so in a row
	retry   time.Time          // when to make the next one
}

func (l *line) init() {
	l.wake = make(chan struct{}, 1)
	l.ended = make(chan struct{})
}

// submit queues steps. Each enters its sink in the end, unless it was dropped.
func (n *node) submit(steps ...*step) {
	if w := n.enqueue(steps); w == nil {
		return
	} else if len(steps) <= maxOwn {
		w.flush()
	} else {
		go w.flush() // it may take until the deadline
	}
}

// enqueue returns the wire to flush, if these steps are on their way.
func (n *node) enqueue(steps []*step) *wire {
	l := &n.line
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		for _, s := range steps {
			s.fail(n, &redisconn.Failure{Cause: backend.ErrClosed, Fatal: true})
		}
		return nil
	}
	l.pending = append(l.pending, steps...)
	switch {
	case l.busy:
		return nil
	case l.wire != nil:
		l.take()
		n.depart()
		return l.wire
	case !l.started:
		l.started = true
		go n.work()
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return nil
}

// take begins an exchange with what is pending, if that is anything. mu is held.
func (l *line) take() {
	l.flight, l.deadline = l.flight[:0], time.Time{}
	took := 0
	for _, s := range l.pending {
		if len(l.flight) == maxFlight {
			break
		}
		took++
		if !s.state.CompareAndSwap(stepPending, stepTaken) {
			continue
		}
		l.flight = append(l.flight, s)
		if s.deadline.After(l.deadline) {
			l.deadline = s.deadline
		}
	}
	left := copy(l.pending, l.pending[took:])
	clear(l.pending[left:])
	l.pending = l.pending[:left]
	if bound := time.Now().Add(flightTime); l.deadline.After(bound) {
		l.deadline = bound
	}
	l.busy = len(l.flight) > 0
}

// depart writes the request of an exchange to the wire's memory; a flush sends it. mu is held.
func (n *node) depart() {
	l := &n.line
	_ = l.wire.SetDeadline(l.deadline) // on a closed connection the read fails, too
	sentAt := n.d.clock.Now()
	for _, s := range l.flight {
		s.sentAt = sentAt
	}
	l.wire.encode(evalsha, n.d.channels, l.flight)
}

// close ends the line when what is pending has been sent. The channel tells when that is done.
func (l *line) close() (ended <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return l.ended
	}
	l.closed = true
	close(l.wake) // under mu, as are the sends
	if !l.started {
		close(l.ended)
	} else if !l.busy && l.wire != nil {
		_ = l.wire.Close() // ends the read; there is nothing to lose
	}
	return l.ended
}
