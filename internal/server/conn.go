package server

// Connections: reading requests, writing replies, and ending both.
//
//	read ─► handle ─► call.start ─► lead ─┬─► reply ─► outbox ─► write
//	                                Hear ─┘
//
// A client must not exhaust the server: board bounds its commands in flight, looks and awaitTurn its reads, and the
// outbox its replies. Too many requests stop the reader, and with it the client. Too many replies end the connection:
// the log cannot wait for a client that does not read.
//
// A session speaks on one connection at a time, the connection to which it was attached last: see checkAttached, and
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
	"github.com/fencelock/fencelock/internal/principal"
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
	// farewell is the maximum time for which a connection that the server ends can take the reason.
	farewell = time.Second
	// inFlight bounds the commands and keepalives in flight on one connection. Reading stops at the bound until some are
	// answered. A large command counts as one for each placeBytes, so that they are bounded in bytes too.
	inFlight   = 4096
	placeBytes = 1 << 10
	// looksAtOnce bounds the reads in flight on one connection. They are answered one after the other, each once the
	// earlier answers are on their way to the client.
	looksAtOnce = 64
	// unreadTime is the maximum time for which a client may leave unread a message for which the connection has no room.
	unreadTime = 15 * time.Second
)

// conn is one client's connection.
type conn struct {
	server *Server
	stream Stream
	client string // the client for its share; empty: no share, and no bound
	// principal is the connection's principal: it owns the sessions that are opened here.
	principal principal.Principal
	reported  principal.Principal // the same for people, with the address if it is Nobody
	door      bool                // the connection of this member's HTTP server, which asks only for its clients
	address   string              // the client's address; empty within the process
	ids       clientIDs           // of the session that was named last; for the reader alone
	ctx       context.Context
	out       *outbox
	looks     chan struct{}
	turn      chan struct{} // holds one while a look is answered
	aboard    chan struct{} // holds one for each place in use; only the reader adds

	mu    sync.Mutex
	over  bool           // no task begins any more
	tasks sync.WaitGroup // the tasks that must end before the connection is dropped; added to only while over is false

	cut     chan struct{} // closed to end the connection
	cutOnce sync.Once

	watches watches
}

// serveStream talks with one client until either side ends it. When it returns, no task answers on the connection any
// more, and no session is attached to it.
//
// A connection that the server ends has the time farewell to take the reason: a client that does not read must not
// keep it open.
func (s *Server) serveStream(stream Stream) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	c := &conn{
		server: s, stream: stream, client: clientOf(ctx), principal: principalOf(ctx), ctx: ctx, out: newOutbox(&s.unread),
		reported: reportedOf(ctx), address: addressFrom(ctx), door: ctx.Value(doorName{}) != nil,
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
	c.await(reading, writing)
	cancel()
	c.finish()
	c.out.abandon()
	if r := s.leadership.Load(); r != nil {
		r.Detach(c)
	}
	return nil
}

// await waits until the client or the server ends the connection. The server ends it if its token is no longer valid.
func (c *conn) await(reading, writing <-chan struct{}) {
	var look <-chan time.Time // nil without a token
	token, ok := bearerOf(c.ctx)
	if ok {
		tick := time.NewTicker(tokenEvery)
		defer tick.Stop()
		look = tick.C
	}
	for {
		select {
		case <-reading:
			return
		case <-writing:
			return
		case <-c.cut:
			select {
			case <-writing:
			case <-time.After(farewell):
			}
			return
		case <-look:
			if err := c.server.tokenEnded(token); err != nil {
				c.end(&lockpb.Goodbye{Code: lockpb.Code_CODE_DENIED, Message: err.Error()}, false)
			}
		}
	}
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

// board acquires that many places in flight, and waits while too few are free. It reports false if the connection has
// ended.
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

// alight releases places. It does not block.
func (c *conn) alight(places int) {
	for range places {
		<-c.aboard
	}
}

// read starts requests in the order in which they came. All requests of one message have the same instant of receipt.
//
// Only EOF at the end of the stream means that the client has left: see takeLeave.
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
		case <-c.cut: // no client would get further answers
			<-c.ctx.Done()
			return
		default:
		}
	}
}

// takeLeave ends the sessions that are attached to the connection, whose client has closed its stream. Only a client
// does that: a broken connection, a dead process and a stopped proxy end a stream in another way, and the client may
// reconnect. It returns once the sessions have ended, or cannot be ended now.
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
					return notAttached() // the client has reconnected
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

// write sends the outbox, in large messages. The timer ends the connection if the client leaves a message unread:
// Send then blocks, and nothing else reports that while the outbox has room.
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

// Hear implements lead.Listener: it sends the client a notice of one of its sessions.
func (c *conn) Hear(r *lead.Leadership, secret machine.SessionID, n *machine.Notice) {
	ids := idsOf(r, secret)
	if n.Type == machine.NoticeGranted {
		c.push(grantedPush(n, ids, r.Time))
		return
	}
	c.push(lostPush(n, ids))
}

// push sends an unsolicited message, or an answer that is complete.
func (c *conn) push(r *lockpb.Reply) {
	if !c.out.add(r) {
		c.end(tooSlow(), true)
	}
}

func tooSlow() *lockpb.Goodbye {
	return &lockpb.Goodbye{Code: lockpb.Code_CODE_EXHAUSTED, Message: "the client reads too slowly"}
}

