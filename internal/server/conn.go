package server

// Connections: reading requests, writing replies, and ending both.
//
//	read ─► handle ─► call.start ─► lead ─┬─► reply ─► outbox ─► write
//	                                Hear ─┘
//
// A client must not be able to fill the server, so each of its ways has a bound. board bounds the commands on their
// way, looks and awaitTurn the reads, the outbox the replies. Too much on its way stops the reader, which stops the
// client. Too many replies end the connection instead: the log cannot wait for a client that does not read.
//
// A session speaks on one connection at a time, the one that it was attached to last: see checkAttached, and
// docs/decisions/2026-11-21-a-session-speaks-on-one-connection.md.

import (
	"cmp"
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/lead"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// Stream is the server's end of one client's connection, over gRPC or in the process.
type Stream interface {
	Context() context.Context
	Recv() (*lockpb.ClientMessage, error)
	Send(*lockpb.ServerMessage) error
}

const (
	// farewell is how long a connection that is cut off has to take the reason.
	farewell = time.Second
	// inFlight is how many commands and keepalives one connection may have on their way. More are not read from it
	// before some are answered: a client cannot fill the server. A large command counts as one for each placeBytes, so
	// that they are bounded in bytes too.
	inFlight   = 4096
	placeBytes = 1 << 10
	// looksAtOnce is how many requests to look at something one connection may have on their way. They are answered one
	// after the other, each when the answers before it are on their way to the client.
	looksAtOnce = 64
	// unreadTime is how long a client may leave a message unread that the connection has no room for.
	unreadTime = 15 * time.Second
)

// conn is one client's connection.
type conn struct {
	server *Server
	stream Stream
	client string // whose it is; empty: nobody's, and unbounded
	ctx    context.Context
	out    *outbox
	looks  chan struct{}
	turn   chan struct{} // holds one while a look is answered
	aboard chan struct{} // holds one for each place that is taken; only the reader adds

	mu    sync.Mutex
	over  bool           // no task begins any more
	tasks sync.WaitGroup // what must end before the connection is forgotten; added to only while over is false

	cut     chan struct{} // closed when the server wants to end it
	cutOnce sync.Once

	watches watches
}

// serveStream talks with one client until either side ends it. When it returns, no task answers on the connection any
// more, and no session is attached to it.
//
// A connection that the server ends has farewell to take the reason, and no longer: a client that does not read must
// not keep it.
func (s *Server) serveStream(stream Stream) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	c := &conn{
		server: s, stream: stream, client: clientOf(ctx), ctx: ctx, out: newOutbox(&s.unread),
		looks: make(chan struct{}, looksAtOnce), turn: make(chan struct{}, 1), aboard: make(chan struct{}, inFlight),
		cut: make(chan struct{}),
	}
	if !s.enter(c) {
		return errClosing
	}
	if most := s.streamsOfOne(); s.streamsOf(c.client) > most {
		s.leave(c)
		e := clientError("client-streams", "the connections that this member takes", most, s.connections())
		return stream.Send(&lockpb.ServerMessage{Replies: []*lockpb.Reply{{
			Answer: &lockpb.Reply_Goodbye{Goodbye: &lockpb.Goodbye{Code: e.Code, Message: e.Message}},
		}}})
	}
	defer s.leave(c)
	reading, writing := make(chan struct{}), make(chan struct{})
	// They end with the stream, which for gRPC is after this function has returned.
	s.streams.Go(func() { defer close(reading); c.read() })
	s.streams.Go(func() { defer close(writing); c.write() })
	select {
	case <-reading:
	case <-writing:
	case <-c.cut:
		select {
		case <-writing:
		case <-time.After(farewell):
		}
	}
	cancel()
	c.finish()
	c.out.abandon()
	if r := s.leadership.Load(); r != nil {
		r.Detach(c)
	}
	return nil
}

// begin counts a task, unless the connection is over.
func (c *conn) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.over {
		c.tasks.Add(1)
	}
	return !c.over
}

// finish waits for the tasks.
func (c *conn) finish() {
	c.mu.Lock()
	c.over = true
	c.mu.Unlock()
	c.tasks.Wait()
}

// board takes so many of the places in flight, and waits while there are too few. It reports false if the connection
// has ended.
func (c *conn) board(places int) bool {
	for i := range places {
		select {
		case c.aboard <- struct{}{}:
		case <-c.ctx.Done():
			c.alight(i)
			return false
		}
	}
	return true
}

// alight gives places back. It does not block.
func (c *conn) alight(places int) {
	for range places {
		<-c.aboard
	}
}

