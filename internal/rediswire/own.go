package rediswire

// A lone caller writes its request, and reads the answer, on its own goroutine: two hand-overs between goroutines cost
// more than all that is done beside the system calls. So of a connection that one caller at a time uses again and
// again, nobody reads between two exchanges. As soon as it rests, or has more than one request in flight, the goroutine
// of the connection reads, and notices its end.
//
// The right to read is wire.reading, which changes under Line.mu only. It goes from the background to nobody when the
// background has read its last answer (rest), from nobody to a caller with its request (Carry), and back to nobody or
// to the background with its answer (readOwn). turn wakes the background for that.
//
// The price is that a caller in readOwn does not see the end of its context: for at most twice ownTime, by a read
// deadline that is set once for several exchanges.

import (
	"errors"
	"net"
	"time"
)

// A lone caller writes its request, and reads the answer, on its own goroutine: two hand-overs between goroutines cost
// more than all that is done beside the system calls. So of a connection that one caller at a time uses again and
// again, nobody reads between two exchanges. As soon as it rests, or has more than one request in flight, the goroutine
// of the connection reads, and notices its end.
const (
	// restTime is the time without an exchange after which the connection is read in the background.
	restTime = 10 * time.Millisecond
	// briskRun is how many answers without such a rest let callers read.
	briskRun = 4
	// ownTime is how long a caller reads, up to twice that, without seeing its context's end.
	ownTime = 5 * time.Millisecond
	// slowTime is how long the background reads after an answer that took longer than ownTime.
	slowTime = 50 * time.Millisecond
)

// reading says who reads.
type reading uint8

const (
	// inBackground: the connection's own goroutine.
	inBackground reading = iota
	// byCaller: the goroutine in Carry.
	byCaller
	// byNobody: the next caller will, or the background if none comes soon.
	byNobody
)

// own is handed on with the right to read. The goroutine with that right reads and writes it without a lock.
type own struct {
	// Gives the right to the background; has room for one, since at most one has it to give.
	turn chan struct{}
	// Of the call that is being answered; the memory is used again.
	steps []*Step
	// A caller waits for the first byte of its answer, with a deadline that reader must leave alone.
	first bool
	// The read deadline that is set for callers; zero: another one is set.
	until time.Time
	// Why a caller could not read on: the background ends the connection with it.
	broken error
}

// Carry is Submit for one step whose caller will wait for it. If nothing else is under way the step may have ended when
// it returns. A step whose deadline is so near that the caller could overlook it goes by Submit, as does every step
// while the server is slow: then the background reads, and the caller sees its context end.
func (l *Line) Carry(s *Step) {
	l.mu.Lock()
	w := l.wire
	now := time.Now()
	if l.closed || w == nil || w.reading != byNobody || w.writing || len(w.calls) > 0 || len(l.pending) > 0 ||
		now.Before(w.slow) || !s.Deadline.IsZero() && s.Deadline.Before(now.Add(2*ownTime)) {
		l.mu.Unlock()
		l.Submit(s)
		return
	}
	l.pending = append(l.pending, s)
	w.writing, w.reading = true, byCaller
	l.mu.Unlock()
	if l.write(w) {
		w.kick <- struct{}{}
	}
	w.readOwn(s, now)
}

// readOwn reads answers until that of s has come, or has taken too long; then the background reads on. It reads answers
// that others wait for too if these sent their requests meanwhile.
func (w *wire) readOwn(s *Step, now time.Time) {
	o := &w.own
	if o.until.Before(now.Add(ownTime)) {
		o.until = now.Add(2 * ownTime)
		_ = w.SetReadDeadline(o.until) // on a closed connection the read fails, too
	}
	for mine := false; !mine && o.broken == nil; {
		o.first = true
		_, err := w.in.Peek(1)
		o.first = false
		var silence net.Error
		// The answer takes long: the background waits for it, and this caller for its step.
		if errors.As(err, &silence) && silence.Timeout() {
			break
		}
		if err == nil {
			mine, err = w.next(s)
		}
		o.broken = err
	}
	l := w.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(w.calls) == 0 && o.broken == nil && l.wire == w && !l.closed {
		w.reading = byNobody
		return
	}
	// The server is slow just now: for a while nobody tries to read its own answer.
	if len(w.calls) > 0 && time.Since(now) >= ownTime {
		w.slow = time.Now().Add(slowTime)
	}
	w.reading = inBackground
	o.turn <- struct{}{}
}

// attend has the connection read in the background, unless somebody reads. Line.mu is held.
func (w *wire) attend() {
	if w.reading == byNobody {
		w.reading = inBackground
		w.own.turn <- struct{}{}
	}
}

// rest leaves the reading to callers, as long as they come one at a time and soon. It runs on the reading goroutine and
// returns when that one is to read again: a caller has given up reading, or nothing was sent for restTime. An end of
// the connection shows then, or to the next caller.
func (w *wire) rest() {
	l := w.l
	l.mu.Lock()
	if len(w.calls) > 0 || w.writing || l.closed || l.wire != w || l.o.Ordered || w.brisk < briskRun {
		l.mu.Unlock()
		return
	}
	w.reading = byNobody
	l.mu.Unlock()
	t := time.NewTimer(restTime)
	defer t.Stop()
	for {
		select {
		case <-w.own.turn:
			return
		case <-t.C:
		}
		l.mu.Lock()
		if w.reading == byNobody && time.Since(w.last) >= restTime {
			w.reading = inBackground
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
		t.Reset(restTime)
	}
}
