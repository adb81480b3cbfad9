package zookeeper

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
)

// link is one connection of a session. One goroutine reads, and the session's writes what there is to send together,
// and pings. The server answers in the order of the requests.
type link struct {
	s       *session
	conn    net.Conn
	in      *bufio.Reader
	address string
	opened  backend.Instant // before it was dialled
	stop    func() bool     // the watch over the session's end
	work    chan struct{}   // has room for one: there is something to send
	broken  chan struct{}   // closed at its end

	mu      sync.Mutex // protects the following fields
	out     []byte     // not sent yet
	unsent  int        // requests in out
	pending []pending  // sent or in out
	pings   []backend.Instant
	silent  time.Time // since when answers are due; zero: none is
	last    int32     // number of the last request
	closed  bool
}

// pending is a request without an answer, and its number in the call.
type pending struct {
	call *call
	n    int
}

// call is some requests that were sent in one write, so that the server executes no other request of the session in
// between.
type call struct {
	replies []reply
	left    int
	link    *link
	sent    backend.Instant // before it was sent
	err     error
	done    chan struct{} // has room for one
	then    func(*call)   // if not nil, is called in place of done, on the goroutine that reads
}

// silence is the maximum time that answers may be due before another connection is made.
func (s *session) silence() time.Duration { return min(s.asked/2, 5*time.Second) }

// start sends requests, and reports whether it could: a link that has broken takes none.
func (l *link) start(c *call, reqs ...request) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	c.link, c.left, c.replies, c.sent = l, len(reqs), make([]reply, len(reqs)), l.s.e.clock.Now()
	for n, r := range reqs {
		l.last = l.last%(1<<30) + 1
		l.put(l.last, r)
		l.pending = append(l.pending, pending{c, n})
	}
	l.unsent += len(reqs)
	select {
	case l.work <- struct{}{}:
	default:
	}
	return true
}

// put appends a message. The caller holds l.mu.
func (l *link) put(number int32, r request) {
	l.out = appendInt(appendInt(appendInt(l.out, int32(8+len(r.body))), number), r.op)
	l.out = append(l.out, r.body...)
}

// write sends what callers have appended, and pings, until the link ends.
func (l *link) write() {
	ping := time.NewTicker(l.s.pingEvery())
	defer ping.Stop()
	var buffer []byte
	for {
		select {
		case <-l.work:
		case <-ping.C:
			l.mu.Lock()
			l.pings = append(l.pings, l.s.e.clock.Now())
			l.put(numberPing, request{op: opPing})
			l.mu.Unlock()
		case <-l.broken:
			return
		}
		l.mu.Lock()
		buffer, l.out = l.out, buffer[:0]
		l.unsent = 0
		if l.silent.IsZero() && len(buffer) > 0 {
			l.silent = time.Now()
		}
		late := !l.silent.IsZero() && time.Since(l.silent) > l.s.silence()
		l.mu.Unlock()
		if late {
			l.end(errBroken)
			return
		}
		if len(buffer) == 0 {
			continue
		}
		_ = l.conn.SetWriteDeadline(time.Now().Add(l.s.silence()))
		if _, err := l.conn.Write(buffer); err != nil {
			l.end(err)
			return
		}
	}
}

// read handles the server's messages until the link ends.
func (l *link) read() {
	for {
		p, err := frame(l.in, maxFrame)
		if err == nil {
			err = l.message(p)
		}
		if err != nil {
			l.end(err)
			return
		}
	}
}

// message handles one message of the server.
func (l *link) message(p []byte) error {
	r := reader{p: p}
	number, zxid, failed := r.int(), r.long(), code(r.int())
	if r.err != nil {
		return r.err
	}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return errBroken
	}
	var sent backend.Instant
	var done *call
	switch {
	case number == numberPing && len(l.pings) > 0:
		sent, l.pings = l.pings[0], l.pings[1:]
	case number > 0 && len(l.pending) > 0:
		first := l.pending[0]
		l.pending = l.pending[1:]
		done = first.call
		done.replies[first.n] = reply{zxid: zxid, body: r.p}
		if failed != 0 {
			done.replies[first.n].err = failed
		}
		if done.left--; done.left > 0 {
			done = nil
		} else {
			sent = done.sent
		}
	}
	if number != numberEvent {
		l.silent = time.Time{}
		if len(l.pending) > 0 || len(l.pings) > 0 {
			l.silent = time.Now()
		}
	}
	l.mu.Unlock()
	switch {
	case number == numberEvent:
		typ, _ := r.int(), r.int() // and the state of the session
		l.s.event(typ, string(r.bytes()))
	case number == numberAuth && failed != 0:
		l.s.fail(failed)
		return failed
	case number > 0 && zxid > 0:
		l.s.e.history.saw(zxid)
	}
	if sent != 0 {
		l.s.touch(sent)
	}
	if done != nil {
		done.end()
	}
	return nil
}