// awaitTurn waits until the next look may be answered: one at a time, and only while the client reads. The answer to
// a look may have pageBytes, so looksAtOnce answers would fill the outbox. It reports false if the connection has
// ended.
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

// end ends the connection with a goodbye. It does not wait for the end.
func (c *conn) end(why *lockpb.Goodbye, drop bool) {
	c.out.close(&lockpb.Reply{Answer: &lockpb.Reply_Goodbye{Goodbye: why}}, drop)
	c.cutOnce.Do(func() { close(c.cut) })
}

// reply answers q.
func (c *conn) reply(q *lockpb.Request, r *lockpb.Reply) {
	if e := r.GetError(); e.GetCode() == lockpb.Code_CODE_DENIED {
		c.auditDenial(q, e)
	}
	r.Number = q.Number
	c.push(r)
}

// fail answers q with an error.
func (c *conn) fail(q *lockpb.Request, err error) { c.reply(q, errorReply(c.server.wireError(err))) }

// wireError converts err to the wire's type.
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

// handle starts one request. It does not wait for its outcome, but waits for a place if the connection has too many
// requests in flight. Every member answers Hello; only the leader answers other requests: a request that a follower
// forwarded would have two instants of receipt.
func (c *conn) handle(q *lockpb.Request, receipt time.Time) {
	if _, ok := q.Call.(*lockpb.Request_Hello); ok {
		c.reply(q, &lockpb.Reply{Answer: &lockpb.Reply_Welcome{Welcome: c.server.welcome()}})
		return
	}
	r := c.server.leadership.Load()
	if r == nil {
		if e := c.server.closedError(); e != nil {
			c.reply(q, errorReply(e))
			return
		}
		c.fail(q, replica.ErrNotLeader)
		return
	}
	by, err := c.asker(q)
	if err == nil {
		err = (&call{conn: c, leadership: r, request: q, receipt: receipt, by: by}).start()
	}
	if err != nil {
		c.fail(q, err)
	}
}

// call is one request on its way.
type call struct {
	*conn
	leadership *lead.Leadership
	request    *lockpb.Request
	receipt    time.Time
	session    machine.SessionID // as the state machine knows it; zero if the request has no session
	ids        clientIDs         // of the session
	by         asker
}

// start begins the call. An error is its answer; without one the answer comes later, by reply or fail.
func (x *call) start() error {
	if len(x.request.Session) > 0 || needsSession(x.request) {
		secret, err := sessionOf(x.request.Session)
		if err != nil {
			return err
		}
		x.name(secret)
	}
	if err := cmp.Or(x.mayAsk(), x.checkAttached()); err != nil {
		return err
	}
	switch q := x.request.Call.(type) {
	case *lockpb.Request_OpenSession:
		return x.openSession(time.Duration(q.OpenSession.GetTtlNanos()))
	case *lockpb.Request_Attach:
		return x.attach(q.Attach)
	case *lockpb.Request_KeepAlive:
		if all := q.KeepAlive.GetSessions(); len(all) > 0 {
			return x.keepAlives(all)
		}
		return x.keepAlive()
	case *lockpb.Request_CloseSession:
		return x.closeSession()
	case *lockpb.Request_Acquire:
		return x.acquire([]*lockpb.Acquire{q.Acquire}, q.Acquire.GetUnder(), q.Acquire.GetUnderHidden())
	case *lockpb.Request_AcquireAll:
		return x.acquire(q.AcquireAll.GetRequests(), q.AcquireAll.GetUnder(), q.AcquireAll.GetUnderHidden())
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
	switch c := q.Call.(type) {
	case *lockpb.Request_KeepAlive:
		return len(c.KeepAlive.GetSessions()) == 0
	case *lockpb.Request_OpenSession, *lockpb.Request_Attach, *lockpb.Request_CloseSession,
		*lockpb.Request_Acquire, *lockpb.Request_AcquireAll, *lockpb.Request_CancelWait, *lockpb.Request_Move:
		return true
	}
	return false
}

// name sets the session of the call.
func (x *call) name(secret machine.SessionID) {
	if x.conn.ids.secret != secret || x.conn.ids.hidden != x.leadership.HidesIDs {
		x.conn.ids = idsOf(x.leadership, secret)
	}
	x.ids, x.session = x.conn.ids, x.conn.ids.session
}

func notAttached() error {
	return refused(lockpb.Code_CODE_CONFLICT, "session", "it is not attached to this connection")
}

// speaks reports whether the call is restricted to the connection to which its session is attached.
func (x *call) speaks() bool {
	switch x.request.Call.(type) {
	case *lockpb.Request_KeepAlive, *lockpb.Request_Acquire, *lockpb.Request_AcquireAll,
		*lockpb.Request_CancelWait, *lockpb.Request_Release, *lockpb.Request_Move:
		return true
	}
	return false
}

// checkAttached refuses a request for a session on a connection to which it is not attached: late messages of an
// abandoned connection must not interfere with the client's requests on another one. It refuses keepalives too,
// although they change no lock: the error shows a client that its pushes go elsewhere, or nowhere.
func (x *call) checkAttached() error {
	if !x.speaks() || x.session == (machine.SessionID{}) || x.attachedHere(x.session) {
		return nil
	}
	return notAttached()
}

// attachedHere reports whether the session may speak here. A session that is not open may: the log returns the error.
func (x *call) attachedHere(id machine.SessionID) bool {
	return x.leadership.Listener(id) == x.conn || !x.machine().SessionOpen(id)
}
