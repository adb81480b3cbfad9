package rediswire

// This file is the line. An exchange (exchange.go) carries all steps that are pending when it begins:
//
//	Submit, Carry ─► Line.pending ─► a wire's exchange ─► Owner.Ended
//	                    ▲                │ of which nothing has left
//	                    └────────────────┘
//
// The exchanges of an Ordered line go one after the other. On others a second one goes beside a full one, and further
// ones while exchanges last long. A wire is one connection and its goroutine. Line.mu protects the state of a line and
// of its wires; it is not held during an exchange or while an Owner is notified.
//
// A step is handed on by its state, an atomic: pending until an exchange takes it, dropped if its caller drops it
// before. Only a taken step may have left the process, and so is ErrUnknown instead of ErrUnavailable.

import (
	"cmp"
	"context"
	"errors"
	"net"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
)

const (
	// maxTaken bounds the steps of one exchange.
	maxTaken = 4096
	// answerTime is the maximum duration of an exchange, whatever its steps allow.
	answerTime = 3 * time.Second
	// grace is added to the steps' deadlines: their callers leave by themselves, and return the reason.
	grace = 20 * time.Millisecond
	// patience is the time for which steps wait for the only exchange in progress. It doubles with each further one.
	patience = 5 * time.Millisecond
	// orderTime is the maximum time for which an ordered line waits until the server has executed the requests of an
	// ended connection.
	orderTime = time.Second
	// maxAbreast bounds the exchanges of single steps that are in progress before steps wait, and the connections that
	// are kept while nothing is sent.
	maxAbreast = 4
	// maxWires bounds the connections: with so many that owe replies the server is at fault, and not a connection.
	maxWires = 16
)

// Options configure a line.
type Options struct {
	// Connect makes a connection. It is called on a separate goroutine, one at a time.
	Connect func() (*Conn, error)
	Clock   backend.Clock
	// Channels is the prefix of the channels for pushes, for the script.
	Channels string
	// Sharded reports whether names may be on different servers; nil: no.
	Sharded func() bool
	// Ordered keeps steps in the order of their submission from one connection to the next: the server has executed the
	// steps of the last connection, or orderTime has passed, before a step is sent on a new one.
	Ordered bool
	// Report is called with the outcome of each call: nil for an answer that is no error.
	Report func(*redisconn.Failure)

	patience time.Duration // in place of the constant
}

// Line carries steps to one server. A lone caller carries out its exchange itself, since handing it to another
// goroutine would cost as much as all the rest.
type Line struct {
	o Options

	mu         sync.Mutex // protects the following fields, and those of the wires
	pending    []*Step
	returned   int // how many steps at the beginning of pending were taken before
	tried      int // how many steps at the beginning of pending fail with the present try to connect
	wires      []*wire
	idle       []*wire
	busy       int  // exchanges that pending steps wait for
	many       int  // of these, with more than one step
	last       int  // the steps of the last exchange
	connecting bool // a goroutine connects
	closed     bool
	ended      chan struct{} // closed when the line is closed and its last connection has ended

	refused *redisconn.Failure // why the last try to connect failed
	misses  int                // tries in a row that have failed, or led to an unusable connection
	retry   time.Time          // when to make the next one
}

// wire is one connection of a line, and the goroutine that carries out its exchanges.
type wire struct {
	*Conn
	l       *Line
	kick    chan struct{} // has room for one; wakes the goroutine
	late    *time.Timer   // ends the waiting of others for the exchange
	awaited bool          // pending steps wait for its exchange
	many    bool          // of more than one step
	old     bool          // it ends after its exchange
	broken  bool
}

// NewLine returns a line that connects with its first step.
func NewLine(o Options) *Line {
	o.patience = cmp.Or(o.patience, patience)
	return &Line{o: o, ended: make(chan struct{})}
}

// Submit sends steps, in their order. The Owner of each is notified in the end, unless the step was dropped. Submit
// does not wait for the connection.
func (l *Line) Submit(steps ...*Step) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		for _, s := range steps {
			s.fail(&redisconn.Failure{Cause: backend.ErrClosed, Fatal: true})
		}
		return
	}
	defer l.mu.Unlock()
	l.pending = append(l.pending, steps...)
	l.next()
}

