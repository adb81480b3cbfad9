package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/freeport"
)

// patience is how long a test waits for an expected event: the machine may be slow.
const patience = time.Minute

// quiet is a logger for tests: the test reports failures.
func quiet(t testing.TB) *slog.Logger {
	if testing.Verbose() {
		return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelInfo}))
	}
	return slog.New(slog.DiscardHandler)
}

// testWriter writes to the test's log until the test has ended.
type testWriter struct{ t testing.TB }

func (w testWriter) Write(text []byte) (int, error) {
	if w.t.Context().Err() == nil {
		w.t.Logf("%s", text)
	}
	return len(text), nil
}

// start starts a server that ends with the test.
func start(t testing.TB, c Config) *Server {
	t.Helper()
	if c.Log == nil {
		c.Log = quiet(t)
	}
	var s *Server
	if err := freeport.Again(func() (err error) {
		s, err = Start(t.Context(), c)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}

// client speaks the wire protocol and relies on nothing by itself.
type client struct {
	t      testing.TB
	stream ClientStream
	close  func()
	pushes chan *lockpb.Reply

	mu      sync.Mutex
	number  uint64
	pending map[uint64]chan *lockpb.Reply
	err     error
}

var errEnded = errors.New("the stream has ended")

func newClient(t testing.TB, stream ClientStream, close func()) *client {
	t.Cleanup(close)
	c := &client{
		t: t, stream: stream, close: close, pushes: make(chan *lockpb.Reply, 10_000),
		pending: map[uint64]chan *lockpb.Reply{},
	}
	go c.receive()
	return c
}

// attach connects within the process.
func attach(t testing.TB, s *Server) *client {
	ctx, cancel := context.WithCancel(context.Background())
	return newClient(t, s.Attach(ctx), cancel)
}

// dial connects over gRPC.
func dial(t testing.TB, address string) *client {
	t.Helper()
	return dialFrom(t, address, "127.0.0.1")
}

// dialFrom connects from an address of this machine.
func dialFrom(t testing.TB, address, from string) *client {
	t.Helper()
	var c *client
	eventually(t, "a connection", func() bool { // a busy machine may need more than one attempt
		var err error
		c, err = tryDialFrom(t, address, from)
		return err == nil
	})
	return c
}

func tryDial(t testing.TB, address string) (*client, error) {
	return tryDialFrom(t, address, "127.0.0.1")
}

func tryDialFrom(t testing.TB, address, from string) (*client, error) {
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}))
	if err != nil {
		return nil, err
	}
	if !ready(conn) { // a paused process accepts connections but does not answer
		conn.Close()
		return nil, errors.New("no connection")
	}
	stream, err := lockpb.NewLockServiceClient(conn).Connect(context.Background())
	if err != nil {
		conn.Close()
		return nil, err
	}
	return newClient(t, stream, func() { conn.Close() }), nil
}

// impatience is how long a server may take to answer a new connection.
const impatience = time.Second

func ready(conn *grpc.ClientConn) bool {
	ctx, cancel := context.WithTimeout(context.Background(), impatience)
	defer cancel()
	conn.Connect()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if state == connectivity.TransientFailure || !conn.WaitForStateChange(ctx, state) {
			return false
		}
	}
	return true
}

func (c *client) receive() {
	for {
		m, err := c.stream.Recv()
		if err != nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.err = errEnded
			if !errors.Is(err, io.EOF) {
				c.err = fmt.Errorf("%w: %w", errEnded, err)
			}
			for _, box := range c.pending {
				close(box)
			}
			c.pending = nil
			close(c.pushes)
			return
		}
		for _, r := range m.Replies {
			if r.Number == 0 {
				c.pushes <- r
				continue
			}
			c.mu.Lock()
			box := c.pending[r.Number]
			delete(c.pending, r.Number)
			c.mu.Unlock()
			if box == nil {
				c.t.Errorf("a reply to nothing: %v", r)
				continue
			}
			box <- r
		}
	}
}

