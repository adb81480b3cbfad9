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

// Servers that stand still. A process that is stopped, or a network that swallows everything, keeps its connections
// open: of three servers it goes on being sent a third of all requests, and watches through it hear nothing. gRPC does
// not ping more often than every 10 s, and gives up after 13 s. Then 12 hand-overs beside a frozen follower took 13.1
// to 13.9 s; with the connections closed after 2 s of silence they take 2.7 s (TestSilentServerIsLeft).
//
// So every connection notes since when it has been written to and not read from. Before each request a timer is set; if
// it fires before the answer, connections that have owed one for long are closed. A connection on which nobody asks for
// anything is left to gRPC's pings.

// silence is for how long a request waits for an answer until the connections are looked at. It grows while a server is
// slow to check a password: see bearWith.
const silence = 2 * time.Second

// mostSilence bounds what silence may grow to, see bearWith. gRPC's own keepalive does not end it: a server that is
// busy answers its pings.
const mostSilence = 8 * silence

// maxBackoff is the longest pause between two attempts to connect. gRPC's own is two minutes, for which locks would
// stay out of reach after a long outage.
const maxBackoff = 3 * time.Second

// connections are those of a client that Open has made. One on which a server owes an answer and says nothing is
// closed. What waited on it fails, is repeated by its sender, and goes to another server; watches begin anew there. The
// silent server is used again when it has answered gRPC's greeting. One that answers only some of what it is asked is
// left too: see member.
//
// A nil *connections watches over nothing: it is what a driver has whose client New was given. Nothing here runs by
// itself; every timer belongs to a request and is stopped when that has its answer.
type connections struct {
	begun time.Time
	// Why the last request that found no server found none: failure tells it, and Open.
	failed atomic.Pointer[string]
	// For how long a server may be silent, in nanoseconds: see bearWith.
	bears atomic.Int64
	// Nil without a user.
	token *token

	// Connections that stand, and what is known of the members by address. The mutex is held for a moment only, never
	// while a connection is dialled or closed.
	mu      sync.Mutex // protects the following fields
	open    map[*connection]struct{}
	members map[string]*member // by address
}

// newConnections returns the connections of a client that has made none yet. user is empty for one without a password.
func newConnections(user string) *connections {
	c := &connections{begun: time.Now(), open: map[*connection]struct{}{}, members: map[string]*member{}}
	c.bears.Store(int64(silence))
	if user != "" {
		c.token = &token{conns: c}
	}
	return c
}

// options make a client use c. The interceptor of c comes after the token's, so that the requests for a token are
// watched over as well.
func (c *connections) options() []grpc.DialOption {
	var options []grpc.DialOption
	if c.token != nil {
		options = append(options,
			grpc.WithChainUnaryInterceptor(c.token.unary), grpc.WithChainStreamInterceptor(c.token.stream))
	}
	return append(options,
		grpc.WithContextDialer(c.dial),
		grpc.WithStatsHandler(departed{}),
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
			ctx, end := c.asking(ctx, method)
			err := call(ctx, method, request, reply, conn, opts...)
			end(err)
			c.noteFailure(err)
			return err
		}),
	)
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
	if s.Code() != codes.Unavailable || unsent(err) {
		c.admit() // no connection stands
	}
}

// bearWith is told how a request for a token has ended, and sets how long servers may be silent. Checking a password is
// what takes a server long; one that is given up for it makes another one begin the same, until all are behind. So each
// that fails gives the next one, and whatever else is asked meanwhile, twice the time, up to mostSilence; one that
// succeeds ends that.
func (c *connections) bearWith(err error) {
	switch status.Code(err) {
	case codes.OK:
		c.bears.Store(int64(silence))
	case codes.Unavailable, codes.DeadlineExceeded:
		c.bears.Store(min(2*c.bears.Load(), int64(mostSilence)))
	}
}

// failure is why the last request that found no server found none, or nil. It is advice for the error of Open, and
// decides nothing.
func (c *connections) failure() error {
	if text := c.failed.Load(); text != nil {
		return errors.New(*text)
	}
	return nil
}

// dial is how gRPC connects. A member that was left a moment ago is refused here, without asking it, so that the
// balancer turns to the others.
func (c *connections) dial(ctx context.Context, addr string) (net.Conn, error) {
	if c.leftAlone(addr) {
		return nil, errUnheard
	}
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	conn := &connection{Conn: raw, addr: addr, all: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open[conn] = struct{}{}
	return conn, nil
}

// expectAnswer is called before a request is sent, and what it returns when the answer is there: that stops the timer.
func (c *connections) expectAnswer() (answered func() bool) {
	if c == nil {
		return func() bool { return true }
	}
	return time.AfterFunc(time.Duration(c.bears.Load()), c.closeSilent).Stop
}

// closeSilent closes the connections on which a server has owed an answer for half of what it may be silent. Half,
// because the request that hangs was written a little after its timer was set. What a server need not answer counts
// too: no harm is done by closing a connection on which it had nothing to say.
func (c *connections) closeSilent() {
	before := c.now() - c.bears.Load()/2
	c.closeIf(func(conn *connection) bool {
		since := conn.asked.Load()
		return since != 0 && since < before
	})
}

// closeIf closes the connections of which that is true. gRPC then fails what waits on them.
func (c *connections) closeIf(leave func(*connection) bool) {
	c.mu.Lock()
	open := slices.Collect(maps.Keys(c.open))
	c.mu.Unlock()
	// After c.mu is free, since Close takes it.
	for _, conn := range open {
		if leave(conn) {
			_ = conn.Close()
		}
	}
}

// now is the time since c was made, in nanoseconds and never zero, because zero means "not asked". It is the process's
// own monotonic clock: what it measures is the network's business, not the validity of holds.
func (c *connections) now() int64 { return 1 + int64(time.Since(c.begun)) }

// connection knows since when its server owes an answer. Any byte that is read counts as one: the server lives, and
// what it answers is not for this layer to judge. gRPC reads and writes from goroutines of its own, hence the atomic.
type connection struct {
	net.Conn
	addr string // that was dialled
	all  *connections
	// When the first bytes were written after those that were read last; zero if there were none.
	asked atomic.Int64
}

// Write writes to the server, which owes an answer from then on if it did not before.
func (c *connection) Write(b []byte) (int, error) {
	if c.asked.Load() == 0 {
		c.asked.CompareAndSwap(0, c.all.now())
	}
	return c.Conn.Write(b)
}

// Read reads what the server says, after which it owes nothing.
func (c *connection) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.asked.Store(0)
	}
	return n, err
}

// Close closes the connection, once or more often; nobody looks at it any more.
func (c *connection) Close() error {
	c.all.mu.Lock()
	delete(c.all.open, c)
	c.all.mu.Unlock()
	return c.Conn.Close()
}
