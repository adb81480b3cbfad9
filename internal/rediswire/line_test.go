package rediswire

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// peer is the server's end of one connection, as a test plays it.
type peer struct {
	t *testing.T
	net.Conn
	in *bufio.Reader
}

// request reads one request: its words.
func (p *peer) request() []string {
	p.t.Helper()
	words, ok := p.next()
	if !ok {
		p.t.Fatal("the connection has ended, want a request")
	}
	return words
}

func (p *peer) next() (words []string, ok bool) {
	answer, err := receive(p.in, maxDepth)
	list, _ := answer.([]any)
	for _, word := range list {
		words = append(words, word.(string))
	}
	return words, err == nil
}

func (p *peer) reply(text string) { _, _ = p.Write([]byte(text)) } // an error: the line has gone

// server is a Redis server of which a test plays every connection.
type server struct {
	t     *testing.T
	in    net.Listener
	peers chan *peer
	fail  atomic.Bool // to connect
	last  *peer       // that alone has talked to
}

func newServer(t *testing.T) *server {
	t.Helper()
	in, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, in: in, peers: make(chan *peer, 100)}
	t.Cleanup(func() { in.Close() })
	return s
}

func (s *server) connect() (net.Conn, error) {
	if s.fail.Load() {
		return nil, errors.New("nobody listens")
	}
	c, err := net.Dial("tcp", s.in.Addr().String())
	if err != nil {
		return nil, err
	}
	theirs, err := s.in.Accept()
	if err != nil {
		return nil, err
	}
	s.peers <- s.peer(theirs)
	return c, nil
}

func (s *server) peer(c net.Conn) *peer {
	s.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return &peer{s.t, c, bufio.NewReader(c)}
}

// serve answers everything, on all connections, as a server on which all names are free and all holds are there.
func (s *server) serve() {
	for {
		select {
		case p := <-s.peers:
			go func() {
				for {
					words, ok := p.next()
					if !ok {
						return
					}
					p.reply(answerTo(words))
				}
			}()
		case <-s.t.Context().Done():
			return
		}
	}
}

func answerTo(words []string) string {
	switch words[0] {
	case "set", "asking":
		return "+OK\r\n"
	case "exists":
		return ":0\r\n"
	}
	steps := 0
	if _, err := fmt.Sscan(words[2], &steps); err != nil {
		return "-ERR no number of keys\r\n"
	}
	return fmt.Sprintf("*%d\r\n%s", steps/3, strings.Repeat(":1\r\n", steps/3))
}

func (s *server) line(ordered bool) *Line {
	l := NewLine(Options{
		Connect: s.connect, Clock: backend.SystemClock(), Channels: "p:push:", Ordered: ordered,
		Report: func(*redisconn.Failure) {},
	})
	s.t.Cleanup(func() { l.Close() })
	return l
}

// told is a step whose end is counted.
type told struct {
	*Step
	times atomic.Int32
	done  chan struct{}
}

func (o *told) Ended() {
	if o.times.Add(1) == 1 {
		close(o.done)
	}
}

func newTold(code, name string, args ...string) *told {
	o := &told{Step: &Step{Code: code, Keys: redisscript.KeysOf("p:", name), Args: args}, done: make(chan struct{})}
	o.Owner = o
	return o
}

func setting(name string) *told { return newTold(redisscript.Set, name, "value", "100") }
func freeing(name string) *told { return newTold(redisscript.Free, name, "start") }

// end waits for the end of a step.
func (o *told) end(t *testing.T) {
	t.Helper()
	select {
	case <-o.done:
	case <-time.After(time.Minute):
		t.Fatalf("the step for %s does not end", o.Keys.Lock)
	}
}

// want ends a step that must have been answered so.
func (o *told) want(t *testing.T, answer any) {
	t.Helper()
	if o.end(t); o.Err != nil || o.Answer != answer {
		t.Errorf("%s was answered %v, %v, want %v", o.Keys.Lock, o.Answer, o.Err, answer)
	}
}

// wantFailure ends a step that must have failed.
func (o *told) wantFailure(t *testing.T, sent bool) {
	t.Helper()
	if o.end(t); o.Err == nil || o.Err.Sent != sent {
		t.Errorf("%s ended with %v, %+v, want a failure with Sent %v", o.Keys.Lock, o.Answer, o.Err, sent)
	}
}

// Steps of many callers are each answered once, with their own answers, and leave in the order of their submission.
func TestLineUnderLoad(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		s := newServer(t)
		go s.serve()
		l := s.line(ordered)
		var all sync.WaitGroup
		for i := range 32 {
			all.Go(func() {
				for n := range 50 {
					name := fmt.Sprint(i, "-", n)
					takes, frees := newTold(redisscript.Take, name, "value", "100"), freeing(name)
					l.Submit(takes.Step)
					takes.want(t, redisscript.TakeGranted)
					l.Carry(frees.Step)
					frees.want(t, int64(1))
					if takes.times.Load() != 1 || frees.times.Load() != 1 {
						t.Errorf("%s was told more than once", name)
					}
				}
			})
		}
		all.Wait()
	}
}

