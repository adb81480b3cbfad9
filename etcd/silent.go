package etcd

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// silence is for how long a request waits for an answer until the connections are looked at. gRPC's own keepalive,
// which pings at most every 10 s, needs 13 s to notice a server that stands still; until then a third of the requests
// to three servers would hang.
const silence = 2 * time.Second

// maxBackoff is the longest pause between two attempts to connect. gRPC's own is two minutes, for which locks would go
// on being out of reach after a long outage.
const maxBackoff = 3 * time.Second

// connections are those of a client that Open has made. One on which a server owes an answer and says nothing is
// closed: what waited on it fails, is repeated by whoever sent it, and goes to another server, and watches begin anew
// there. The silent server is used again when it has answered gRPC's greeting. A nil *connections watches over nothing.
type connections struct {
	begun  time.Time
	failed atomic.Pointer[string] // why the last request that found no server found none

	mu   sync.Mutex // protects the following field
	open map[*connection]struct{}
}

func newConnections() *connections {
	return &connections{begun: time.Now(), open: map[*connection]struct{}{}}
}

// options make a client use c.
func (c *connections) options() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithContextDialer(c.dial),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxBackoff},
			MinConnectTimeout: 3 * maxBackoff,
		}),
		grpc.WithChainUnaryInterceptor(func(
			ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption,
		) error {
			defer c.expectAnswer()()
			err := call(ctx, method, request, reply, conn, opts...)
			c.noteFailure(err)
			return err
		}),
	}
}

// noteFailure keeps what gRPC says of its connections when a request fails for want of one. The client library would
// replace that by "context deadline exceeded".
func (c *connections) noteFailure(err error) {
	const before = "latest balancer error: "
	s := status.Convert(err)
	text := s.Message()
	if at := strings.Index(text, before); at >= 0 {
		text = text[at+len(before):]
	} else if s.Code() != codes.Unavailable {
		return
	}
	c.failed.Store(&text)
}

// failure is why the last request that found no server found none, or nil.
func (c *connections) failure() error {
	if text := c.failed.Load(); text != nil {
		return errors.New(*text)
	}
	return nil
}

func (c *connections) dial(ctx context.Context, addr string) (net.Conn, error) {
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	conn := &connection{Conn: raw, all: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open[conn] = struct{}{}
	return conn, nil
}

// expectAnswer is called before a request is sent, and what it returns when the answer is there.
func (c *connections) expectAnswer() (answered func() bool) {
	if c == nil {
		return func() bool { return true }
	}
	return time.AfterFunc(silence, c.closeSilent).Stop
}

// closeSilent closes the connections on which a server has owed an answer for long. The request that hangs was written
// a little after it began, if it was not held up; and what a server need not answer counts too: no harm is done by
// closing a connection on which it had nothing to say.
func (c *connections) closeSilent() {
	before := c.now() - int64(silence)/2
	c.mu.Lock()
	var silent []*connection
	for conn := range c.open {
		if since := conn.asked.Load(); since != 0 && since < before {
			silent = append(silent, conn)
		}
	}
	c.mu.Unlock()
	for _, conn := range silent {
		_ = conn.Close()
	}
}

// now is never zero.
func (c *connections) now() int64 { return 1 + int64(time.Since(c.begun)) }

// connection knows since when its server owes an answer.
type connection struct {
	net.Conn
	all   *connections
	asked atomic.Int64 // when the first bytes were written after those that were read last; zero if none were
}

func (c *connection) Write(b []byte) (int, error) {
	if c.asked.Load() == 0 {
		c.asked.CompareAndSwap(0, c.all.now())
	}
	return c.Conn.Write(b)
}

func (c *connection) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.asked.Store(0)
	}
	return n, err
}

func (c *connection) Close() error {
	c.all.mu.Lock()
	delete(c.all.open, c)
	c.all.mu.Unlock()
	return c.Conn.Close()
}