func (c *call) end() {
	if c.then != nil {
		c.then(c)
		return
	}
	c.done <- struct{}{}
}

// end ends the link, and answers its calls: requests that were not written never will be. Only the first call has an
// effect.
func (l *link) end(why error) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return
	}
	l.closed = true
	all, unsent := l.pending, l.unsent
	l.pending, l.out = nil, nil
	l.mu.Unlock()
	l.close()
	l.s.down(l, why)
	close(l.broken)
	for n, p := range all {
		if p.call.err == nil {
			p.call.err = errBroken
			if n >= len(all)-unsent {
				p.call.err = errNoConnection
			}
		}
		if p.n == len(p.call.replies)-1 {
			p.call.end()
		}
	}
}

func (l *link) close() {
	l.stop()
	_ = l.conn.Close()
}

// maxFrame bounds a message of the server. A longer one is not from a ZooKeeper.
const maxFrame = 1 << 30

// frame reads a message with its length in front.
func frame(from io.Reader, most int) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(from, head[:]); err != nil {
		return nil, err
	}
	size := int32(binary.BigEndian.Uint32(head[:]))
	if size < 0 || int(size) > most {
		return nil, errNoZooKeeper
	}
	p := make([]byte, size)
	_, err := io.ReadFull(from, p)
	return p, err
}

// connectTimeout is the maximum time that a request waits for a connection.
const connectTimeout = 3 * time.Second

// call sends requests together, and waits for the replies.
func (s *session) call(ctx context.Context, reqs ...request) (*call, error) {
	c := &call{done: make(chan struct{}, 1)}
	for {
		if s.isOver() {
			return nil, s.ended()
		}
		l, up := s.current()
		if l != nil && l.start(c, reqs...) {
			break
		}
		late := make(chan struct{})
		timer := time.AfterFunc(connectTimeout, func() { close(late) })
		_, how := engine.Await(ctx, up, late)
		timer.Stop()
		if how != engine.Answered {
			return nil, s.unconnected(ctx)
		}
	}
	if _, how := engine.Await(ctx, c.done, nil); how != engine.Answered {
		return nil, &engine.Unanswered{Landed: func(ctx context.Context) {
			select {
			case <-c.done:
			case <-ctx.Done():
			}
		}}
	}
	if c.err != nil {
		if lost := s.e.history.err(); lost != nil {
			return nil, lost
		}
		return nil, c.err
	}
	for _, r := range c.replies {
		if errors.Is(r.err, codeSessionExpired) {
			s.end()
			return nil, s.ended()
		}
	}
	return c, nil
}

// do sends requests together, and returns a reply to each. errNoConnection: they were not sent and never will be.
func (s *session) do(ctx context.Context, reqs ...request) ([]reply, error) {
	c, err := s.call(ctx, reqs...)
	if err != nil {
		return nil, err
	}
	return c.replies, nil
}

// broke reports whether requests were sent, and the connection broke before the replies came. It may be the reason,
// too, why there is no connection.
func broke(err error) bool { return errors.Is(err, errBroken) && !errors.Is(err, errNoConnection) }

// ask is do for requests that only read: after a broken connection it asks again, over the next one.
func (s *session) ask(ctx context.Context, reqs ...request) ([]reply, error) {
	for {
		replies, err := s.do(ctx, reqs...)
		if !broke(err) {
			return replies, err
		}
	}
}

// askLeader is ask of a server that has the leader's state as of the beginning of the call, and all that was done over
// former connections of the session.
func (s *session) askLeader(ctx context.Context, reqs ...request) ([]reply, error) {
	replies, err := s.ask(ctx, append([]request{confirmed()}, reqs...)...)
	if err != nil {
		return nil, err
	}
	return replies[1:], ignore(replies[0].failed(), codeNoAuth)
}

// names returns the names of the nodes below a node, as askLeader, in no order.
func (s *session) names(ctx context.Context, node string) ([]string, zk.Stat, error) {
	replies, err := s.askLeader(ctx, children(node))
	if err != nil {
		return nil, zk.Stat{}, err
	}
	return replies[0].names()
}

// maxTries bounds the tries of a deletion that a server throttles.
const maxTries = 3

// delete deletes a node if it has a version, and reports whether it stood. It repeats that over the next connection: a
// node that is missing then was deleted by the first request.
func (s *session) delete(ctx context.Context, path string, version int32) (was bool, err error) {
	for n := 1; ; n++ {
		replies, err := s.do(ctx, remove(path, version))
		if err == nil {
			err = replies[0].err
		}
		switch {
		case errors.Is(err, codeNoNode):
			return was, nil
		case broke(err):
			was = true
		case errors.Is(err, codeThrottled) && n < maxTries:
			if _, how := engine.Await(ctx, time.After(kit.RetryPause(s.asked)/2), nil); how != engine.Answered {
				return false, err
			}
		case was && errors.Is(err, errNoConnection):
			return false, &engine.Unanswered{Err: err}
		default:
			return err == nil, err
		}
	}
}