// What is submitted while the connection is being written to leaves with the next write: steps of one script in one
// call, up to a bound, and in their order.
func TestLineCoalesces(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ours, theirs := net.Pipe() // whose writes wait for their reader
	l := NewLine(Options{
		Connect: func() (net.Conn, error) { return ours, nil }, Clock: backend.SystemClock(),
		Report: func(*redisconn.Failure) {},
	})
	defer l.Close()
	first := setting("first")
	go l.Submit(first.Step)
	p := s.peer(theirs)
	began := make([]byte, 1)
	if _, err := theirs.Read(began); err != nil { // the rest is being written
		t.Fatal(err)
	}
	p.in = bufio.NewReader(io.MultiReader(bytes.NewReader(began), theirs))
	var frees []*told
	var names []string
	for i := range maxSteps + 72 {
		o := freeing(fmt.Sprint(i))
		frees, names = append(frees, o), append(names, o.Keys.Lock)
		l.Submit(o.Step)
	}
	if words := p.request(); words[0] != "set" {
		t.Errorf("sent %q first", words)
	}
	p.reply("+OK\r\n")
	first.want(t, redisscript.TakeGranted)
	for _, n := range []int{maxSteps, 72} {
		words := p.request()
		if words[0] != "evalsha" || words[2] != fmt.Sprint(3*n) {
			t.Fatalf("sent %.3q, want a call for %d holds", words, n)
		}
		for i := range n {
			if words[3+3*i] != names[i] {
				t.Fatalf("hold %d of a call is %s, want %s", i, words[3+3*i], names[i])
			}
		}
		names = names[n:]
		p.reply(answerTo(words))
	}
	for _, o := range frees {
		o.want(t, int64(1))
	}
}

// A connection that breaks tells of every step what is known: those that were answered have their answers, those that
// were sent may have been run, and those that never left take the next connection.
func TestLineBreaks(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprint("ordered ", ordered), func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			l := s.line(ordered)
			var sent []*told
			for i := range 10 {
				o := setting(fmt.Sprint(i))
				sent = append(sent, o)
				l.Submit(o.Step)
			}
			p := <-s.peers
			for range 10 {
				p.request()
			}
			for range 4 {
				p.reply("+OK\r\n")
			}
			sent[3].end(t)
			p.Close()
			for _, o := range sent[:4] {
				o.want(t, redisscript.TakeGranted)
			}
			for _, o := range sent[4:] {
				o.wantFailure(t, true)
				select {
				case <-o.Drained:
				case <-time.After(time.Minute):
					t.Fatal("the end of what was sent is never known")
				}
			}
			go s.serve()
			next := setting("next")
			l.Submit(next.Step)
			next.want(t, redisscript.TakeGranted)
			for _, o := range sent {
				if o.times.Load() != 1 {
					t.Errorf("%s was told %d times", o.Keys.Lock, o.times.Load())
				}
			}
		})
	}
}

// brokenConn lets the first writes through and none of the next one.
type brokenConn struct {
	net.Conn
	left atomic.Int32
}

func (c *brokenConn) Write(p []byte) (int, error) {
	if c.left.Add(-1) < 0 {
		return 0, errors.New("broken")
	}
	return c.Conn.Write(p)
}

// Steps of which nothing has left go out on the next connection, before what came later, while those before them may
// have been run.
func TestLineKeepsWhatNeverLeft(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		s := newServer(t)
		var dials atomic.Int32
		l := NewLine(Options{
			Clock: backend.SystemClock(), Ordered: ordered, Report: func(*redisconn.Failure) {},
			Connect: func() (net.Conn, error) {
				c, err := s.connect()
				if err == nil && dials.Add(1) == 1 {
					broken := &brokenConn{Conn: c}
					broken.left.Store(1)
					c = broken
				}
				return c, err
			},
		})
		defer l.Close()
		first, second, third := setting("first"), setting("second"), setting("third")
		l.Submit(first.Step)
		p := <-s.peers
		p.request() // and no answer
		l.Submit(second.Step, third.Step)
		first.wantFailure(t, true)
		p.Close() // which an ordered line waits for
		p = <-s.peers
		for _, o := range []*told{second, third} {
			if words := p.request(); words[1] != o.Keys.Lock {
				t.Errorf("ordered %v: sent %q, want that for %s", ordered, words, o.Keys.Lock)
			}
			p.reply("+OK\r\n")
			o.want(t, redisscript.TakeGranted)
		}
	}
}