// send sends a request; the channel has the reply, or is closed if the stream ends.
func (c *client) send(q *lockpb.Request) <-chan *lockpb.Reply {
	c.mu.Lock()
	defer c.mu.Unlock()
	box := make(chan *lockpb.Reply, 1)
	if c.err != nil {
		close(box)
		return box
	}
	c.number++
	q.Number = c.number
	c.pending[q.Number] = box
	if err := c.stream.Send(&lockpb.ClientMessage{Requests: []*lockpb.Request{q}}); err != nil {
		delete(c.pending, q.Number)
		close(box)
	}
	return box
}

// try sends a request and waits for its reply.
func (c *client) try(q *lockpb.Request) (*lockpb.Reply, error) { return c.within(patience, q) }

func (c *client) within(d time.Duration, q *lockpb.Request) (*lockpb.Reply, error) {
	select {
	case r, ok := <-c.send(q):
		if !ok {
			return nil, errEnded
		}
		return r, nil
	case <-time.After(d):
		return nil, errors.New("no reply")
	}
}

// call is try for requests that must be answered.
func (c *client) call(q *lockpb.Request) *lockpb.Reply {
	c.t.Helper()
	r, err := c.try(q)
	if err != nil {
		c.t.Fatalf("%v: %v", q, err)
	}
	return r
}

// next returns the next push.
func (c *client) next() *lockpb.Reply {
	c.t.Helper()
	select {
	case r, ok := <-c.pushes:
		if !ok {
			c.t.Fatal("no push: the stream has ended")
		}
		return r
	case <-time.After(patience):
		c.t.Fatal("no push")
	}
	return nil
}

func sessionID() []byte {
	id := make([]byte, 16)
	rand.Read(id)
	return id
}

func openOf(session []byte, ttl time.Duration) *lockpb.Request {
	return &lockpb.Request{Session: session, Call: &lockpb.Request_OpenSession{
		OpenSession: &lockpb.OpenSession{TtlNanos: int64(ttl)},
	}}
}

// open opens a session.
func (c *client) open(ttl time.Duration) []byte {
	c.t.Helper()
	id := sessionID()
	r := c.call(openOf(id, ttl))
	if r.GetSession() == nil || !r.Renewed {
		c.t.Fatalf("open: %v", r)
	}
	return id
}

func acquireOf(session []byte, name, id string, wait bool) *lockpb.Request {
	return &lockpb.Request{Session: session, Call: &lockpb.Request_Acquire{
		Acquire: &lockpb.Acquire{Name: name, RequestId: id, Owner: "somebody", Wait: wait},
	}}
}

func releaseOf(session []byte, name, id string, token uint64) *lockpb.Request {
	return &lockpb.Request{Session: session, Call: &lockpb.Request_Release{
		Release: &lockpb.Release{Name: name, RequestId: id, Token: token},
	}}
}

// hold acquires a lock that must be free.
func (c *client) hold(session []byte, name string) (id string, token uint64) {
	c.t.Helper()
	id = backend.NewRequestID()
	r := c.call(acquireOf(session, name, id, false))
	if len(r.GetAcquired().GetGrants()) != 1 {
		c.t.Fatalf("acquire %q: %v", name, r)
	}
	return id, r.GetAcquired().Grants[0].Token
}

// holdShort holds a lock on a new session. A busy machine may use up the TTL before the grant: holdShort tries again.
func (c *client) holdShort(ttl time.Duration, name string) (session []byte, token uint64) {
	c.t.Helper()
	for {
		session = c.open(ttl)
		r := c.call(acquireOf(session, name, backend.NewRequestID(), false))
		if grants := r.GetAcquired().GetGrants(); len(grants) == 1 {
			return session, grants[0].Token
		}
		if code := codeOf(r); code != lockpb.Code_CODE_SESSION_ENDED {
			c.t.Fatalf("acquire %q: %v", name, r)
		}
	}
}

// codeOf is the code of an error reply.
func codeOf(r *lockpb.Reply) lockpb.Code { return r.GetError().GetCode() }
