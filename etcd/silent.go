package etcd

import (
	"context"
	"errors"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Servers that stand still. A stopped process, or a network that drops all packets, keeps its connections open: one of
// three such servers still gets a third of all requests, and watches through it receive no events. gRPC does not ping
// more often than every 10 s, and closes the connection after 13 s. Then 12 hand-overs beside a frozen follower took
// 13.1 to 13.9 s; with the connections closed after 2 s without an answer they take 2.7 s (TestSilentServerIsLeft).
//
// So every connection notes since when it has been written to and not read from. Before each request a timer is set;
// if it fires before the answer, connections that have owed one for long are closed. gRPC's pings check a connection
// without requests.

// silence is the time a request waits for an answer before the connections are checked. It grows while a server is
// slow to check a password: see bearWith.
const silence = 2 * time.Second

// mostSilence bounds the growth of silence, see bearWith. gRPC's own keepalive does not end it: a server that is
// busy answers its pings.
const mostSilence = 8 * silence

// maxBackoff is the longest pause between two attempts to connect. With gRPC's own two minutes, locks would stay
// unreachable for that long after an outage.
const maxBackoff = 3 * time.Second

// connections are the connections of a client that Open has made. A connection is closed when its server owes an
// answer and does not send it. Its requests fail, and their senders repeat them at another server; watches restart
// there. The unresponsive server is used again when it has answered gRPC's greeting. The engine repeats a request at
// another server before that, and so gets past a server that answers others but not this client.
//
// A nil *connections does no checks: a driver that New made has it. There is no background work; every timer belongs
// to a request and is stopped by its answer.
type connections struct {
	begun time.Time
	// The error of the last request that found no server, for failure and Open.
	failed atomic.Pointer[string]
	// The time for which a server may not answer, in nanoseconds: see bearWith.
	bears atomic.Int64
	// Nil without a user.
	token *token

	// Connections that stand. The mutex is held for a moment only, never while a connection is dialled or closed.
	mu   sync.Mutex // protects the following fields
	open map[*connection]struct{}
}

// newConnections returns the connections of a client before its first one. user is empty for a client without a
// password.
func newConnections(user string) *connections {
	c := &connections{begun: time.Now(), open: map[*connection]struct{}{}}
	c.bears.Store(int64(silence))
	if user != "" {
		c.token = &token{conns: c}
	}
	return c
}

// options make a client use c. The interceptor of c comes after the token's, so that it covers the requests for a
// token.
func (c *connections) options() []grpc.DialOption {
	var options []grpc.DialOption
	if c.token != nil {
		options = append(options,
			grpc.WithChainUnaryInterceptor(c.token.unary), grpc.WithChainStreamInterceptor(c.token.stream))
	}
	return append(options,
		grpc.WithContextDialer(c.dial),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxBackoff,
			},
			MinConnectTimeout: 3 * maxBackoff,
		}),
		grpc.WithChainUnaryInterceptor(func(
			ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
			call grpc.UnaryInvoker, opts ...grpc.CallOption,
		) error {
			defer c.expectAnswer()()
			err := call(ctx, method, request, reply, conn, opts...)
			c.noteFailure(err)
			return err
		}),
	)
}

// noteFailure keeps gRPC's error about its connections when a request fails for want of one. The client library would
// replace it by "context deadline exceeded".
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

// bearWith gets the result of a request for a token, and sets the time for which servers may not answer. Checking a
// password is slow; a client that gives up and asks again starts another check, until all servers are behind. So each
// failure doubles the time for the next request for a token, and for all other requests, up to mostSilence; a success
// resets it.
func (c *connections) bearWith(err error) {
	switch status.Code(err) {
	case codes.OK:
		c.bears.Store(int64(silence))
	case codes.Unavailable, codes.DeadlineExceeded:
		c.bears.Store(min(2*c.bears.Load(), int64(mostSilence)))
	}
}

// failure returns the error of the last request that found no server, or nil. It is advice for the error of Open, and
// no decision depends on it.
func (c *connections) failure() error {
	if text := c.failed.Load(); text != nil {
		return errors.New(*text)
	}
	return nil
}

// dial is gRPC's dialer.
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

// expectAnswer is called before a request is sent, and answered when the answer is there: that stops the timer.
func (c *connections) expectAnswer() (answered func() bool) {
	if c == nil {
		return func() bool { return true }
	}
	return time.AfterFunc(time.Duration(c.bears.Load()), c.closeSilent).Stop
}

// closeSilent closes the connections on which a server has owed an answer for half of c.bears: the request that hangs
// was written a little after its timer was set. gRPC then fails the requests on them. Frames that need no answer
// count, too: closing a connection whose server owed no answer does no harm.
func (c *connections) closeSilent() {
	before := c.now() - c.bears.Load()/2
	c.mu.Lock()
	open := slices.Collect(maps.Keys(c.open))
	c.mu.Unlock()
	for _, conn := range open { // after c.mu is free, since Close takes it
		if since := conn.asked.Load(); since != 0 && since < before {
			_ = conn.Close()
		}
	}
}

// now is the time since c was made, in nanoseconds and never zero, because zero means "not asked". It is the process's
// own monotonic clock: it times the network, not the validity of holds.
func (c *connections) now() int64 { return 1 + int64(time.Since(c.begun)) }

// connection records since when its server owes an answer. Any byte that is read counts as an answer: the server
// lives, and this layer does not judge answers. gRPC reads and writes from its own goroutines, hence the atomic.
type connection struct {
	net.Conn
	all *connections
	// When the first bytes after the last read were written; zero if no bytes were.
	asked atomic.Int64
}

// Write writes to the server, which owes an answer from then on if it did not before.
func (c *connection) Write(b []byte) (int, error) {
	if c.asked.Load() == 0 {
		c.asked.CompareAndSwap(0, c.all.now())
	}
	return c.Conn.Write(b)
}

// Read reads from the server, which owes no answer afterwards.
func (c *connection) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.asked.Store(0)
	}
	return n, err
}

// Close closes the connection, once or more often; it is no longer checked.
func (c *connection) Close() error {
	c.all.mu.Lock()
	delete(c.all.open, c)
	c.all.mu.Unlock()
	return c.Conn.Close()
}
