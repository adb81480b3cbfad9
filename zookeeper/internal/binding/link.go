package binding

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// link is one connection of a session. One goroutine reads, another one writes what there is to send together, and
// pings. The server answers in the order of the requests.
type link struct {
	s       *session
	conn    net.Conn
	in      *bufio.Reader
	address string
	opened  backend.Instant // before it was dialled
	work    chan struct{}   // has room for one: there is something to send

	mu      sync.Mutex // protects the following fields
	out     []byte     // not sent yet
	unsent  int        // requests in out
	pending []pending  // sent or in out
	pings   []backend.Instant
	silent  time.Time // since when answers are due; zero: none is
	last    int32     // number of the last request
	closed  bool
}

// pending is a request without an answer.
type pending struct {
	call *call
	n    int // of the request in the call
	size int
}

// call is some requests that were sent in one write, so that the server carries out nothing of this session in between.
type call struct {
	replies []reply
	left    int
	link    *link
	sent    backend.Instant // before it was sent
	err     error
	done    chan struct{} // has room for one
	then    func(*call)   // if not nil, is called in place of done, on the goroutine that reads
}

// maxFrame bounds a message of the server. A longer one is not from a ZooKeeper.
const maxFrame = 1 << 30

// suspectBytes is the size from which a request may be the reason why a server has closed the connection: servers with
// a jute.maxbuffer of 8 KB are supported.
const suspectBytes = 7 << 10

// maxBreaks bounds the connections that break under requests of one size, before such requests are refused.
const maxBreaks = 3

// connectTimeout is the maximum time that a request waits for a connection.
const connectTimeout = 3 * time.Second

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
		l.pending = append(l.pending, pending{c, n, 4 + 8 + len(r.body)})
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
		}
		l.mu.Lock()
		buffer, l.out = l.out, buffer[:0]
		l.unsent = 0
		if l.silent.IsZero() && len(buffer) > 0 {
			l.silent = time.Now()
		}
		late := !l.silent.IsZero() && time.Since(l.silent) > l.s.silence()
		closed := l.closed
		l.mu.Unlock()
		if closed {
			return
		}
		if late {
			_ = l.conn.Close()
			return
		}
		if len(buffer) == 0 {
			continue
		}
		_ = l.conn.SetWriteDeadline(time.Now().Add(l.s.silence()))
		if _, err := l.conn.Write(buffer); err != nil {
			_ = l.conn.Close()
			return
		}
	}
}

// read handles the server's messages until the link ends, and returns why.
func (l *link) read() error {
	for {
		p, err := frame(l.in, maxFrame)
		if err != nil {
			return err
		}
		r := reader{p: p}
		number, zxid, failed := r.int(), r.long(), code(r.int())
		if r.err != nil {
			return r.err
		}
		switch number {
		case numberEvent:
			typ := r.int()
			r.int()
			l.s.event(typ, string(r.bytes()))
			continue
		case numberPing:
			l.mu.Lock()
			if len(l.pings) > 0 {
				l.s.touch(l, l.pings[0])
				l.pings = l.pings[1:]
			}
			l.heard()
			l.mu.Unlock()
			continue
		case numberAuth:
			if failed != 0 {
				l.s.fail(failed)
				return failed
			}
			continue
		}
		a := reply{zxid: zxid, body: r.p}
		if failed != 0 {
			a.err = failed
		}
		if zxid > 0 {
			l.s.e.history.saw(zxid)
		}
		l.mu.Lock()
		if len(l.pending) == 0 {
			l.mu.Unlock()
			return fmt.Errorf("ZooKeeper answers a request %d that was not sent", number)
		}
		first := l.pending[0]
		l.pending = l.pending[1:]
		l.heard()
		l.mu.Unlock()
		if first.size >= suspectBytes {
			l.s.e.answered(first.size)
		}
		c := first.call
		c.replies[first.n] = a
		if c.left--; c.left == 0 {
			l.s.touch(l, c.sent)
			c.end()
		}
	}
}

// heard notes an answer. The caller holds l.mu.
func (l *link) heard() {
	l.silent = time.Time{}
	if len(l.pending) > 0 || len(l.pings) > 0 {
		l.silent = time.Now()
	}
}

func (c *call) end() {
	if c.then != nil {
		c.then(c)
		return
	}
	c.done <- struct{}{}
}

// shut ends the link, and answers its calls: those that were not written never will be.
func (l *link) shut(why error) {
	_ = l.conn.Close()
	l.mu.Lock()
	l.closed = true
	all, unsent := l.pending, l.unsent
	l.pending, l.out = nil, nil
	select {
	case l.work <- struct{}{}:
	default:
	}
	l.mu.Unlock()
	longest := 0
	for n, p := range all {
		if n < len(all)-unsent {
			longest = max(longest, p.size)
		}
	}
	if remote := isOneOf(why, io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE); remote && longest >= suspectBytes {
		l.s.e.brokeUnder(longest)
	}
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

// do sends requests together, and returns a reply to each. errNoConnection: they were not sent and never will be.
func (s *session) do(ctx context.Context, reqs ...request) ([]reply, error) {
	c, err := s.call(ctx, reqs...)
	if err != nil {
		return nil, err
	}
	return c.replies, nil
}

func (s *session) call(ctx context.Context, reqs ...request) (*call, error) {
	for _, r := range reqs {
		if err := s.e.tooLong(len(r.body)); err != nil {
			return nil, err
		}
	}
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
		return nil, s.reasonOf(c.err)
	}
	for _, r := range c.replies {
		if errors.Is(r.err, codeSessionExpired) {
			s.end(backend.ReasonSessionExpired)
			return nil, s.ended()
		}
	}
	return c, nil
}

// post sends requests if there is a connection, and calls then on the goroutine that reads.
func (s *session) post(then func(*call), reqs ...request) {
	if l, _ := s.current(); l != nil {
		l.start(&call{then: then}, reqs...)
	}
}
