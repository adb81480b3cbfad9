package rediswire

// This file is one connection. Its life: connect makes it; write sends the pending steps, by the goroutine that kick
// wakes or by a caller; read completes steps in the order in which their calls were sent, which is the order of the
// answers; and serve ends it: first nobody writes any more, then the steps without an answer fail, and then the
// connection is drained, so that steps on the next one are not overtaken by steps that this one still carries.

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// wire is one connection to a server on which steps are sent, in the server's protocol (RESP2) and nothing beside.
//
// The client library was rejected for this: its pool, checks and hooks around a call cost more than the call, its
// pipelines wait for each other, and it does not tell whether a command has left the process, which is the difference
// between ErrUnavailable and ErrUnknown.
type wire struct {
	net.Conn
	l  *Line
	in *bufio.Reader
	// Wakes the writer; has room for one, and the goroutine that sets writing may send one. serve closes it when nobody
	// writes any more.
	kick chan struct{}

	// Calls that were sent and not answered, the oldest first.
	calls []call
	// The steps of these calls.
	flight []*Step
	// latest is the latest deadline of the steps in flight.
	latest time.Time
	// Somebody writes, or is about to.
	writing bool
	// written is signalled when that has ended.
	written *sync.Cond
	// Steps at the end of flight of which nothing has left.
	unsent int
	// finished says that the read has failed: nothing more is sent.
	finished bool
	// Who reads answers.
	reading reading
	// When the last answer came.
	last time.Time
	// Answers in a row that came soon after the one before.
	brisk int
	// Until when nobody reads its own answer, since one took too long.
	slow time.Time
	// Writes have a deadline.
	bounded bool

	enc encoder // the writer's
	own own     // the reader's
}

// newWire makes the wire of a connection. Its goroutines are started by connect.
func newWire(l *Line, c net.Conn) *wire {
	w := &wire{Conn: c, l: l, kick: make(chan struct{}, 1), written: sync.NewCond(&l.mu)}
	w.own.turn = make(chan struct{}, 1)
	w.in = bufio.NewReader(reader{w})
	return w
}

const (
	// keptMemory is the part of a large request's memory that is kept.
	keptMemory = 64 << 10
	// smallWrite is the size that an idle connection's buffers take at once.
	smallWrite = 8 << 10
)

// write is the goroutine that writes what has piled up. It yields before each write: callers that are about to submit
// come along, and one write takes them all. It ends when serve closes kick.
func (w *wire) write() {
	for range w.kick {
		for {
			runtime.Gosched() // let those who are about to submit come along
			if !w.l.write(w) {
				break
			}
		}
	}
}

// write sends the pending steps, once, and reports whether there is more. Only the goroutine that has set w.writing
// calls it.
func (l *Line) write(w *wire) (more bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var steps []*Step
	// A connection that was left, or has failed, writes nothing more; the pending steps are the next one's.
	if l.wire == w && !w.finished && !(l.o.Ordered && w.stalled()) {
		steps = l.take(maxWrite)
	}
	if len(steps) > 0 {
		w.depart(steps)
		l.mu.Unlock()
		n, err := w.Write(w.enc.out)
		if cap(w.enc.out) > keptMemory {
			w.enc.out = nil
		}
		l.mu.Lock()
		if err != nil {
			// Nothing has left: these steps can go by the next connection as if they had not been taken.
			if n == 0 {
				w.unsent = len(steps)
			}
			w.part() // which its reader notices
		} else if len(l.pending) > 0 && l.wire == w {
			return true
		}
	}
	w.writing = false
	w.written.Broadcast()
	if w.idle() {
		w.part()
	}
	return false
}

// part closes the connection, which ends the read. Line.mu is held.
func (w *wire) part() {
	_ = w.Close() // there is nothing to lose
	w.attend()
}

// depart writes the requests for steps to memory and sets the deadlines of the connection. The reader sets the read
// deadline anew for each answer (reader); here it is set for the first request only. Line.mu is held.
func (w *wire) depart(steps []*Step) {
	l := w.l
	now := time.Now()
	bound := now.Add(answerTime)
	last := now // a late step has its chance, too
	for _, s := range steps {
		if s.Deadline.IsZero() || s.Deadline.After(bound) {
			last = bound
			break
		}
		if s.Deadline.After(last) {
			last = s.Deadline
		}
	}
	if last = last.Add(grace); last.After(w.latest) || len(w.calls) == 0 {
		w.latest = last
	}
	mark(steps, l.o.Clock.Now())
	first := len(w.calls) == 0
	w.enc.encode(steps, l.o.Channels, l.o.Sharded != nil && l.o.Sharded(), func(k kind, steps []*Step) {
		w.calls = append(w.calls, call{kind: k, steps: len(steps), sent: now})
		w.flight = append(w.flight, steps...)
	})
	// From rest to the background, or to the caller that is writing: somebody has to read what comes.
	if first {
		w.attend()
	}
	switch {
	// The request of a lone caller: its read deadline is set already, and so small a write does not block.
	case w.reading == byCaller && first && len(w.enc.out) <= smallWrite:
		if w.bounded { // by what was written before
			w.bounded = false
			_ = w.SetWriteDeadline(time.Time{})
		}
		return
	case w.reading == inBackground && first:
		_ = w.SetDeadline(w.latest) // on a closed connection the read fails, too
	default:
		_ = w.SetWriteDeadline(w.latest)
	}
	w.bounded = true
}

