package redlock

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/fencelock/fencelock/internal/redisconn"
)

// work is the goroutine of a node's line. Each turn is the life of one connection, or a failure to get one.
func (n *node) work() {
	l := &n.line
	defer close(l.ended)
	for l.await() {
		w, f := n.reach()
		if f == nil {
			f = w.failure(n.serve(w))
			w.end(n.abort(f))
		} else {
			l.mu.Lock()
			l.take()
			l.mu.Unlock()
			n.abort(f)
		}
	}
}

// await waits until something is pending, for which to connect. It is false when the line was closed and nothing is.
func (l *line) await() bool {
	for {
		l.mu.Lock()
		l.busy = len(l.pending) > 0
		busy, closed := l.busy, l.closed
		l.mu.Unlock()
		if busy || closed {
			return busy
		}
		<-l.wake
	}
}

// reach connects, while steps stay pending, so that they can be dropped. After a failure it says the same again for a
// while, longer each time: a server that is gone must not cost a connection for every step.
func (n *node) reach() (*wire, *redisconn.Failure) {
	l := &n.line
	if time.Now().Before(l.retry) {
		return nil, l.refused
	}
	w, f := n.connect()
	if f != nil {
		n.sick.Store(true)
		l.misses++
		l.refused, l.retry = f, time.Now().Add(redisconn.Backoff(l.misses))
		return nil, f
	}
	l.refused, l.misses = nil, 0
	return w, nil
}

// abort forgets a connection, and ends the exchange that is under way without an answer, if there is one.
func (n *node) abort(f *redisconn.Failure) (busy bool) {
	l := &n.line
	l.mu.Lock()
	l.wire = nil
	busy = l.busy
	l.mu.Unlock()
	if !busy {
		return false // the line was idle, and its next step will connect
	}
	n.sick.Store(true)
	for _, s := range l.flight {
		s.fail(n, f)
	}
	clear(l.flight)
	l.mu.Lock()
	l.busy = false
	l.mu.Unlock()
	return true
}

// serve is the life of one connection.
func (n *node) serve(w *wire) error {
	l := &n.line
	for {
		l.mu.Lock()
		l.wire = w
		l.take()
		busy, closed := l.busy, l.closed
		if busy {
			n.depart()
		}
		l.mu.Unlock()
		switch {
		case busy:
			w.flush()
		case closed:
			return net.ErrClosed
		}
		if err := l.arrival(w); err != nil {
			return err
		}
		if err := n.land(w); err != nil {
			return err
		}
	}
}

// arrival waits for the first byte of an answer, however long the line is idle before its request.
func (l *line) arrival(w *wire) error {
	for {
		_, err := w.in.Peek(1)
		l.mu.Lock()
		busy, over := l.busy, !time.Now().Before(l.deadline)
		if err != nil && !busy {
			_ = w.SetDeadline(time.Time{}) // of the last exchange
		}
		l.mu.Unlock()
		var silence net.Error
		switch {
		case err == nil && busy:
			return nil
		case err == nil:
			return fmt.Errorf("%w: it speaks unasked", errProtocol)
		case !errors.As(err, &silence) || !silence.Timeout() || busy && over:
			return err
		}
	}
}

// land reads the answers to the present exchange and completes its steps. After an error the flight is what is left.
func (n *node) land(w *wire) error {
	l := &n.line
	var again []*step
	for len(l.flight) > 0 {
		for len(l.flight) > 0 {
			call := l.flight[:min(maxSteps, len(l.flight))]
			answer, err := w.receive()
			if err != nil {
				l.flight = append(again, l.flight...)
				return err
			}
			if missing(answer) { // the server's scripts were flushed: it has not run
				again = append(again, call...)
			} else {
				n.complete(call, answer)
			}
			l.flight = l.flight[len(call):]
		}
		if len(again) > 0 {
			l.flight, again = again, nil
			w.encode(eval, n.d.channels, l.flight)
			w.flush()
		}
	}
	return nil
}

func missing(answer any) bool {
	err, isError := answer.(redisconn.ServerError)
	return isError && strings.HasPrefix(string(err), "NOSCRIPT")
}

// complete hands each step of one call its answer.
func (n *node) complete(call []*step, answer any) {
	answers, _ := answer.([]any)
	var f *redisconn.Failure
	if err, isError := answer.(redisconn.ServerError); isError {
		f = redisconn.FailureOf(err)
	} else if len(answers) != len(call) {
		f = &redisconn.Failure{Cause: redisconn.ErrAnswer, Sent: true}
	}
	n.sick.Store(f != nil)
	for i, s := range call {
		if f != nil {
			s.err = f
		} else if text, isError := answers[i].(string); isError {
			s.err = redisconn.FailureOf(redisconn.ServerError(text))
		} else {
			s.answer = answers[i]
		}
		s.end(n)
	}
	clear(call)
}
