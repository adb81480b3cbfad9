package rediswire

import (
	"fmt"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/redisscript"
)

// readBy tells who reads the present connection.
func (l *Line) readBy() reading {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wire == nil {
		return inBackground
	}
	return l.wire.reading
}

// alone makes exchanges of one caller until nobody reads between them, and returns the server's end.
func alone(t *testing.T, s *server, l *Line) *peer {
	t.Helper()
	p := s.last
	for end := time.Now().Add(time.Minute); l.readBy() != byNobody; {
		if time.Now().After(end) {
			t.Fatal("callers never read")
		}
		o := setting("alone")
		l.Submit(o.Step)
		select {
		case p = <-s.peers:
		default:
		}
		if p == nil {
			p = <-s.peers
		}
		s.last = p
		p.request()
		p.reply("+OK\r\n")
		o.want(t, redisscript.TakeGranted)
	}
	return p
}

// await waits until ok.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// A lone caller has its answer when Carry returns, and reads as long as it comes back soon.
func TestCarryReads(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	go s.serve()
	l := s.line(false)
	own := 0
	await(t, "answers that their callers have read", func() bool {
		for range 50 {
			alone := l.readBy() == byNobody
			o := setting("n")
			l.Carry(o.Step)
			if alone && o.times.Load() == 1 {
				own++
			}
			o.want(t, redisscript.TakeGranted)
		}
		return own >= 100
	})
	await(t, "a connection at rest is read", func() bool { return l.readBy() == inBackground })
}

// An answer that takes long does not keep its caller, and who comes meanwhile has its own.
func TestCarryLeaves(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(false)
	p := alone(t, s, l)
	late, other := setting("late"), setting("other")
	l.Carry(late.Step) // returns without an answer
	if late.times.Load() != 0 {
		t.Fatal("told without an answer")
	}
	l.Submit(other.Step)
	for range 2 {
		p.request()
	}
	p.reply("+OK\r\n$-1\r\n")
	late.want(t, redisscript.TakeGranted)
	other.want(t, redisscript.TakeRefused)
}

// Steps that come while a caller reads its own answer have theirs.
func TestCarryBesideOthers(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(false)
	for i := range 20 {
		p := alone(t, s, l)
		mine, other := setting(fmt.Sprint("mine", i)), setting(fmt.Sprint("other", i))
		go l.Carry(mine.Step)
		p.request()
		l.Submit(other.Step)
		p.request()
		p.reply("+OK\r\n$-1\r\n")
		mine.want(t, redisscript.TakeGranted)
		other.want(t, redisscript.TakeRefused)
	}
}

// A connection that breaks while a caller reads, or while nobody does, is told as ever.
func TestCarryBreaks(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(false)
	p := alone(t, s, l)
	o := setting("n")
	go l.Carry(o.Step)
	p.request()
	p.Close()
	o.wantFailure(t, true)
	select {
	case <-o.Drained:
	case <-time.After(time.Minute):
		t.Fatal("the end of what was sent is never known")
	}
	s.last = nil
	p = alone(t, s, l)
	p.Close()
	await(t, "the end is noticed", func() bool { return l.Addr() == nil })
	go s.serve()
	next := setting("next")
	l.Carry(next.Step)
	next.want(t, redisscript.TakeGranted)
}

// Renew and Close end a connection that nobody reads.
func TestCarryEnds(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(false)
	for _, end := range []func(){l.Renew, func() { <-l.Close() }} {
		s.last = nil
		p := alone(t, s, l)
		end()
		if _, ok := p.next(); ok {
			t.Error("something was sent")
		}
	}
}
