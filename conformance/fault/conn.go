package fault

import (
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// limit bounds the queued bytes in one direction of one connection.
const limit = 1 << 20

// conn is one connection of a client, and its connection to the server. The proxy's mutex protects all fields.
type conn struct {
	p      *Proxy
	up     *pipe // requests
	down   *pipe // replies
	closed bool
}

// pipe is one direction of a conn: one goroutine reads from src into the queue, another writes from the queue to dst.
type pipe struct {
	conn     *conn
	dir      Direction
	src, dst *net.TCPConn // the server's is nil until connected
	cond     *sync.Cond   // any change

	queue   []item
	size    int  // bytes in queue
	gap     bool // bytes were dropped: delivery has ended
	ended   bool // src has ended; no more bytes are read
	broken  bool // dst accepts no more bytes: later bytes are discarded
	done    bool // the end was delivered, or cannot be delivered
	writing bool // a write to dst is in progress
}

// item is a part of the stream: the opening of a connection, bytes, or the end.
type item struct {
	kind kind
	at   time.Time // when it was read
	data []byte
}

type kind uint8

const (
	opening kind = iota
	bytes
	end     // src closed its side orderly
	aborted // src was reset
)

// newConn starts the goroutines of a connection. p.mu is held.
func newConn(p *Proxy, client *net.TCPConn) {
	c := &conn{p: p}
	c.up = &pipe{conn: c, dir: Requests, src: client, cond: sync.NewCond(&p.mu)}
	c.down = &pipe{conn: c, dir: Replies, dst: client, cond: sync.NewCond(&p.mu)}
	p.conns[c] = struct{}{}
	c.up.take(opening, nil)
	p.wg.Go(c.up.read)
	p.wg.Go(c.up.write)
	p.wg.Go(c.down.write)
}

// close closes the connection on both sides, abruptly or orderly, and thereby ends its goroutines. p.mu is held.
func (c *conn) close(abruptly bool) {
	if c.closed {
		return
	}
	c.closed = true
	delete(c.p.conns, c)
	for _, q := range []*pipe{c.up, c.down} {
		if q.src != nil {
			if abruptly {
				q.src.SetLinger(0)
			}
			q.src.Close()
		}
		q.queue, q.size = nil, 0
		q.cond.Broadcast()
	}
}

// read reads from src until its end.
func (q *pipe) read() {
	p, buf := q.conn.p, make([]byte, 32<<10)
	for {
		p.mu.Lock()
		for q.size >= limit && !q.conn.closed {
			q.cond.Wait()
		}
		p.mu.Unlock()
		n, err := q.src.Read(buf)
		p.mu.Lock()
		if n > 0 {
			p.of(q.dir).seen += int64(n)
			q.take(bytes, append([]byte(nil), buf[:n]...))
		}
		switch {
		case err == nil:
		case errors.Is(err, syscall.ECONNRESET):
			q.take(aborted, nil)
		default:
			q.take(end, nil)
		}
		p.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// take appends one item to the queue, or drops it. p.mu is held.
func (q *pipe) take(k kind, data []byte) {
	if q.ended || q.conn.closed {
		return
	}
	q.ended = k == end || k == aborted
	q.queue = append(q.queue, item{kind: k, at: time.Now(), data: data})
	q.size += len(data)
	switch {
	case q.broken:
		q.discard()
	case q.gap || q.conn.p.of(q.dir).mode == drop:
		q.swallow()
	}
	q.cond.Broadcast()
}

// swallow drops the queue; the stream then has a gap. p.mu is held.
func (q *pipe) swallow() {
	q.gap = true
	q.queue, q.size = nil, 0
	q.cond.Broadcast()
}

// discard drops the queue, since the receiver is gone. p.mu is held.
func (q *pipe) discard() {
	q.broken, q.done = true, true
	q.queue, q.size = nil, 0
	q.cond.Broadcast()
}

// interrupt aborts a write in progress and returns when it has ended. The unwritten rest stays in the queue. p.mu is
// held.
func (q *pipe) interrupt() {
	for q.writing {
		q.dst.SetWriteDeadline(time.Unix(1, 0))
		q.cond.Wait()
	}
}

// write delivers the items of the queue to dst, when the state of the direction allows it.
func (q *pipe) write() {
	q.conn.p.mu.Lock()
	defer q.conn.p.mu.Unlock()
	for !q.conn.closed && !q.done {
		if wait, ok := q.due(); !ok {
			q.wait(wait)
		} else {
			q.deliver()
		}
	}
	if q.conn.up.done && q.conn.down.done {
		q.conn.close(false)
	}
}

// due reports whether the first item may be delivered. If not, wait is the time until it may be, or zero if that
// depends on a change of the state. p.mu is held.
func (q *pipe) due() (wait time.Duration, ok bool) {
	d := q.conn.p.of(q.dir)
	if len(q.queue) == 0 || d.mode != pass {
		return 0, false
	}
	wait = d.delay - time.Since(q.queue[0].at)
	return wait, wait <= 0
}

// wait returns after a change, or after a nonzero timeout. p.mu is held.
func (q *pipe) wait(timeout time.Duration) {
	if timeout > 0 {
		timer := time.AfterFunc(timeout, func() {
			q.conn.p.mu.Lock()
			defer q.conn.p.mu.Unlock()
			q.cond.Broadcast()
		})
		defer timer.Stop()
	}
	q.cond.Wait()
}

// deliver delivers the first item of the queue, or a part of it. p.mu is held, and released during network calls.
func (q *pipe) deliver() {
	switch q.queue[0].kind {
	case opening:
		q.queue = q.queue[1:]
		q.connect()
	case bytes:
		q.send()
	case end:
		q.queue = nil
		q.dst.CloseWrite()
		q.done = true
	case aborted:
		q.queue = nil
		q.done = true
		if q.dir == Replies {
			q.conn.close(true)
			return
		}
		// The server gets an orderly close, so that earlier bytes are not lost; the client receives no more bytes.
		q.dst.CloseWrite()
		q.conn.down.discard()
	}
}

// connect opens the connection to the server. Only Close cancels it: a canceled attempt ends with an orderly close,
// but Reset must send the server a reset.
func (q *pipe) connect() {
	c, upstream := q.conn, q.conn.p.upstream
	c.p.mu.Unlock()
	var d net.Dialer
	server, err := d.DialContext(c.p.ctx, "tcp", upstream)
	c.p.mu.Lock()
	switch {
	case c.closed:
		if err == nil {
			abort(server.(*net.TCPConn))
		}
	case err != nil: // the client sees a reset, in the direction of replies
		q.discard()
		c.down.take(aborted, nil)
	default:
		q.dst, c.down.src = server.(*net.TCPConn), server.(*net.TCPConn)
		c.p.wg.Go(c.down.read)
	}
}

// send writes bytes of the first item.
func (q *pipe) send() {
	data := q.queue[0].data
	q.writing = true
	q.dst.SetWriteDeadline(time.Time{})
	q.conn.p.mu.Unlock()
	n, err := q.dst.Write(data)
	q.conn.p.mu.Lock()
	q.writing = false
	q.cond.Broadcast()
	if q.conn.closed || q.gap || q.broken {
		return // the queue was dropped meanwhile
	}
	q.size -= n
	if q.queue[0].data = data[n:]; n == len(data) {
		q.queue = q.queue[1:]
	}
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		q.discard() // the other direction fails after its remaining bytes
	}
}

func abort(c *net.TCPConn) {
	c.SetLinger(0)
	c.Close()
}