// read starts requests in the order in which they came. All of one message have one instant of receipt.
//
// The end of the stream is read as a farewell only if it is EOF, by which a client says that it sends no more: see
// takeLeave.
func (c *conn) read() {
	for {
		m, err := c.stream.Recv()
		if errors.Is(err, io.EOF) {
			c.takeLeave()
			<-c.ctx.Done()
		}
		if err != nil {
			return
		}
		receipt := c.server.config.now()
		for _, q := range m.GetRequests() {
			c.handle(q, receipt)
		}
		select {
		case <-c.cut: // nobody would hear what came of more
			<-c.ctx.Done()
			return
		default:
		}
	}
}

// takeLeave ends the sessions that are attached to the connection, whose client has said that it sends no more. Only a
// client says that: a connection that breaks, a process that dies and a proxy that stops end a stream in another way,
// and the client may come back. It returns once the sessions have ended, or cannot be ended now.
func (c *conn) takeLeave() {
	defer c.end(&lockpb.Goodbye{Message: "the client has left"}, false)
	r := c.server.leadership.Load()
	if r == nil {
		return
	}
	var leaving sync.WaitGroup
	for _, id := range r.AttachedTo(c) {
		leaving.Add(1)
		err := r.Submit(lead.Proposal{
			Command: machine.Command{Op: machine.OpCloseSession, Session: id, Linger: r.Time.AnyClosed()}, By: c,
			Obsolete: func() error {
				if other := r.Listener(id); other != nil && other != c {
					return notAttached() // it has come back
				}
				return nil
			},
			Done: func(o lead.Outcome, err error) {
				defer leaving.Done()
				if err == nil {
					r.Time.Ended(id)
					r.Forget(id)
					r.Deliver(c, o.Notices)
				}
			},
		})
		if err != nil {
			leaving.Done() // it ends with its TTL
		}
	}
	leaving.Wait()
}

// write sends what is in the outbox, in large messages. The timer ends the connection where the client leaves a message
// unread: Send blocks then, and nothing else would notice while the outbox has room.
func (c *conn) write() {
	after := cmp.Or(c.server.config.unreadTime, unreadTime)
	unread := time.AfterFunc(after, func() { c.end(tooSlow(), true) })
	defer unread.Stop()
	for {
		unread.Stop()
		select {
		case <-c.out.ready:
		case <-c.ctx.Done():
			return
		}
		batch, last := c.out.take()
		unread.Reset(after)
		if len(batch) > 0 && c.stream.Send(&lockpb.ServerMessage{Replies: batch}) != nil || last {
			return
		}
		c.out.sent()
	}
}

// Hear implements lead.Listener: it tells the client what befell one of its sessions.
func (c *conn) Hear(r *lead.Leadership, n *machine.Notice) {
	if n.Type == machine.NoticeGranted {
		c.push(grantedPush(n, r.Time))
		return
	}
	c.push(lostPush(n))
}

// push sends what was not asked for, or an answer that is complete.
func (c *conn) push(r *lockpb.Reply) {
	if !c.out.add(r) {
		c.end(tooSlow(), true)
	}
}

func tooSlow() *lockpb.Goodbye {
	return &lockpb.Goodbye{Code: lockpb.Code_CODE_EXHAUSTED, Message: "the client reads too slowly"}
}

// awaitTurn waits until the next look may be answered: one at a time, and only while the client reads. A look's answer
// is up to pageBytes large, so that those of looksAtOnce would fill the outbox at once. It reports false if the
// connection has ended.
func (c *conn) awaitTurn() bool {
	select {
	case c.turn <- struct{}{}:
	case <-c.ctx.Done():
		return false
	}
	for !c.out.isCalm() {
		select {
		case <-c.out.still:
		case <-c.ctx.Done():
			<-c.turn
			return false
		}
	}
	return true
}

// end says goodbye and ends the connection. It does not wait for that.
func (c *conn) end(why *lockpb.Goodbye, drop bool) {
	c.out.close(&lockpb.Reply{Answer: &lockpb.Reply_Goodbye{Goodbye: why}}, drop)
	c.cutOnce.Do(func() { close(c.cut) })
}

// reply answers q.
func (c *conn) reply(q *lockpb.Request, r *lockpb.Reply) {
	r.Number = q.Number
	c.push(r)
}

// fail answers q with an error.
func (c *conn) fail(q *lockpb.Request, err error) { c.reply(q, errorReply(c.server.wireError(err))) }

