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

// Members that answer others, but not us. A member that the leader does not hear, or that is far behind, is not
// silent: it sends greetings, and events to watchers. But it answers no request that takes a majority. A third of all
// requests would hang there until their timeout, and operations of several requests would rarely complete: leftover
// places in the queue would grow faster than they are removed. So a member that owes an answer is left when another
// one has answered a later request. When nobody answers, as in an election, no member is left
// (TestNobodyIsLeftWhileNobodyAnswers).
//
// A bound on the time alone is not enough: when the machine is busy, or the cluster elects, all members are slow
// together, and leaving them all helps nobody.

// unheardOut is the time for which a member that was left gets no connections; it doubles each further time, up to
// mostUnheardOut, until the member answers.
const (
	unheardOut     = 2 * time.Second
	mostUnheardOut = 8 * unheardOut
)

// errUnheard is the error of a connection refused meanwhile; gRPC retries.
var errUnheard = errors.New("it owes an answer, and another server has answered a later request")

// member is the state of the server at an address. Times are from connections.now, and connections.mu protects them.
// It is kept for the life of the client, one for each address that was ever dialled.
type member struct {
	// When the latest request that it has answered was sent.
	answered int64
	// When it was left the last time, and for how long from then; out is zero if it has answered since.
	left int64
	out  time.Duration
}

// question is a request that takes a majority, from before it is sent until it is answered or abandoned.
type question struct {
	sent int64
	on   atomic.Pointer[connection] // nil until one stands
}

// questionKey is where a context carries its question, for departed to find.
type questionKey struct{}

// asking begins a question, if a request of method is one; end ends it, answered or abandoned. In between a timer
// checks, every eighth of the time a server may be silent, whether the member that owes the answer is to be left.
// From its first check on it is a goroutine, which ends with end, or when it has left the member.
func (c *connections) asking(ctx context.Context, method string) (asking context.Context, end func(error)) {
	if !strings.HasPrefix(method, "/etcdserverpb.KV/") {
		return ctx, func(error) {}
	}
	q := &question{sent: c.now()}
	ctx, cancel := context.WithCancel(context.WithValue(ctx, questionKey{}, q))
	pause := time.Duration(c.bears.Load() / 8)
	// Most requests are answered before the first look, and cost a timer. The condition of leave may come true at any
	// later moment, by another member's answer, so it is checked repeatedly.
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

// noteAnswer notes that a member has answered a question. A member that was left and answers a later request is
// admitted. A question without a connection, or on a foreign one, is ignored.
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
// be true. The member has owed the answer for half of the time a server may be silent, or for an eighth if it was
// left before and has not answered since. Another member has answered a later request. And this one has not: one slow
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
	// Several hanging requests count once.
	if q.sent > m.left {
		m.left, m.out = now, min(max(2*m.out, unheardOut), mostUnheardOut)
	}
	c.mu.Unlock()
	c.closeIf(func(other *connection) bool { return other.addr == conn.addr })
	return true
}

// memberLocked returns the member at an address. The caller holds connections.mu.
func (c *connections) memberLocked(addr string) *member {
	m := c.members[addr]
	if m == nil {
		m = &member{}
		c.members[addr] = m
	}
	return m
}

// leftAlone reports whether no connection to a member is to be made now. gRPC retries after its own pause, so no
// timer has to end it.
func (c *connections) leftAlone(addr string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.memberLocked(addr)
	return m.out > 0 && c.now() < m.left+int64(m.out)
}

// admit allows connections to all members. It is called when no connection stands: then any member is better than
// no member.
func (c *connections) admit() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.members {
		m.out = 0
	}
}

// local is the address of our side of a connection, which identifies the connection of a request in gRPC's
// statistics.
type local struct {
	net.Addr
	of *connection
}

// LocalAddr returns the address with the connection in it. It is net.Conn's.
func (c *connection) LocalAddr() net.Addr { return local{c.Conn.LocalAddr(), c} }

// departed is notified by gRPC of a request's connection. It is a stats.Handler, of which only HandleRPC has an
// effect.
type departed struct{}

// HandleRPC notes at a question its connection, when gRPC writes its header there.
func (departed) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if out, ok := s.(*stats.OutHeader); ok {
		q, asked := ctx.Value(questionKey{}).(*question)
		if at, ours := out.LocalAddr.(local); asked && ours {
			q.on.Store(at.of)
		}
	}
}

// TagRPC returns ctx unchanged.
func (departed) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// TagConn returns ctx unchanged.
func (departed) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn ignores the begin and end of connections, which dial and Close know.
func (departed) HandleConn(context.Context, stats.ConnStats) {}
