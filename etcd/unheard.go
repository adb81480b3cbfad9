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

// Members that answer, but not us. One that the leader does not hear, or that is far behind, is not silent: it greets,
// and tells watchers what it learns. But it answers none of the requests that take a majority. A third of all would
// hang beside it until they are given up, and what takes several would seldom come to its end: places in the queue
// whose callers have left would become more than are removed. So a member that owes an answer is left when another one
// has answered what was asked later. When nobody answers, as in an election, nobody is left for it
// (TestNobodyIsLeftWhileNobodyAnswers).
//
// A bound on the time alone would not do: when the machine is busy, or the cluster elects, all members are slow at
// once, and leaving them all helps nobody.

// unheardOut is for how long no connection is made to a member that was left; twice as long each further time, up to
// mostUnheardOut, until it answers again.
const (
	unheardOut     = 2 * time.Second
	mostUnheardOut = 8 * unheardOut
)

// errUnheard is why a connection is refused meanwhile; gRPC tries again by itself.
var errUnheard = errors.New("it owes an answer, and another server has answered a later request")

// member is what is known of the server at an address. Times are those of connections.now, connections.mu protects
// them. It is kept for the life of the client, one for each address that was ever dialled.
type member struct {
	// When the latest request was sent that it has answered.
	answered int64
	// When it was left the last time, and for how long from then; out is zero if it has answered since.
	left int64
	out  time.Duration
}

// question is a request that takes a majority, from before it is sent until it is answered or given up.
type question struct {
	sent int64
	on   atomic.Pointer[connection] // nil until one stands
}

// questionKey is where a context carries its question, for departed to find.
type questionKey struct{}

// asking begins a question, if a request of method is one. It has been answered, or given up, when end is called. In
// between a timer looks, every eighth of what a server may be silent, whether the member that owes the answer is to be
// left. From its first look on it is a goroutine, which ends with end, or when it has left the member.
func (c *connections) asking(ctx context.Context, method string) (asking context.Context, end func(error)) {
	if !strings.HasPrefix(method, "/etcdserverpb.KV/") {
		return ctx, func(error) {}
	}
	q := &question{sent: c.now()}
	ctx, cancel := context.WithCancel(context.WithValue(ctx, questionKey{}, q))
	pause := time.Duration(c.bears.Load() / 8)
	// Most requests are answered before the first look, and cost a timer. The condition of leave may come true at any
	// later moment, by another member's answer, so it is looked at again and again.
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

// noteAnswer notes that a member has answered a question. One that was left and answers what was asked since is like
// any other again. A question on a connection that is not ours, or on none, says nothing.
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

// leave closes the connections to the member that owes the answer to q, and reports whether it did. Three things must
// be true. The member has owed the answer for half of what a server may be silent, or for an eighth if it was left
// before and has not answered since. Another member has answered what was asked later. And this one has not: one slow
// answer among others is no reason (TestServerThatIsSlowOnceIsKept).
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
	// Several requests that hang together count once.
	if q.sent > m.left {
		m.left, m.out = now, min(max(2*m.out, unheardOut), mostUnheardOut)
	}
	c.mu.Unlock()
	c.closeIf(func(other *connection) bool { return other.addr == conn.addr })
	return true
}

// memberLocked returns what is known of the server at an address. The caller holds connections.mu.
func (c *connections) memberLocked(addr string) *member {
	m := c.members[addr]
	if m == nil {
		m = &member{}
		c.members[addr] = m
	}
	return m
}

// leftAlone reports whether no connection to a member is to be made now. gRPC asks again after its own pause, so that
// nothing has to end the time.
func (c *connections) leftAlone(addr string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.memberLocked(addr)
	return m.out > 0 && c.now() < m.left+int64(m.out)
}

// admit lets connections to all members be made again. It is called when no connection stands: then any member is
// better than none.
func (c *connections) admit() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.members {
		m.out = 0
	}
}

// local is the address of our side of a connection, by which gRPC's statistics tell which one a request goes out on.
type local struct {
	net.Addr
	of *connection
}

// LocalAddr returns the address with the connection in it. It is net.Conn's.
func (c *connection) LocalAddr() net.Addr { return local{c.Conn.LocalAddr(), c} }

// departed is told by gRPC which connection a request goes out on. It is a stats.Handler of which only HandleRPC does
// anything.
type departed struct{}

// HandleRPC notes at a question which connection it goes out on, when gRPC writes its header there.
func (departed) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if out, ok := s.(*stats.OutHeader); ok {
		q, asked := ctx.Value(questionKey{}).(*question)
		if at, ours := out.LocalAddr.(local); asked && ours {
			q.on.Store(at.of)
		}
	}
}

// TagRPC adds nothing to the context of a request.
func (departed) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// TagConn adds nothing to the context of a connection.
func (departed) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn is told of connections that begin and end, which dial and Close know already.
func (departed) HandleConn(context.Context, stats.ConnStats) {}