// next begins an exchange of pending steps, if they do not have to wait for another one. mu is held.
func (l *Line) next() {
	if n := len(l.pending); n == 0 || !l.abreast(n) {
		return
	}
	if n := len(l.idle); n > 0 {
		w := l.idle[n-1]
		l.idle = l.idle[:n-1]
		w.begin(len(l.pending))
		w.kick <- struct{}{}
	} else if !l.connecting && len(l.wires) < maxWires {
		l.connecting = true
		go l.connect()
	}
}

// abreast reports whether an exchange of n steps can begin beside those in progress. Callers that come one at a time
// do not wait for each other, and many callers share two exchanges: one is in transit while the server executes the
// other. mu is held.
func (l *Line) abreast(n int) bool {
	switch {
	case l.busy == 0:
		return true
	case l.o.Ordered:
		return false
	case n == 1:
		return l.many == 0 && l.last <= 1 && l.busy < maxAbreast
	default:
		return l.busy == 1 && n >= l.last
	}
}

// begin has pending steps wait for the exchange of w, of n steps. mu is held.
func (w *wire) begin(n int) {
	l := w.l
	if !w.awaited {
		w.awaited = true
		l.busy++
	}
	if n > 1 && !w.many {
		w.many = true
		l.many++
	}
	l.last = n
	w.late.Reset(l.o.patience << min(max(len(l.wires)-len(l.idle)-1, 0), 10))
}

// release lets pending steps go before the exchange of w has ended, or behind it. mu is held.
func (w *wire) release() {
	l := w.l
	if w.awaited {
		w.awaited = false
		l.busy--
		if w.many {
			w.many = false
			l.many--
		}
	}
	l.next() // even for steps that an overdue exchange has put back
}

// overdue is called when an exchange has lasted long.
func (w *wire) overdue() {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	if !w.l.o.Ordered {
		w.release()
	}
}

// Carry is Submit for one step whose caller waits for it until ctx ends. If nothing else is in progress the step has
// ended when Carry returns.
func (l *Line) Carry(ctx context.Context, s *Step) {
	l.mu.Lock()
	if l.closed || l.o.Ordered || len(l.pending) > 0 || len(l.idle) == 0 || l.last > 1 || !l.abreast(1) {
		l.mu.Unlock()
		l.Submit(s)
		return
	}
	s.state.Store(taken)
	w := l.idle[len(l.idle)-1]
	l.idle = l.idle[:len(l.idle)-1]
	w.begin(1)
	l.mu.Unlock()
	stop := context.AfterFunc(ctx, w.net.abort)
	alive, again := w.exchange(&l.o, []*Step{s})
	if !stop() {
		alive, w.used = false, true
	}
	w.finish(alive, again)
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.broken || w.old || l.closed || len(l.pending) > 0 {
		w.kick <- struct{}{}
	} else {
		w.rest()
	}
}

// finish notes the end of an exchange; its steps in again were not executed. They go out on the next connection,
// unless this one has ended before anything left on it: that is a failed try to connect.
func (w *wire) finish(alive bool, again []*Step) {
	l := w.l
	l.mu.Lock()
	w.broken = !alive
	if w.used {
		l.refused, l.misses, l.retry = nil, 0, time.Time{}
		l.putBack(again)
		l.mu.Unlock()
		return
	}
	l.miss(errUnused)
	l.mu.Unlock()
	l.o.Report(errUnused)
	for _, s := range again {
		s.fail(errUnused)
	}
}

// rest keeps w for the next exchange. mu is held.
func (w *wire) rest() {
	w.late.Stop()
	w.used = true // its end no longer means that connecting has failed
	w.l.idle = append(w.l.idle, w)
	w.release()
}

// serve is the goroutine of w.
func (w *wire) serve() {
	for range w.kick {
		if !w.work() {
			w.end()
			return
		}
	}
}

// work carries out exchanges as long as steps are pending. It is false if the connection has to end.
func (w *wire) work() bool {
	l := w.l
	for {
		runtime.Gosched() // callers that are about to submit come along
		l.mu.Lock()
		if w.broken || w.old {
			l.mu.Unlock()
			return false
		}
		steps := l.take(maxTaken)
		if len(steps) == 0 {
			ends := l.closed || len(l.idle) >= maxAbreast
			if !ends {
				w.rest()
			}
			l.mu.Unlock()
			return !ends
		}
		w.begin(len(steps))
		l.mu.Unlock()
		w.finish(w.exchange(&l.o, steps))
	}
}