// stalled reports whether an answer is long overdue. Line.mu is held.
func (w *wire) stalled() bool { return len(w.calls) > 0 && time.Since(w.calls[0].sent) > stallTime }

// idle reports whether the connection is of no more use: it owes nothing, and another one is the present one or the
// line is closed. Line.mu is held.
func (w *wire) idle() bool {
	l := w.l
	return len(w.calls) == 0 && !w.writing && (l.wire != w || l.closed && len(l.pending) == 0)
}

// over returns until when the connection has time for an answer; zero if it owes none. Line.mu is held.
func (w *wire) over() time.Time {
	if len(w.calls) == 0 {
		return time.Time{}
	}
	if bound := w.calls[0].sent.Add(answerTime + grace); bound.Before(w.latest) {
		return bound
	}
	return w.latest
}

// reader reads from a wire, as long as an answer may take.
type reader struct{ w *wire }

// Read sets the deadline of the answers owed, and looks again when it has passed: what was sent meanwhile may allow
// more. A connection that owes nothing is read without a deadline, so that its end is noticed.
func (r reader) Read(p []byte) (int, error) {
	w := r.w
	if w.own.first {
		return w.Conn.Read(p)
	}
	w.own.until = time.Time{}
	for {
		w.l.mu.Lock()
		_ = w.SetReadDeadline(w.over()) // on a closed connection the read fails, too
		w.l.mu.Unlock()
		n, err := w.Conn.Read(p)
		var silence net.Error
		if n > 0 || !errors.As(err, &silence) || !silence.Timeout() {
			return n, err
		}
		w.l.mu.Lock()
		over := w.over()
		w.l.mu.Unlock()
		if !over.IsZero() && !time.Now().Before(over) {
			return n, err
		}
	}
}

// serve is the life of a connection, and its end. The order of the end matters: the writer is stopped before the flight
// is divided into what has left and what has not; the steps that have not left take the next connection, before all
// that was submitted later; the others fail, with drained for those who tidy up; and the connection is half-closed and
// read to its end before drained is closed.
func (w *wire) serve() {
	err := w.read()
	l := w.l
	_ = w.SetWriteDeadline(time.Unix(1, 0)) // so that the writer ends
	l.mu.Lock()
	w.finished = true
	for w.writing {
		w.written.Wait()
	}
	close(w.kick) // nobody writes any more
	if l.wire == w {
		l.wire = nil
	}
	left := w.flight[:len(w.flight)-w.unsent]
	if w.unsent > 0 { // they take the next connection
		l.giveBack(w.flight[len(left):])
	}
	w.flight, w.calls = nil, nil
	drained := make(chan struct{})
	if l.o.Ordered && len(left) > 0 {
		l.connecting = true // not before this one has ended
	} else if l.wire == nil && len(l.pending) > 0 {
		l.reach()
	} else if next := l.wire; len(l.pending) > 0 && !next.writing {
		next.writing = true
		next.kick <- struct{}{}
	}
	l.mu.Unlock()
	if len(left) == 0 {
		_ = w.Close()
		w.end(false)
		return
	}
	// A read error after something was sent counts as Sent: the server may have run it.
	f := redisconn.FailureOf(err)
	l.o.Report(f)
	// The server sees the end of the requests, runs those received, and ends the connection itself.
	half, ok := w.Conn.(interface{ CloseWrite() error })
	wait := answerTime
	if l.o.Ordered {
		wait = time.Second
	}
	ok = ok && w.SetDeadline(time.Now().Add(wait)) == nil && half.CloseWrite() == nil
	for _, s := range left {
		if f.Sent && ok {
			s.Drained = drained
		}
		s.fail(f)
	}
	// What was sent is run, or never will be, before the connection ends on the server's side too: what tidies up
	// behind it must not come first.
	if ok {
		_, _ = io.Copy(io.Discard, w.Conn) // its end is all that matters
	}
	_ = w.Close()
	close(drained)
	w.end(l.o.Ordered)
}

// end notes that the connection has ended, and connects anew if that has waited for it, as on an ordered line that has
// steps pending.
func (w *wire) end(waited bool) {
	l := w.l
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wires--
	if waited {
		l.connecting = false
		if len(l.pending) > 0 {
			l.reach()
		}
	}
	l.end()
}

