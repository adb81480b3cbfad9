package rediswire

import (
	"bufio"
	"context"
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

	goredis "github.com/redis/go-redis/v9"

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

// next reads one request: an array of texts.
func (p *peer) next() (words []string, ok bool) {
	number := func(kind string) (n int) {
		line, err := p.in.ReadString('\n')
		if err != nil {
			return -1
		}
		if _, err := fmt.Sscanf(line, kind+"%d\r\n", &n); err != nil {
			p.t.Errorf("a request with %q, want %s and a number", line, kind)
			return -1
		}
		return n
	}
	n := number("*")
	for range n {
		text := make([]byte, max(number("$"), 0)+2)
		if _, err := io.ReadFull(p.in, text); err != nil {
			return nil, false
		}
		words = append(words, string(text[:len(text)-2]))
	}
	return words, n > 0
}

// greet answers what a client sends on a new connection.
func (p *peer) greet() {
	for {
		switch words, ok := p.next(); {
		case !ok:
			return
		case words[0] == "ping":
			p.reply("+PONG\r\n")
			return
		default:
			p.reply("-ERR unknown command\r\n")
		}
	}
}

func (p *peer) reply(text string) { _, _ = p.Write([]byte(text)) } // an error: the line has gone

// server is a Redis server of which a test plays every connection.
type server struct {
	t     *testing.T
	in    net.Listener
	peers chan *peer
	fail  atomic.Bool // to connect
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

func (s *server) connect() (*Conn, error) { return s.connectBy(func(c net.Conn) net.Conn { return c }) }

// connectBy connects through what by makes of a connection.
func (s *server) connectBy(by func(net.Conn) net.Conn) (*Conn, error) {
	if s.fail.Load() {
		return nil, errors.New("nobody listens")
	}
	return Connect(goredis.Options{
		Network: "tcp", Addr: s.in.Addr().String(), DisableIdentity: true,
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			theirs, err := s.in.Accept()
			if err != nil {
				return nil, err
			}
			p := s.peer(theirs)
			go func() {
				p.greet()
				s.peers <- p
			}()
			return by(c), nil
		},
	})
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
		Report: func(*redisconn.Failure) {}, patience: time.Minute,
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
					l.Carry(t.Context(), frees.Step)
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

// Steps that are submitted during an exchange leave together behind it: steps of one script in one call, up to a bound,
// and in their order.
func TestLineCoalesces(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(true)
	first := setting("first")
	l.Submit(first.Step)
	p := <-s.peers
	if words := p.request(); words[0] != "set" {
		t.Errorf("sent %q first", words)
	}
	var frees []*told
	var names []string
	for i := range maxSteps + 72 {
		o := freeing(fmt.Sprint(i))
		frees, names = append(frees, o), append(names, o.Keys.Lock)
		l.Submit(o.Step)
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

// After a connection has broken, answered steps have their answers, and the server may have carried out the others.
func TestLineBreaks(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprint("ordered ", ordered), func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			l := s.line(ordered)
			var sent []*told
			var together []*Step
			for i := range 10 {
				o := setting(fmt.Sprint(i))
				sent, together = append(sent, o), append(together, o.Step)
			}
			l.Submit(together...)
			p := <-s.peers
			for range 10 {
				p.request()
			}
			for range 4 {
				p.reply("+OK\r\n")
			}
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

// brokenConn lets writes through until it breaks. Then every write fails when fails is closed.
type brokenConn struct {
	net.Conn
	broken *atomic.Bool
	fails  <-chan struct{}
}

func (c *brokenConn) Write(p []byte) (int, error) {
	if c.broken.Load() {
		<-c.fails
		return 0, errors.New("broken")
	}
	return c.Conn.Write(p)
}

// breaking returns a line whose first connection breaks as brokenConn does.
func (s *server) breaking(ordered bool, broken *atomic.Bool, fails <-chan struct{}) *Line {
	var next atomic.Bool
	l := NewLine(Options{
		Clock: backend.SystemClock(), Ordered: ordered, Report: func(*redisconn.Failure) {}, patience: time.Minute,
		Connect: func() (*Conn, error) {
			return s.connectBy(func(c net.Conn) net.Conn {
				if next.Swap(true) {
					return c
				}
				return &brokenConn{c, broken, fails}
			})
		},
	})
	s.t.Cleanup(func() { l.Close() })
	return l
}

// Steps of which nothing has left go out on the next connection, before what came later. So do steps for a connection
// that the server has closed meanwhile.
func TestLineKeepsWhatNeverLeft(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		s := newServer(t)
		var broken atomic.Bool
		fails := make(chan struct{})
		close(fails)
		l := s.breaking(ordered, &broken, fails)
		first, second, third, fourth := setting("first"), setting("second"), setting("third"), setting("fourth")
		l.Submit(first.Step)
		p := <-s.peers
		p.request()
		p.reply("+OK\r\n")
		first.want(t, redisscript.TakeGranted)
		broken.Store(true)
		l.Submit(second.Step, third.Step)
		p = <-s.peers
		for _, o := range []*told{second, third} {
			if words := p.request(); words[1] != o.Keys.Lock {
				t.Errorf("ordered %v: sent %q, want that for %s", ordered, words, o.Keys.Lock)
			}
			p.reply("+OK\r\n")
		}
		second.want(t, redisscript.TakeGranted)
		third.want(t, redisscript.TakeGranted)
		p.Close()
		l.Submit(fourth.Step)
		p = <-s.peers
		p.request()
		p.reply("+OK\r\n")
		fourth.want(t, redisscript.TakeGranted)
	}
}

// A step of which nothing has left goes out on the next connection even if its exchange took so long that others no
// longer wait for it.
func TestLineKeepsWhatNeverLeftForLong(t *testing.T) {
	t.Parallel()
	for _, carried := range []bool{false, true} {
		s := newServer(t)
		var broken atomic.Bool
		fails := make(chan struct{})
		l := s.breaking(false, &broken, fails)
		go s.serve()
		first, second := setting("first"), setting("second")
		l.Submit(first.Step)
		first.want(t, redisscript.TakeGranted)
		s.awaitRest(l)
		broken.Store(true)
		if carried {
			go l.Carry(t.Context(), second.Step)
		} else {
			l.Submit(second.Step)
		}
		s.await("the step is being sent", func() bool { return second.state.Load() == taken })
		l.Doubt()
		close(fails)
		second.want(t, redisscript.TakeGranted)
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
	l.Submit(try.Step, other.Step, quit.Step)
	p := <-s.peers
	p.request()
	p.request()
	p.reply("+OK\r\n-NOSCRIPT No matching script.\r\n")
	other.want(t, redisscript.TakeGranted)
	words := p.request()
	if words[0] != "eval" || words[1] != redisscript.Source || words[2] != "6" {
		t.Fatalf("sent again: %.40q", words)
	}
	var order []string
	for _, word := range words[2:] {
		if word == redisscript.Try || word == redisscript.Quit {
			order = append(order, word)
		}
	}
	if want := []string{redisscript.Try, redisscript.Quit}; !slices.Equal(order, want) {
		t.Errorf("sent again: %q, want %q", order, want)
	}
	p.reply(answerTo(words))
	try.want(t, int64(1))
	quit.want(t, int64(1))
}

// A step for a connection that the server has closed at rest goes out on the next one, although nothing was sent before.
func TestLineKeepsWhatAnUnusedConnectionHas(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	connects := make(chan struct{})
	l := NewLine(Options{
		Clock: backend.SystemClock(), Report: func(*redisconn.Failure) {}, patience: time.Minute,
		Connect: func() (*Conn, error) {
			<-connects
			return s.connect()
		},
	})
	t.Cleanup(func() { l.Close() })
	dropped, next := setting("dropped"), setting("next")
	l.Submit(dropped.Step)
	if !dropped.Drop() {
		t.Error("a step that waits for the connection is not dropped")
	}
	close(connects)
	s.awaitRest(l)
	(<-s.peers).Close()
	go s.serve()
	l.Submit(next.Step)
	next.want(t, redisscript.TakeGranted)
}

// A server that knows only the short script does not carry out a release before the attempt that it ends.
func TestLineSendsAReleaseBehindItsAttempt(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(true)
	try, free, next := newTold(redisscript.Try, "n", "value", "100"), freeing("n"), setting("n")
	otherFree, otherNext := freeing("other"), setting("other")
	l.Submit(try.Step, otherFree.Step, otherNext.Step, free.Step, next.Step)
	p := <-s.peers
	for _, want := range []string{"evalsha", "evalsha", "set", "eval", "evalsha", "set"} {
		words := p.request()
		if words[0] != want {
			t.Fatalf("sent %.40q, want %s", words, want)
		}
		if words[1] == redisscript.SHA {
			p.reply("-NOSCRIPT No matching script.\r\n")
		} else {
			p.reply(answerTo(words))
		}
	}
	for _, o := range []*told{try, otherFree, free} {
		o.want(t, int64(1))
	}
	otherNext.want(t, redisscript.TakeGranted)
	next.want(t, redisscript.TakeGranted)
}

// Steps for one name that leave together keep their order, whatever commands they take.
func TestLineKeepsTheOrderOfAName(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(true)
	first := setting("first")
	l.Submit(first.Step)
	p := <-s.peers
	p.request()
	free, other, again, remove := freeing("n"), freeing("other"), setting("n"), newTold(redisscript.Remove, "n", "id")
	l.Submit(free.Step, other.Step, again.Step, remove.Step)
	p.reply("+OK\r\n")
	var sent []string
	for range 3 {
		words := p.request()
		sent = append(sent, words[0]+" "+words[min(2, len(words)-1)])
		p.reply(answerTo(words))
	}
	if want := []string{"evalsha 6", "set value", "evalsha 3"}; !slices.Equal(sent, want) {
		t.Errorf("sent %q, want %q", sent, want)
	}
	for _, o := range []*told{first, free, other, again, remove} {
		o.end(t)
	}
}

// On a node that is just taking a slot over every command is announced, and answers stay with their steps.
func TestLineAsks(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(true)
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

// After the answer that the server is a replica, steps take a new connection: it may lead to the new master. Servers
// before Redis 7 give the code behind the place in the script.
func TestLineLeavesAReplica(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(false)
	for _, refusal := range []string{
		"READONLY You can't write against a read only replica.",
		"ERR Error running script (call to f_1): @user_script:15: @user_script: 15: -READONLY You can't write",
	} {
		refused, next := freeing("n"), freeing("n")
		l.Submit(refused.Step)
		p := <-s.peers
		p.request()
		p.reply("-" + refusal + "\r\n")
		refused.wantFailure(t, false)
		if _, ok := p.next(); ok {
			t.Error("something was sent to a replica")
		}
		l.Submit(next.Step)
		p = <-s.peers
		p.reply(answerTo(p.request()))
		next.want(t, int64(1))
		p.Close()
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

// A step that is dropped before it has left never leaves, and its owner is not notified; a step that has left cannot be
// dropped, and those behind an impatient caller take another connection.
func TestLineDrops(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(true)
	first := setting("first")
	l.Submit(first.Step)
	p := <-s.peers
	p.request()
	if first.Drop() {
		t.Error("a step that has left is dropped")
	}
	dropped, stays := setting("dropped"), setting("stays")
	l.Submit(dropped.Step, stays.Step) // which wait for the answer
	if !dropped.Drop() {
		t.Error("a step that has not left is not dropped")
	}
	p.reply("+OK\r\n")
	if words := p.request(); words[1] != stays.Keys.Lock {
		t.Errorf("sent %q, want the step that was not dropped", words)
	}
	p.reply("+OK\r\n")
	first.want(t, redisscript.TakeGranted)
	stays.want(t, redisscript.TakeGranted)
	if n := dropped.times.Load(); n > 0 {
		t.Errorf("a step that was dropped was told %d times", n)
	}
}

// A line that cannot connect fails the steps that were pending, and connects for later ones.
func TestLineConnectsAgain(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		s := newServer(t)
		s.fail.Store(true)
		l := s.line(ordered)
		refused := setting("refused")
		l.Submit(refused.Step)
		refused.wantFailure(t, false)
		s.fail.Store(false)
		go s.serve()
		for end := time.Now().Add(time.Minute); ; { // an ordered line refuses for a while
			next := setting("next")
			l.Submit(next.Step)
			if next.end(t); next.Err == nil {
				break
			} else if !ordered || next.Err.Sent || time.Now().After(end) {
				t.Fatalf("ordered %v: %+v after the server has come back", ordered, next.Err)
			}
		}
	}
}

// A step fails only with a try to connect that began after it was submitted, even if another connection has taken the
// steps that were pending then.
func TestLineConnectsForStepsAfterATry(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	tries, fails := make(chan struct{}, 1), make(chan struct{})
	var connected, failed atomic.Bool
	l := NewLine(Options{
		Clock: backend.SystemClock(), Report: func(*redisconn.Failure) {}, patience: time.Minute,
		Connect: func() (*Conn, error) {
			if connected.Swap(true) && !failed.Swap(true) {
				tries <- struct{}{}
				<-fails
				return nil, errors.New("nobody listens")
			}
			return s.connect()
		},
	})
	t.Cleanup(func() { l.Close() })
	first, second, third := setting("first"), setting("second"), setting("third")
	l.Submit(first.Step)
	p := <-s.peers
	p.request()
	l.Submit(second.Step) // beside the first one
	<-tries
	p.reply("+OK\r\n")
	if words := p.request(); words[1] != second.Keys.Lock {
		t.Errorf("sent %q, want the second step", words)
	}
	l.Submit(third.Step)
	close(fails)
	select {
	case beside := <-s.peers:
		beside.request()
		beside.reply("+OK\r\n")
	case <-third.done:
	}
	third.want(t, redisscript.TakeGranted)
	p.reply("+OK\r\n")
	first.want(t, redisscript.TakeGranted)
	second.want(t, redisscript.TakeGranted)
}

// A server that closes each connection before its first request is asked at longer and longer intervals, like a server
// that accepts no connection.
func TestLinePausesWhenConnectionsAreOfNoUse(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		s := newServer(t)
		var closes atomic.Bool
		closes.Store(true)
		var tries atomic.Int32
		l := NewLine(Options{
			Clock: backend.SystemClock(), Ordered: ordered, Report: func(*redisconn.Failure) {}, patience: time.Minute,
			Connect: func() (*Conn, error) {
				if tries.Add(1) == 100 {
					return nil, errors.New("too many tries")
				}
				conn, err := s.connect()
				if err == nil && closes.Load() {
					(<-s.peers).Close()
				}
				return conn, err
			},
		})
		t.Cleanup(func() { l.Close() })
		const n = 6
		begin, pauses := time.Now(), time.Duration(0)
		for tries.Load() < n {
			o := setting("n")
			l.Submit(o.Step)
			o.wantFailure(t, false)
		}
		for i := range n - 1 {
			pauses += 5 * time.Millisecond << i
		}
		if took := time.Since(begin); tries.Load() != n || took < pauses {
			t.Errorf("ordered %v: %d tries within %v, want pauses of %v", ordered, tries.Load(), took, pauses)
		}
		closes.Store(false)
		go s.serve()
		for end := time.Now().Add(time.Minute); ; { // an ordered line refuses for a while
			next := setting("next")
			l.Submit(next.Step)
			if next.end(t); next.Err == nil {
				break
			} else if !ordered || next.Err.Sent || time.Now().After(end) {
				t.Fatalf("ordered %v: %+v after the server is well", ordered, next.Err)
			}
		}
		s.awaitRest(l)
		if l.mu.Lock(); l.misses != 0 {
			t.Errorf("%d failed tries after a try that led to an answer", l.misses)
		}
		l.mu.Unlock()
	}
}

// Steps do not wait long behind a silent connection, unless they are ordered, and not at all behind a caller that has
// left.
func TestLinePassesASilentConnection(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(false)
	l.o.patience = patience
	silent, also := setting("silent"), setting("also silent")
	l.Submit(silent.Step, also.Step)
	p := <-s.peers
	p.request()
	p.request()
	for i, doubt := range []func(){func() {}, l.Doubt} {
		next, another := setting(fmt.Sprint("next", i)), setting(fmt.Sprint("another", i))
		l.Submit(next.Step, another.Step)
		doubt()
		other := <-s.peers
		for _, o := range []*told{next, another} {
			if words := other.request(); words[1] != o.Keys.Lock {
				t.Errorf("sent %q on the next connection", words)
			}
		}
	}
	p.reply("+OK\r\n$-1\r\n")
	silent.want(t, redisscript.TakeGranted)
	also.want(t, redisscript.TakeRefused)
}

// After a silent connection an ordered line takes another one when the server has read the last one to its end, or
// after orderTime.
func TestLineKeepsOrderBetweenConnections(t *testing.T) {
	t.Parallel()
	for _, reads := range []bool{true, false} {
		s := newServer(t)
		l := s.line(true)
		first, second := setting("n"), freeing("n")
		first.Deadline = time.Now().Add(time.Millisecond)
		l.Submit(first.Step)
		p := <-s.peers
		p.request()
		l.Submit(second.Step)
		first.wantFailure(t, true)
		ended := time.Now()
		if _, ok := p.next(); ok {
			t.Error("something was sent behind the silent step")
		}
		if reads {
			select {
			case <-s.peers:
				t.Fatal("it connects while the server has not carried out what was sent")
			case <-time.After(orderTime / 2):
			}
			p.Close()
		}
		next := <-s.peers
		if took := time.Since(ended); !reads && took < orderTime/2 {
			t.Errorf("it connects after %v", took)
		}
		next.reply(answerTo(next.request()))
		second.want(t, int64(1))
	}
}

// Impatient callers of a silent server do not cost it a connection each.
func TestLineBoundsItsConnections(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l := s.line(false)
	for i := range 3 * maxWires {
		o, another := setting(fmt.Sprint(i)), setting(fmt.Sprint("another", i))
		l.Submit(o.Step, another.Step)
		if i < maxWires {
			s.await("the steps have left", func() bool { return another.state.Load() == taken })
		} else if o.state.Load() == taken {
			t.Fatalf("exchange %d of a silent server", i+1)
		}
		l.Doubt()
	}
	s.await("the connections", func() bool { return len(s.peers) == maxWires })
	for range maxWires {
		(<-s.peers).Close()
	}
	go s.serve()
	last := setting("last")
	l.Submit(last.Step)
	last.want(t, redisscript.TakeGranted)
}

// rested returns a line with a connection at rest, and the server's end of that.
func (s *server) rested() (*Line, *peer) {
	s.t.Helper()
	l, o := s.line(false), setting("first")
	l.Submit(o.Step)
	p := <-s.peers
	p.request()
	p.reply("+OK\r\n")
	o.want(s.t, redisscript.TakeGranted)
	s.awaitRest(l)
	return l, p
}

// awaitRest waits until the only connection of l rests.
func (s *server) awaitRest(l *Line) {
	s.t.Helper()
	s.await("the connection rests", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.idle) == 1
	})
}

// await waits until ok.
func (s *server) await(what string, ok func() bool) {
	s.t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("not within a minute: %s", what)
		}
	}
}

// A lone caller has its answer when Carry returns. Callers that come one at a time do not wait for each other.
func TestCarry(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l, p := s.rested()
	carried, mine := make(chan struct{}), setting("mine")
	go func() {
		l.Carry(t.Context(), mine.Step)
		if mine.times.Load() != 1 {
			t.Error("Carry returned without the answer")
		}
		close(carried)
	}()
	p.request()
	other := setting("other")
	l.Submit(other.Step)
	beside := <-s.peers
	beside.request()
	beside.reply("$-1\r\n")
	other.want(t, redisscript.TakeRefused)
	p.reply("+OK\r\n")
	<-carried
	mine.want(t, redisscript.TakeGranted)
}

// A caller whose context ends does not wait for the answer. The server may have carried out the step, and the end of
// that is known.
func TestCarryEndsWithItsContext(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	l, p := s.rested()
	ctx, cancel := context.WithCancel(t.Context())
	carried, o := make(chan struct{}), setting("n")
	go func() {
		l.Carry(ctx, o.Step)
		close(carried)
	}()
	p.request()
	cancel()
	<-carried
	o.wantFailure(t, true)
	select {
	case <-o.Drained:
		t.Error("what was sent counts as carried out while the server has not read to the end")
	default:
	}
	if _, ok := p.next(); ok {
		t.Error("something was sent behind it")
	}
	p.Close()
	select {
	case <-o.Drained:
	case <-time.After(time.Minute):
		t.Fatal("the end of what was sent is never known")
	}
	go s.serve()
	next := setting("next")
	l.Carry(t.Context(), next.Step)
	next.want(t, redisscript.TakeGranted)
}

// Renew and Close end a connection at rest.
func TestLineEndsAtRest(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	for _, end := range []func(*Line){(*Line).Renew, func(l *Line) { <-l.Close() }} {
		l, p := s.rested()
		end(l)
		if _, ok := p.next(); ok {
			t.Error("something was sent")
		}
		if addr := l.Addr(); addr != nil {
			t.Errorf("after the end it leads to %v", addr)
		}
	}
}