// A server that has forgotten the scripts is sent them in full, and in the order of the steps: what ends a hold does
// not come before what may have asked for it.
func TestLineSendsScriptsAgainInOrder(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(true)
	try, other, quit := newTold(redisscript.Try, "n", "value", "100"), setting("other"),
		newTold(redisscript.Quit, "n", "start", "0")
	l.Submit(try.Step)
	p := <-s.peers
	p.request()
	l.Submit(other.Step, quit.Step)
	p.request()
	p.request()
	p.reply("-NOSCRIPT No matching script.\r\n+OK\r\n-NOSCRIPT No matching script.\r\n")
	other.want(t, redisscript.TakeGranted)
	var order []string
	for len(order) < 2 {
		words := p.request()
		if words[0] != "eval" || words[1] != redisscript.Source {
			t.Fatalf("sent again: %.40q", words)
		}
		p.reply(answerTo(words))
		for _, word := range words[2:] {
			if word == redisscript.Try || word == redisscript.Quit {
				order = append(order, word)
			}
		}
		if words[2] == "6" {
			break
		}
	}
	if want := []string{redisscript.Try, redisscript.Quit}; !slices.Equal(order, want) {
		t.Errorf("sent again: %q, want %q", order, want)
	}
	try.want(t, int64(1))
	quit.want(t, int64(1))
}

// On a node that is just taking a slot over every command is announced, and answers stay with their steps.
func TestLineAsks(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(false)
	take, free := newTold(redisscript.Take, "n", "value", "100"), freeing("n")
	take.Asking, free.Asking = true, true
	l.Submit(take.Step, free.Step)
	p := <-s.peers
	for _, want := range []string{"asking", "set", "asking", "exists", "asking", "evalsha"} {
		words := p.request()
		if words[0] != want {
			t.Fatalf("sent %.3q, want %s", words, want)
		}
		if want == "exists" {
			p.reply(":1\r\n")
		} else {
			p.reply(answerTo(words))
		}
	}
	take.want(t, redisscript.TakeAhead)
	free.want(t, int64(1))
	for _, refusal := range []string{"MOVED 7 127.0.0.1:1", "ASK 7 127.0.0.1:1", "TRYAGAIN later"} {
		o := setting("n")
		l.Submit(o.Step)
		p.request()
		p.reply("-" + refusal + "\r\n")
		o.wantFailure(t, false)
		if answer, ok := o.Err.Cause.(redisconn.ServerError); !ok || string(answer) != refusal ||
			o.Err.Moving != strings.HasPrefix(refusal, "TRYAGAIN") {
			t.Errorf("%s is told as %+v", refusal, o.Err)
		}
	}
}

// Close lets what is under way end, and refuses what comes later.
func TestLineCloses(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(false)
	before := setting("before")
	l.Submit(before.Step)
	p := <-s.peers
	p.request()
	ended := l.Close()
	after := setting("after")
	l.Submit(after.Step)
	if after.wantFailure(t, false); !errors.Is(after.Err, backend.ErrClosed) {
		t.Errorf("after Close: %v", after.Err)
	}
	select {
	case <-ended:
		t.Error("ended before the answer")
	default:
	}
	p.reply("+OK\r\n")
	before.want(t, redisscript.TakeGranted)
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("it does not end")
	}
	if _, ok := p.next(); ok {
		t.Error("something was sent after Close")
	}
}

// A step that is taken back before it has left never leaves, and its owner hears nothing; one that has left cannot be
// taken back, and those behind an impatient caller take another connection.
func TestLineGivesUp(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	s.fail.Store(true)
	l := s.line(false)
	refused := setting("refused")
	l.Submit(refused.Step)
	refused.wantFailure(t, false)
	dropped, stays := setting("dropped"), setting("stays")
	l.Submit(dropped.Step, stays.Step) // which wait for the next attempt to connect
	if !dropped.Drop() {
		t.Error("a step that has not left is not taken back")
	}
	s.fail.Store(false)
	p := func() *peer {
		select {
		case p := <-s.peers:
			return p
		case <-stays.done: // the next attempt was under way
			l.Submit(setting("another").Step)
			return <-s.peers
		}
	}()
	if words := p.request(); words[1] == dropped.Keys.Lock {
		t.Errorf("sent although it was taken back: %q", words)
	}
	late := setting("late")
	l.Submit(late.Step)
	p.request()
	if late.Drop() {
		t.Error("a step that has left is taken back")
	}
	l.Doubt()
	next := setting("next")
	l.Submit(next.Step)
	other := <-s.peers
	if words := other.request(); words[1] != next.Keys.Lock {
		t.Errorf("sent %q on the next connection", words)
	}
	other.reply("+OK\r\n")
	next.want(t, redisscript.TakeGranted)
	p.reply("+OK\r\n+OK\r\n")
	late.want(t, redisscript.TakeGranted)
	if n := dropped.times.Load(); n > 0 {
		t.Errorf("a step that was taken back was told %d times", n)
	}
}
