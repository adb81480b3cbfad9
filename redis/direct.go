package redis

import (
	"context"
	"errors"
	"net"
	"sync"
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
}

// newDirect returns a direct that connects as client does.
func newDirect(client *goredis.Client) *direct {
	d := &direct{}
	opt := *client.Options() // its Dialer makes connections that drain
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
	d.conn = ownedOf(conn)
	if d.ended {
		d.conn.interrupt()
	}
	return conn
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
	if d.conn != nil {
		d.conn.interrupt()
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
	b.drain.begin()
	b.sendOne(redisconn.WithDeadline(ctx, latest(x.batch)), b.direct.client, x)
	b.drain.end()
	clear(x.args)
	x.args = x.args[:0]
	clear(x.batch)
	exchanges.Put(x)
	stop()
	<-s.done
	if isContext(s.err) {
		// A client without hooks looks at the context before it sends. Later the connection's deadline ends an
		// exchange, which is another error.
		s.err = &redisconn.Failure{Cause: s.err}
	}
	return true, contextFirst(ctx, s)
}

func isContext(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

var exchanges = sync.Pool{New: func() any { return new(exchange) }}

func (d *direct) close() error { return d.client.Close() }
