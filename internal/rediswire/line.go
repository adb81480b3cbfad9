package rediswire

// This file is the line: what callers see of the connections to one server. The parts of this package work together
// like this:
//
//	Submit, Carry ─► Line.pending ─► wire.write ─► the server ─► wire.read ─► Owner.Ended
//	                    ▲                │ failed before it left
//	                    └────────────────┘
//
// A Line owns the pending steps and decides which connection is the present one. A wire (wire.go) is one connection:
// the goroutine that has set its writing flag writes, one goroutine or caller reads (own.go), and it ends when its read
// fails. All state of a line and of its wires is protected by Line.mu, which is never held during I/O or while an Owner
// is told.
//
// A step is handed on by its state, an atomic: pending until a writer takes it, dropped if its caller takes it back
// first. Whether it was taken is whether it may have left the process, and so the difference between ErrUnavailable and
// ErrUnknown.

import (
	"net"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
)

// Limits of a line.
const (
	// maxWrite is how many steps leave in one write.
	maxWrite = 4096
	// maxOwn is how many steps their caller writes itself: they fit into an idle connection's buffers, so that the
	// write does not block.
	maxOwn = 16
	// answerTime is for one answer, whatever its steps allow.
	answerTime = 3 * time.Second
	// grace is beyond the steps' deadlines: their callers leave by themselves, and say why.
	grace = 20 * time.Millisecond
	// stallTime is how long a request may be without an answer before nothing more is sent behind it.
	stallTime = 250 * time.Millisecond
	// doubtRest lies between two connections that callers' impatience costs.
	doubtRest = 100 * time.Millisecond
	// maxWires bounds the connections that still owe answers, beside the present one.
	maxWires = 16
)

// Options say what a line is to.
type Options struct {
	// Connect makes a connection on which the server takes requests. Whatever fails, no step was sent. It is called on
	// a separate goroutine, one at a time.
	Connect func() (net.Conn, error)

	Clock backend.Clock
	// The prefix of the channels for pushes, for the script.
	Channels string
	// Names may be on different servers; nil: no.
	Sharded func() bool

	// Ordered keeps steps in the order of their submission from one connection to the next: what was sent on the last
	// one has been run, or a second has passed, before anything is sent on a new one.
	Ordered bool

	// Report is told how each call has ended: nil for an answer that is no error.
	Report func(*redisconn.Failure)
}

// Line carries steps to one server, over one connection as long as that is well. Nothing waits for the answers to
// earlier requests; steps submitted while the connection is being written to leave together, with the next write.
//
// While nothing is under way, the submitter writes the request itself: handing it to another goroutine first would cost
// as much as all the rest.
//
// A connection that owes an answer for long must not hold up the others' steps. Unless the line is Ordered it is left
// to its reader then, and what comes next takes a new one.
//
// Each connection has two goroutines, one that writes and one that reads; both end with it, for which every request has
// a deadline. A goroutine that connects runs while there is no connection and steps are pending.
type Line struct {
	o Options

	mu      sync.Mutex // protects the following fields, and those of the wires
	pending []*Step
	// How many steps at the beginning of pending were under way already and are to be sent again, in their old order.
	returned int
	// The present connection; nil while there is none.
	wire *wire
	// Connections that have not ended, the present one among them.
	wires int
	// A goroutine connects, or waits for the end of the last connection (Ordered).
	connecting bool
	// doubted is when a caller's impatience has cost a connection last.
	doubted time.Time
	closed  bool
	// ended is closed by end, once the line is closed and its last connection has ended.
	ended chan struct{}

	// Why the last try to connect failed.
	refused *redisconn.Failure
	// How many tries have failed in a row.
	misses int
	// When to make the next one.
	retry time.Time
}

// NewLine returns a line that connects with its first step.
func NewLine(o Options) *Line { return &Line{o: o, ended: make(chan struct{})} }

// Submit sends steps. The Owner of each is told in the end, unless it was dropped. It may write to the connection, and
// does not wait for answers. Steps of one call of Submit leave in their order; how they are grouped into requests is
// the encoder's.
func (l *Line) Submit(steps ...*Step) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		for _, s := range steps {
			s.fail(&redisconn.Failure{Cause: backend.ErrClosed, Fatal: true})
		}
		return
	}
	l.pending = append(l.pending, steps...)
	w := l.wire
	if w != nil && !l.o.Ordered && w.stalled() {
		l.retire()
		w = l.wire
	}
	switch {
	// There is no connection: the next one writes the pending steps.
	case w == nil:
		l.reach()
	// The present writer takes it along; behind a request that is overdue an ordered line sends nothing.
	case w.writing || l.o.Ordered && w.stalled():
	// Nothing is under way: the caller writes.
	case len(w.calls) == 0 && len(steps) <= maxOwn:
		w.writing = true
		l.mu.Unlock()
		if l.write(w) {
			w.kick <- struct{}{}
		}
		return
	default:
		w.writing = true
		w.kick <- struct{}{}
	}
	l.mu.Unlock()
}

