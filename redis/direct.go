package redis

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/redisconn"
)

// direct lets a caller that is alone talk to the server in its own goroutine: handing a step to a flight and the answer
// back wakes two threads, which costs more than all the rest of a round trip's work on this side.
//
// It has one connection of its own, so that it is known which one to interrupt when the caller's context ends without a
// deadline; go-redis does not watch for that. So it exists only where the driver made the client itself, and no hooks
// of the user's are passed by.
type direct struct {
	client *goredis.Client

	mu    sync.Mutex // protects the following fields
	busy  bool
	turn  uint64     // of callers
	ended bool       // the present caller's context has
	conn  *ownedConn // the last one dialled
	shut  bool

	draining map[*ownedConn]bool
}

// newDirect returns a direct that connects as client does.
func newDirect(client *goredis.Client) *direct {
	d := &direct{draining: map[*ownedConn]bool{}}
	opt := *client.Options()
	opt.MaxRetries, opt.DialerRetries = -1, 1
	opt.PoolSize, opt.MinIdleConns, opt.MaxIdleConns, opt.MaxActiveConns = 1, 0, 1, 1
	opt.PushNotificationProcessor = nil
	dial := opt.Dialer
	opt.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return d.dialled(conn), nil
	}
	d.client = goredis.NewClient(&opt)
	return d
}

func (d *direct) dialled(conn net.Conn) net.Conn {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conn = &ownedConn{Conn: conn, d: d, drained: make(chan struct{})}
	if d.ended {
		_ = conn.SetDeadline(past) // an error means that it is closed
	}
	if raw, ok := conn.(syscall.Conn); ok {
		return checkedConn{d.conn, raw}
	}
	return d.conn
}

var past = time.Unix(1, 0)

// enter gives the caller its turn, if nobody else has it.
func (d *direct) enter() (turn uint64, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.busy {
		return 0, false
	}
	d.busy, d.ended = true, false
	d.turn++
	return d.turn, true
}

func (d *direct) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.busy = false
}

// interrupt ends the exchange of that turn, unless it is over.
func (d *direct) interrupt(turn uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.busy || d.turn != turn {
		return
	}
	d.ended = true
	if d.conn != nil && !d.conn.draining {
		_ = d.conn.SetDeadline(past) // an error means that it is closed
	}
}

// doDirect runs s in the caller's goroutine, if the caller is alone. It is false if it did not.
func (b *batcher) doDirect(ctx context.Context, s *step) (done bool, err error) {
	if b.direct == nil {
		return false, nil
	}
	b.mu.Lock()
	alone := len(b.active) == 0 && !b.closed
	b.mu.Unlock()
	if !alone {
		return false, nil
	}
	turn, ok := b.direct.enter()
	if !ok {
		return false, nil
	}
	defer b.direct.leave()
	stop := context.AfterFunc(ctx, func() { b.direct.interrupt(turn) })
	x := exchanges.Get().(*exchange)
	x.batch = append(x.batch[:0], s)
	s.sentAt = b.clock.Now()
	b.sendOne(redisconn.WithDeadline(ctx, latest(x.batch)), b.direct.client, x)
	clear(x.args)
	x.args = x.args[:0]
	clear(x.batch)
	exchanges.Put(x)
	stop()
	<-s.done
	if s.err != nil {
		s.drained = b.direct.drained()
	}
	if isContext(s.err) {
		// A client without hooks looks at the context before it sends. Later the connection's deadline ends an exchange, which is
		// another error.
		s.err = &redisconn.Failure{Cause: s.err}
	}
	return true, contextFirst(ctx, s)
}

func isContext(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

var exchanges = sync.Pool{New: func() any { return new(exchange) }}

func (d *direct) close() error {
	d.mu.Lock()
	d.shut = true
	for c := range d.draining {
		_ = c.SetDeadline(past) // an error means that it is closed
	}
	d.mu.Unlock()
	return d.client.Close()
}

// drained returns what is closed when the server has run all that the failed exchange of the present turn sent, or
// nothing if it cannot be told.
func (d *direct) drained() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conn == nil || !d.conn.draining {
		return nil
	}
	return d.conn.drained
}

// ownedConn is a connection of direct. One that is given up in the middle of an exchange is not just closed: the server may
// read what was sent later than what other connections bring it then, which is what tidies up behind it. It is closed for
// writing, and read until the server closes it too, which it does when it has run everything.
type ownedConn struct {
	net.Conn
	d       *direct
	drained chan struct{} // closed when the server has run all that was sent, or flightTime after the end

	draining bool // protected by d.mu
}

// checkedConn is one of which go-redis can see whether it is alive.
type checkedConn struct {
	*ownedConn
	raw syscall.Conn
}

func (c checkedConn) SyscallConn() (syscall.RawConn, error) { return c.raw.SyscallConn() }

// NetConn lets go-redis look at the connection below TLS.
func (c *ownedConn) NetConn() net.Conn { return c.Conn }

// Close closes the connection, or lets it drain.
func (c *ownedConn) Close() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if first, drain := c.retire(ok); !first {
		return nil
	} else if !drain {
		return c.Conn.Close()
	}
	go func() {
		if half.CloseWrite() == nil {
			_, _ = io.Copy(io.Discard, c.Conn) // its end is all that matters
		}
		_ = c.Conn.Close() // of no more use
		close(c.drained)
		c.d.mu.Lock()
		defer c.d.mu.Unlock()
		delete(c.d.draining, c)
	}()
	return nil
}

// retire decides what becomes of the connection: it drains if it can, and the present turn may have sent something on it.
func (c *ownedConn) retire(can bool) (first, drain bool) {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if c.draining {
		return false, false
	}
	if !can || !c.d.busy || c.d.shut {
		return true, false
	}
	c.draining = true
	c.d.draining[c] = true
	_ = c.SetDeadline(time.Now().Add(flightTime)) // an error shows in the next use
	return true, true
}