// wireError is err in the words of the wire.
func (s *Server) wireError(err error) *lockpb.Error {
	var refused *requestError
	switch {
	case errors.As(err, &refused):
		return refused.wire
	case errors.Is(err, replica.ErrUnknown):
		return &lockpb.Error{Code: lockpb.Code_CODE_UNKNOWN, Message: err.Error()}
	case errors.Is(err, replica.ErrNotLeader):
		return &lockpb.Error{
			Code: lockpb.Code_CODE_NOT_LEADER, Message: err.Error(), LeaderAddress: s.leaderAddress(),
		}
	}
	return &lockpb.Error{Code: lockpb.Code_CODE_UNAVAILABLE, Message: err.Error()}
}

// handle starts one request. It does not wait for its outcome, but for a place if the connection has too much on its
// way. Hello is answered by every member, everything else by the leader: what a member that follows forwarded would
// have two instants of receipt.
func (c *conn) handle(q *lockpb.Request, receipt time.Time) {
	if _, ok := q.Call.(*lockpb.Request_Hello); ok {
		c.reply(q, &lockpb.Reply{Answer: &lockpb.Reply_Welcome{Welcome: c.server.welcome()}})
		return
	}
	r := c.server.leadership.Load()
	if r == nil {
		c.fail(q, replica.ErrNotLeader)
		return
	}
	if err := (&call{conn: c, leadership: r, request: q, receipt: receipt}).start(); err != nil {
		c.fail(q, err)
	}
}

// call is one request on its way.
type call struct {
	*conn
	leadership *lead.Leadership
	request    *lockpb.Request
	receipt    time.Time
	session    machine.SessionID // zero if the request names none
}

// start begins the call. An error is its answer; without one the answer comes later, by reply or fail.
func (x *call) start() (err error) {
	if len(x.request.Session) > 0 || needsSession(x.request) {
		if x.session, err = sessionOf(x.request); err != nil {
			return err
		}
	}
	if err := x.checkAttached(); err != nil {
		return err
	}
	switch q := x.request.Call.(type) {
	case *lockpb.Request_OpenSession:
		return x.openSession(time.Duration(q.OpenSession.GetTtlNanos()))
	case *lockpb.Request_Attach:
		return x.attach(q.Attach)
	case *lockpb.Request_KeepAlive:
		return x.keepAlive()
	case *lockpb.Request_CloseSession:
		return x.closeSession()
	case *lockpb.Request_Acquire:
		return x.acquire([]*lockpb.Acquire{q.Acquire}, q.Acquire.GetUnder())
	case *lockpb.Request_AcquireAll:
		return x.acquire(q.AcquireAll.GetRequests(), q.AcquireAll.GetUnder())
	case *lockpb.Request_CancelWait:
		return x.cancelWait(q.CancelWait)
	case *lockpb.Request_Release:
		return x.release(q.Release)
	case *lockpb.Request_Move:
		return x.move(q.Move)
	case *lockpb.Request_ForceRelease:
		return x.forceRelease(q.ForceRelease)
	case *lockpb.Request_GetHolder:
		return x.holder(q.GetHolder)
	case *lockpb.Request_List:
		return x.list(q.List)
	case *lockpb.Request_Watch:
		return x.watch(q.Watch)
	case *lockpb.Request_Unwatch:
		x.unwatch(q.Unwatch.GetWatch())
		x.reply(x.request, doneReply())
		return nil
	}
	return refused(lockpb.Code_CODE_UNSUPPORTED, "call", "this version does not know the call")
}

func needsSession(q *lockpb.Request) bool {
	switch q.Call.(type) {
	case *lockpb.Request_OpenSession, *lockpb.Request_Attach, *lockpb.Request_KeepAlive, *lockpb.Request_CloseSession,
		*lockpb.Request_Acquire, *lockpb.Request_AcquireAll, *lockpb.Request_CancelWait, *lockpb.Request_Move:
		return true
	}
	return false
}

func notAttached() error {
	return refused(lockpb.Code_CODE_CONFLICT, "session", "it is not attached to this connection")
}

// speaks reports whether the call speaks for a session, which only the connection does to which it is attached.
func (x *call) speaks() bool {
	switch x.request.Call.(type) {
	case *lockpb.Request_KeepAlive, *lockpb.Request_Acquire, *lockpb.Request_AcquireAll,
		*lockpb.Request_CancelWait, *lockpb.Request_Release, *lockpb.Request_Move:
		return true
	}
	return false
}

// checkAttached refuses what is said for a session on a connection to which it is not attached: what a connection
// delivers that the client gave up, however late, must not meet what the client has done since on another one. That
// holds for keepalives too, although they change no lock: a client whose pushes go elsewhere, or nowhere, learns it.
func (x *call) checkAttached() error {
	if !x.speaks() || x.session == (machine.SessionID{}) || x.leadership.Listener(x.session) == x.conn {
		return nil
	}
	if !x.machine().SessionOpen(x.session) {
		return nil // the log tells
	}
	return notAttached()
}