// Doubt says that a caller has left without the answer to what was sent: what comes next had better take another
// connection. On an Ordered line there is no other one.
func (l *Line) Doubt() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := l.wire; w == nil || l.o.Ordered || len(w.calls) == 0 || time.Since(l.doubted) < doubtRest {
		return
	}
	l.doubted = time.Now()
	l.retire()
}

// Renew has what comes next take a new connection. The present one ends with the answers that it owes.
func (l *Line) Renew() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wire != nil {
		l.retire()
	}
}

// Addr returns where the present connection leads, nil without one.
func (l *Line) Addr() net.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wire == nil {
		return nil
	}
	return l.wire.RemoteAddr()
}

// retire leaves the present connection to its reader, unless too many have been left already: then pending steps
// wait with it. mu is held.
func (l *Line) retire() {
	w := l.wire
	// So many that owe answers say that the server is at fault, and not one connection.
	if l.wires > maxWires {
		return
	}
	l.wire = nil
	if len(w.calls) == 0 && !w.writing {
		w.part()
	}
	if len(l.pending) > 0 {
		l.reach()
	}
}

// reach connects in the background, unless that is under way. mu is held.
func (l *Line) reach() {
	if !l.connecting {
		l.connecting = true
		go l.connect(time.Now().Before(l.retry))
	}
}

// connect makes a connection, while steps stay pending, so that they can be dropped. After a failure it waits for a
// while, longer each time, or says the same again if the line is Ordered, since there others can answer instead: a
// server that is gone must not cost a connection for every step.
//
// Only the steps that were pending before the try fail with it. Those that came meanwhile have another try.
func (l *Line) connect(wait bool) {
	if wait && !l.o.Ordered {
		// This goroutine alone sets retry, and there is one at a time.
		time.Sleep(time.Until(l.retry))
		wait = false
	}
	l.mu.Lock()
	f, before := l.refused, len(l.pending)
	l.mu.Unlock()
	var conn net.Conn
	if !wait {
		var err error
		if conn, err = l.o.Connect(); err != nil {
			refused := *redisconn.FailureOf(err)
			refused.Sent = false
			f = &refused
			l.o.Report(f)
		}
	}
	l.mu.Lock()
	l.connecting = false
	if conn == nil {
		if !wait {
			l.misses++
			l.refused, l.retry = f, time.Now().Add(redisconn.Backoff(l.misses))
		}
		failed := l.take(before)
		if len(l.pending) > 0 { // they came later, when things may have been different
			l.connecting = true
			go l.connect(wait)
		}
		l.end()
		l.mu.Unlock()
		for _, s := range failed {
			s.fail(f)
		}
		return
	}
	l.refused, l.misses = nil, 0
	w := newWire(l, conn)
	l.wire = w
	l.wires++
	w.writing = true
	l.mu.Unlock()
	go w.write()
	go w.serve()
	w.kick <- struct{}{}
}

// take takes up to n pending steps that nobody has dropped. mu is held.
func (l *Line) take(n int) (steps []*Step) {
	n = min(n, len(l.pending))
	for _, s := range l.pending[:n] {
		if s.state.CompareAndSwap(pending, taken) {
			steps = append(steps, s)
		}
	}
	l.returned = max(0, l.returned-n)
	left := copy(l.pending, l.pending[n:])
	clear(l.pending[left:])
	l.pending = l.pending[:left]
	return steps
}

// giveBack puts steps that were under way before all that was submitted later. Nothing of them was run: they did not
// leave, or the server did not know the script. They can be dropped again until the next connection takes them. mu is
// held.
func (l *Line) giveBack(steps []*Step) {
	for _, s := range steps {
		s.state.Store(pending)
	}
	l.pending = slices.Insert(l.pending, l.returned, steps...)
	l.returned += len(steps)
}

// Close ends the line when pending steps have been sent and answered. The channel tells when that is done: within
// answerTime of the last request, as every request has a deadline. Steps submitted later fail with backend.ErrClosed.
func (l *Line) Close() (ended <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return l.ended
	}
	l.closed = true
	if w := l.wire; w != nil && len(w.calls) == 0 && !w.writing {
		w.part()
	}
	l.end()
	return l.ended
}

// end notes the end of the line, if this is it. mu is held.
func (l *Line) end() {
	if l.closed && l.wires == 0 && !l.connecting {
		select {
		case <-l.ended:
		default:
			close(l.ended)
		}
	}
}
