package rediswire

import (
	"errors"
	"net"
	"time"
)

// A lone caller writes its request, and reads the answer, on its own goroutine: two hand-overs between goroutines cost
// more than all that is done beside the system calls. So of a connection that one caller at a time uses again and again,
// nobody reads between two exchanges. As soon as it rests, or has more than one request in flight, the goroutine of its
// own reads, and notices its end.
const (
	restTime = 10 * time.Millisecond // without an exchange, after which the connection is read in the background
	briskRun = 4                     // answers without such a rest, after which callers read
	ownTime  = 5 * time.Millisecond  // for which a caller reads, up to twice that, and does not see its context's end
	slowTime = 50 * time.Millisecond // in the background, after an answer that took longer than that
)

// reading says who reads.
type reading uint8

const (
	inBackground reading = iota
	byCaller
	byNobody
)

// own is what is handed on with the right to read.
type own struct {
	turn   chan struct{} // gives the right to the background; has room for one
	steps  []*Step       // of the call that is being answered
	first  bool          // a caller waits for the first byte of its answer
	until  time.Time     // for which a caller may read; zero: another deadline is set
	broken error         // why a caller could not read on
}

// Carry is Submit for one step whose caller will wait for it. If nothing else is under way the step may have ended when
// it returns.
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

// readOwn reads answers until that of s has come, or has taken too long.
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

// rest leaves the reading to callers, as long as they come one at a time and soon.
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