// read reads answers and completes their steps, until the connection ends.
func (w *wire) read() error {
	for {
		if _, err := w.in.Peek(1); err != nil {
			return err
		}
		if _, err := w.next(nil); err != nil {
			return err
		}
		if w.rest(); w.own.broken != nil {
			return w.own.broken
		}
	}
}

// next reads one answer, completes its steps, and reports whether s was one of these. An answer that nobody has asked
// for ends the connection: from there on no answer could be told from the next.
func (w *wire) next(s *Step) (found bool, err error) {
	l := w.l
	l.mu.Lock()
	if len(w.calls) == 0 {
		l.mu.Unlock()
		return false, fmt.Errorf("%w: it speaks unasked", errProtocol)
	}
	c := w.calls[0]
	w.own.steps = append(w.own.steps[:0], w.flight[:c.steps]...)
	steps := w.own.steps
	l.mu.Unlock()
	answer, err := w.answer(c, steps[0].Asking)
	if err != nil {
		return false, err
	}
	found = slices.Contains(steps, s)
	if w.landed(c, steps, answer) {
		err = net.ErrClosed
	}
	return found, err
}

// answer reads the answer to one call. The two commands of a take are one answer to its caller. With ASKING each
// command has an answer before its own, which says nothing.
func (w *wire) answer(c call, asking bool) (answer any, err error) {
	receive := func() (any, error) {
		if asking {
			if _, err := receive(w.in, maxDepth); err != nil {
				return nil, err
			}
		}
		return receive(w.in, maxDepth)
	}
	if answer, err = receive(); err != nil || !c.kind.native() {
		return answer, err
	}
	var waiting any
	// The second answer is read even where the first is an error: both are under way.
	if c.kind == takes {
		waiting, err = receive()
	}
	switch {
	case err != nil || answer == nil:
		answer = redisscript.TakeRefused
	case answer != "OK":
	case waiting == int64(1):
		answer = redisscript.TakeAhead
	default:
		answer = redisscript.TakeGranted
	}
	return answer, err
}

// landed completes the steps of a call, and reports whether the connection has done all that it was kept for. Two
// answers are no end for the steps or for the connection: after NOSCRIPT, which has run nothing, the steps are sent
// again with the script's source; after READONLY the server is a replica now, and what comes next takes a connection to
// the new master.
func (w *wire) landed(c call, steps []*Step, answer any) (done bool) {
	l := w.l
	refused, isError := answer.(redisconn.ServerError)
	again := isError && strings.HasPrefix(string(refused), "NOSCRIPT") // its scripts were flushed: it has not run
	mine := steps
	l.mu.Lock()
	if again {
		mine = slices.Clone(steps)
		for _, s := range mine {
			s.inline = true
		}
	}
	w.calls = behind(w.calls, 1)
	w.flight = behind(w.flight, c.steps)
	now := time.Now()
	// The connection was at rest: the count of answers that let callers read begins again.
	if now.Sub(w.last) >= restTime {
		w.brisk = 0
	}
	w.brisk, w.last = w.brisk+1, now
	if again {
		l.giveBack(mine)
	}
	if isError && strings.HasPrefix(string(refused), "READONLY") && l.wire == w && !l.o.Ordered {
		l.wire = nil // the server has become a replica, and another one the master
	}
	switch {
	case len(l.pending) == 0:
	case l.wire == nil:
		l.reach()
	case l.wire == w && !w.writing:
		w.writing = true
		w.kick <- struct{}{}
	}
	done = w.idle()
	l.mu.Unlock()
	if !again {
		w.complete(c, mine, answer)
	}
	return done
}

// behind returns what comes behind the first n of all. If these are few they keep their memory: appending to a slice
// that is cut at its front would grow it again and again.
func behind[T any](all []T, n int) []T {
	if len(all) > 256 {
		return all[n:]
	}
	return slices.Delete(all, 0, n)
}

// complete hands each step of one call its answer. An error of the call is that of each step; a text in the list of
// answers is the error of that one.
func (w *wire) complete(c call, steps []*Step, answer any) {
	var f *redisconn.Failure
	answers := []any{answer}
	if refused, isError := answer.(redisconn.ServerError); isError {
		f = redisconn.FailureOf(refused)
	} else if !c.kind.native() {
		if answers, _ = answer.([]any); len(answers) != len(steps) {
			f = &redisconn.Failure{Cause: redisconn.ErrAnswer, Sent: true}
		}
	} else if _, known := answer.(int64); !known {
		f = &redisconn.Failure{Cause: redisconn.ErrAnswer, Sent: true}
	}
	w.l.o.Report(f)
	for i, s := range steps {
		if f != nil {
			s.Err = f
		} else if text, isError := answers[i].(string); isError {
			s.Err = redisconn.FailureOf(redisconn.ServerError(text))
		} else {
			s.Answer = answers[i]
		}
	}
	for _, s := range steps {
		s.Owner.Ended() // and the step is its owner's again
	}
}
