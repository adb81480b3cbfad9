package etcd

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/stats"

	"github.com/fencelock/fencelock/backend/kit"
)

// A member that the leader does not hear, or that is far behind, is not silent: it greets, and tells watchers what it
// learns. But it answers none of the requests that take a majority. A third of all would hang beside it until they are
// given up, and what takes several would seldom come to its end: places in the queue whose requests have left would
// become more than are removed. So a member that owes an answer is left when another one has answered what was asked
// later. When nobody answers, as in an election, nobody is left for it.

// unheardOut is for how long no connection is made to a member that was left; twice as long each further time, up to
// mostUnheardOut, until it answers again.
const (
	unheardOut     = 2 * time.Second
	mostUnheardOut = 8 * unheardOut
)

var errUnheard = errors.New("it owes an answer, and another server has answered a later request")

// member is what is known of the server at an address. Times are those of connections.now.
type member struct {
	answered int64 // when the latest request was sent that it answered
	left     int64
	out      time.Duration // for how long it is left alone then; zero if it has answered since
}

// question is a request that takes a majority.
type question struct {
	sent int64
	on   atomic.Pointer[connection] // nil until one stands
}

type questionKey struct{}

// asking begins a question, if a request of method is one. It has been answered, or given up, when end is called.
func (c *connections) asking(ctx context.Context, method string) (asking context.Context, end func(error)) {
	if !strings.HasPrefix(method, "/etcdserverpb.KV/") {
		return ctx, func(error) {}
	}
	q := &question{sent: c.now()}
	ctx, cancel := context.WithCancel(context.WithValue(ctx, questionKey{}, q))
	pause := time.Duration(c.bears.Load() / 8)
	timer := time.AfterFunc(pause, func() {
		for !c.leave(q) && kit.Sleep(ctx, pause) == nil {
		}
	})
	return ctx, func(err error) {
		timer.Stop()
		cancel()
		if err == nil {
			c.noteAnswer(q)
		}
	}
}

func (c *connections) noteAnswer(q *question) {
	conn := q.on.Load()
	if conn == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.memberLocked(conn.addr)
	m.answered = max(m.answered, q.sent)
	if q.sent > m.left {
		m.out = 0
	}
}

// leave closes the connections to the member that owes the answer to q for a second, if another one has answered what
// was asked later, and it has not. One that was left before, and has not answered since, gets a quarter of that.
func (c *connections) leave(q *question) (left bool) {
	conn := q.on.Load()
	if conn == nil {
		return false
	}
	c.mu.Lock()
	now, m, patience := c.now(), c.memberLocked(conn.addr), c.bears.Load()/2
	if m.out > 0 {
		patience /= 4
	}
	behind := false
	for _, other := range c.members {
		behind = behind || other.answered > q.sent
	}
	if !behind || m.answered > q.sent || now-q.sent < patience {
		c.mu.Unlock()
		return false
	}
	if q.sent > m.left { // several requests that hang together count once
		m.left, m.out = now, min(max(2*m.out, unheardOut), mostUnheardOut)
	}
	var open []*connection
	for other := range c.open {
		if other.addr == conn.addr {
			open = append(open, other)
		}
	}
	c.mu.Unlock()
	for _, other := range open {
		_ = other.Close()
	}
	return true
}

func (c *connections) memberLocked(addr string) *member {
	m := c.members[addr]
	if m == nil {
		m = &member{}
		c.members[addr] = m
	}
	return m
}

// leftAlone reports whether no connection to a member is to be made now.
func (c *connections) leftAlone(addr string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.memberLocked(addr)
	return m.out > 0 && c.now() < m.left+int64(m.out)
}

// admit lets connections to all members be made again.
func (c *connections) admit() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.members {
		m.out = 0
	}
}

// local is the address of our side of a connection, by which gRPC tells which one a request goes out on.
type local struct {
	net.Addr
	of *connection
}

// LocalAddr implements net.Conn.
func (c *connection) LocalAddr() net.Addr { return local{c.Conn.LocalAddr(), c} }

// departed is told by gRPC which connection a request goes out on.
type departed struct{}

// HandleRPC implements stats.Handler.
func (departed) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if out, ok := s.(*stats.OutHeader); ok {
		q, asked := ctx.Value(questionKey{}).(*question)
		if at, ours := out.LocalAddr.(local); asked && ours {
			q.on.Store(at.of)
		}
	}
}

// TagRPC implements stats.Handler.
func (departed) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// TagConn implements stats.Handler.
func (departed) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (departed) HandleConn(context.Context, stats.ConnStats) {}