// end ends the connection. What was sent on it has been carried out, or never will be, before the line has ended, and
// before anything else is sent on an ordered line.
func (w *wire) end() {
	l := w.l
	_ = w.client.Close() // the connection may be broken
	w.late.Stop()
	if l.o.Ordered {
		over := time.NewTimer(orderTime)
		select {
		case <-w.net.drained:
		case <-over.C:
		}
		over.Stop()
	}
	l.mu.Lock()
	w.release()
	l.mu.Unlock()
	<-w.net.drained
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wires = slices.DeleteFunc(l.wires, func(other *wire) bool { return other == w })
	l.next()
	l.finished()
}

// connect makes a connection, while steps stay pending, so that they can be dropped. After a failure it waits for a
// while, longer each time, or returns the same error if the line is Ordered, since another server can answer instead: a
// server that is gone, or closes its connections, must not cost a connection for every step.
//
// Only the steps that have been pending since before the try fail with it. Later ones have another try.
func (l *Line) connect() {
	l.mu.Lock()
	pause, f := time.Until(l.retry), l.refused
	l.mu.Unlock()
	tries := pause <= 0 || !l.o.Ordered
	if tries {
		time.Sleep(pause)
	}
	l.mu.Lock()
	l.tried = len(l.pending)
	l.mu.Unlock()
	var conn *Conn
	if tries {
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
		if tries {
			l.miss(f)
		}
		failed := l.take(l.tried)
		l.next() // others came later, when things may have been different
		l.finished()
		l.mu.Unlock()
		for _, s := range failed {
			s.fail(f)
		}
		return
	}
	defer l.mu.Unlock()
	l.tried = 0
	w := &wire{Conn: conn, l: l, kick: make(chan struct{}, 1)}
	w.late = time.AfterFunc(answerTime, w.overdue)
	l.wires = append(l.wires, w)
	w.begin(len(l.pending))
	w.kick <- struct{}{}
	go w.serve()
}

// miss notes a try to connect that has failed with f. mu is held.
func (l *Line) miss(f *redisconn.Failure) {
	l.misses++
	l.refused, l.retry = f, time.Now().Add(redisconn.Backoff(l.misses))
}

// errUnused is the failure of steps for an unusable connection.
var errUnused = &redisconn.Failure{Cause: errors.New("the server closed the connection before its first request")}

// take takes up to n pending steps that no caller has dropped. mu is held.
func (l *Line) take(n int) (steps []*Step) {
	n = min(n, len(l.pending))
	for _, s := range l.pending[:n] {
		if s.state.CompareAndSwap(pending, taken) {
			steps = append(steps, s)
		}
	}
	l.returned, l.tried = max(0, l.returned-n), max(0, l.tried-n)
	left := copy(l.pending, l.pending[n:])
	clear(l.pending[left:])
	l.pending = l.pending[:left]
	return steps
}

// putBack puts steps that the server has not executed before all later steps. They can be dropped again. mu is held.
func (l *Line) putBack(steps []*Step) {
	for _, s := range steps {
		s.state.Store(pending)
	}
	l.pending = slices.Insert(l.pending, l.returned, steps...)
	l.returned += len(steps)
	if l.tried > 0 { // they are before these
		l.tried += len(steps)
	}
}

// Doubt notes that a caller has left without its answer: pending steps had better take another connection. On an
// Ordered line there is no other one.
func (l *Line) Doubt() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.wires {
		if w.awaited && !l.o.Ordered {
			w.release()
		}
	}
}

// Renew has later steps take a new connection. The present ones end with their exchanges.
func (l *Line) Renew() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.wires {
		w.old = true
	}
	l.endIdle()
}

// endIdle ends the connections that are at rest. mu is held.
func (l *Line) endIdle() {
	for _, w := range l.idle {
		w.old = true
		w.kick <- struct{}{}
	}
	l.idle = nil
}

// Addr returns where the latest connection leads, nil without one.
func (l *Line) Addr() net.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range slices.Backward(l.wires) {
		if !w.old && !w.broken {
			return w.net.RemoteAddr()
		}
	}
	return nil
}

// Close ends the line when pending steps have been sent and answered. The channel is closed when that is done: within
// answerTime of the last exchange. Steps submitted later fail with backend.ErrClosed.
func (l *Line) Close() (ended <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.closed = true
		l.endIdle()
		l.finished()
	}
	return l.ended
}

// finished notes the end of a closed line. mu is held.
func (l *Line) finished() {
	if l.closed && len(l.wires) == 0 && !l.connecting {
		select {
		case <-l.ended:
		default:
			close(l.ended)
		}
	}
}
