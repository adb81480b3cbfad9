package builtin

// Connections: one stream to the leader, with a writing and a reading goroutine. Both end with the
// connection's context; serve returns when both have ended.
//
// The messages of a connection belong to calls (call.go), sessions (session.go) and watches (watch.go), which outlive
// it. install assigns these to a new connection, and uninstall detaches them.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/notify"
)

// conn is one stream to one server, which welcomed the driver as the leader. greet makes it, install puts it into
// Driver.conn, and uninstall removes it. The code that ends it calls cancel with the reason:
//
//	the stream ended            the stream's error, from read or write
//	no answer for too long      errSilent, from watch
//	NOT_LEADER                  errDeposed, from receive
//	a push is missing           errPushLost, from receive or session.prove
//	Goodbye                     the server's reason, from pushed
//	another cluster or past     a *backend.HistoryError, from forgotten
//	Close                       the end of Driver.lineCtx
//
// The first reason stays. Calls that end with the connection have it in their errors.
type conn struct {
	d       *Driver
	stream  Stream
	address string
	welcome *lockpb.Welcome // the server's greeting
	// ctx is the stream's context. It ends with the stream and with Driver.lineCtx.
	ctx    context.Context
	cancel context.CancelCauseFunc
	// wake rings when a call is queued; write ends with ctx.
	wake notify.Signal

	// The following fields are protected by Driver.mu.

	// queue has the calls to send, oldest first. An abandoned call stays in it until take meets it: removing it would
	// cost a search.
	queue []*call
	// received is the instant of the last message. It shows that the server is alive, and does not prove any session.
	received backend.Instant
	// pushed counts the pushes about sessions; allPushed compares it with the server's count.
	pushed uint64
	// watchdog runs while a call is unanswered, and is nil otherwise.
	watchdog *time.Timer
	// kept are the unanswered keepalives for several sessions, by the number of the request.
	kept map[uint64][]kept
	// looked is the instant at which keepOthers last checked the other sessions.
	looked backend.Instant
}

// The bounds of one message: far below the server's own, and high enough for throughput.
const (
	batchSize  = 256       // requests
	batchBytes = 512 << 10 // no request is added from this size on
)

// push queues a call. The queue is bounded by the callers: each has one call in progress, or a few. The caller holds
// d.mu.
//
// It does not search the queue, so a caller that abandons a call and retries has two places for a while.
func (c *conn) push(x *call) {
	c.queue = append(c.queue, x)
	c.wake.Notify()
}

// write sends the queued calls, in as few messages as take allows. It needs no timer: while it sends one message,
// calls for the next one gather. It ends with the connection.
//
// With a pause before each message, to gather more calls, every lone caller would wait for that pause. A goroutine for
// each call would need a lock around the stream, on which only one may send.
func (c *conn) write() {
	for {
		select {
		case <-c.wake:
		case <-c.ctx.Done():
			return
		}
		for {
			batch := c.take()
			if batch == nil {
				break
			}
			if err := c.stream.Send(batch); err != nil {
				c.cancel(err) // the reader gets the reason, if there is one
				return
			}
		}
	}
}

// take makes a message of the first calls in the queue. It reads the clock here, before any of the message is sent:
// the proof of a reply counts from that instant. The instant at which a call was queued would be as safe, but earlier.
//
// take reads the acknowledgement of a session as late as possible, so that the server can forget more answers. It
// returns nil if there is no call to send. If calls remain, take wakes the writer.
func (c *conn) take() *lockpb.ClientMessage {
	d := c.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(c.queue) == 0 {
		return nil
	}
	now := d.clock.Now()
	m := &lockpb.ClientMessage{Requests: make([]*lockpb.Request, 0, min(len(c.queue), batchSize))}
	n, size := 0, 0
	var keep *lockpb.Request
	for ; n < len(c.queue) && n < batchSize && size < batchBytes; n++ {
		x := c.queue[n]
		if d.calls[x.number] != x || x.on != c {
			continue // abandoned
		}
		x.seen = d.past.seen
		if x.sent = now; x.left == 0 {
			x.left = now
		}
		if c.welcome.KeepsAll && x.session != nil && x.request.GetKeepAlive() != nil {
			if keep = c.keep(keep, x, now); len(c.kept[keep.Number]) == 1 {
				m.Requests = append(m.Requests, keep)
			}
			size += x.size
			continue
		}
		r := &lockpb.Request{Number: x.number, Call: x.request.Call, OnBehalfOf: x.request.OnBehalfOf}
		if s := x.session; s != nil {
			r.Session = s.id
			if r.Sequence = x.sequence; r.Sequence != 0 {
				r.Acknowledged = s.acknowledged
			}
		}
		m.Requests = append(m.Requests, r)
		size += x.size
	}
	if keep != nil {
		c.keepOthers(keep, now)
	}
	clear(c.queue[:n])
	if c.queue = c.queue[n:]; len(c.queue) == 0 {
		c.queue = nil
	} else {
		c.wake.Notify()
	}
	if len(m.Requests) == 0 {
		return nil
	}
	if c.watchdog == nil {
		c.watchdog = time.AfterFunc(d.patience(), c.watch)
	}
	return m
}

// errSilent: the server does not answer.
var errSilent = errors.New("the server does not answer")

// watch ends the connection if a call has been unanswered for too long and the server sent no other reply meanwhile. A
// server that answers other calls is alive, and one call may take any time. TCP would notice an unresponsive server
// after minutes, when every lease is over. It runs in a timer, which uninstall stops.
//
// The oldest call that was sent here and has no answer counts. A waiter in a queue does not count: the server has
// answered that it waits. An idle connection has no watchdog, and the next call starts one; because of keepalives a
// session soon notices an unresponsive server.
func (c *conn) watch() {
	d := c.d
	d.mu.Lock()
	defer d.mu.Unlock()
	c.watchdog = nil
	if d.conn != c {
		return // it came late
	}
	var oldest backend.Instant
	for _, x := range d.calls {
		if x.on == c && x.sent != 0 && (oldest == 0 || x.sent < oldest) {
			oldest = x.sent
		}
	}
	if oldest == 0 {
		return
	}
	limit := d.patience()
	silent := d.clock.Now().Sub(max(oldest, c.received))
	if silent >= limit {
		c.cancel(errSilent)
		return
	}
	c.watchdog = time.AfterFunc(max(limit-silent, time.Millisecond), c.watch)
}

// read receives messages from the server, until the stream ends. It handles replies in their order, under d.mu: a loss
// that was pushed before an answer takes effect before the caller that waits for the answer continues.
//
// It is the only goroutine that reads, so replies take effect in the order of the stream. It handles a whole message
// before it notifies holders, and does not read during the notifications: by the contract, the functions of holders
// must not block.
func (c *conn) read() {
	for {
		m, err := c.stream.Recv()
		if err != nil {
			c.cancel(err)
			return
		}
		c.d.mu.Lock()
		c.received = c.d.clock.Now()
		for _, r := range m.Replies {
			c.d.receive(c, r)
		}
		c.d.unlockAndTell()
	}
}

// unlockAndTell unlocks d.mu and then notifies holders of the losses that were found under it. The functions of
// holders belong to the core, take its locks and may call the driver, so d.mu must not be held. The goroutine that
// found losses reports them, in the order in which it found them. So a function that may lose a hold under d.mu
// documents that its caller unlocks with unlockAndTell.
func (d *Driver) unlockAndTell() {
	tell := d.tell
	d.tell = nil
	d.mu.Unlock()
	for _, f := range tell {
		f()
	}
}

// errDeposed: the server no longer leads.
var errDeposed = errors.New("the server no longer leads")

// errPushLost: a push of the server did not arrive, or the server does not push to this connection. Either is a fault.
// The next connection begins with a comparison of the sessions: see attach.
var errPushLost = errors.New("a notification from the server was lost")

// receive handles one reply. It drops a reply to a call that has been abandoned, or that belongs to another connection
// by now and will be answered there. The caller holds d.mu, and unlocks it with unlockAndTell.
//
// The order of the steps matters:
//
//  1. NOT_LEADER no call was executed, and the rest of the reply does not count
//  2. the revision if the past is lost, no answer is valid any more
//  3. the count of pushes if a push is missing, the renewal does not count: the push may have been a loss
//  4. renewed               the session is proved, from the instant before the request was sent
//  5. SESSION_ENDED         the session ends, with all of its calls
//  6. the answer itself
func (d *Driver) receive(c *conn, r *lockpb.Reply) {
	if r.Number == 0 {
		d.pushed(c, r)
		return
	}
	if all, there := c.kept[r.Number]; there {
		delete(c.kept, r.Number)
		d.keptAlive(c, all, r)
		return
	}
	x := d.calls[r.Number]
	if x == nil || x.on != c {
		return // abandoned
	}
	if e := r.GetError(); e != nil && e.Code == lockpb.Code_CODE_NOT_LEADER {
		d.leader = e.LeaderAddress
		x.sent = 0 // it was not executed; it is sent to the next leader
		c.cancel(errDeposed)
		return
	}
	if d.compare(x.seen, r); d.past.lost != nil || !d.allPushed(c, r) {
		return
	}
	if s := x.session; s != nil {
		if r.Renewed {
			s.proved = max(s.proved, x.sent)
		}
		if r.GetError().GetCode() == lockpb.Code_CODE_SESSION_ENDED {
			s.end(backend.ReasonSessionExpired)
		}
	}
	d.finish(x, r, nil) // no effect if x has ended with its session
}

// allPushed reports whether all pushes have arrived that the server sent before r, if r has a count of them. If not,
// it ends the connection: the missing push may be the loss of a hold that the reply seems to prove. The caller holds
// d.mu.
func (d *Driver) allPushed(c *conn, r *lockpb.Reply) bool {
	if r.Pushed == nil || r.GetPushed() == c.pushed {
		return true
	}
	d.log.Warn("fencelock: a notification from the server was lost", "driver", driverName, "server", c.address,
		"sent", r.GetPushed(), "received", c.pushed)
	c.cancel(errPushLost)
	return false
}

// pushed handles unsolicited messages. It counts pushes that concern sessions, as the server does, but not events and
// the goodbye: a watch continues from the revision of its last event, and the goodbye is the last message. Pushes for
// a session that is unknown here have no effect. The caller holds d.mu, and unlocks it with unlockAndTell.
func (d *Driver) pushed(c *conn, r *lockpb.Reply) {
	switch p := r.Answer.(type) {
	case *lockpb.Reply_Granted:
		c.pushed++
		d.sawGrants(p.Granted.Grants)
		if s := d.byID[string(p.Granted.Session)]; s != nil {
			s.granted(p.Granted.Grants)
		}
	case *lockpb.Reply_Lost:
		c.pushed++
		d.lost(p.Lost)
	case *lockpb.Reply_Events:
		if w := d.followed[p.Events.Watch]; w != nil { // it has not ended or restarted under another number
			w.happened(p.Events)
		}
	case *lockpb.Reply_Goodbye:
		d.leader = p.Goodbye.LeaderAddress
		c.cancel(fmt.Errorf("the server closed the connection: %v: %s", p.Goodbye.Code, p.Goodbye.Message))
	}
}

// install makes c the connection. The unanswered requests are sent in the order in which they were started, a
// session's requests once it is attached.
//
// A watch that waits for a slow caller restarts only when the caller has caught up. The new leader's member addresses
// replace the earlier ones, some of which may belong to removed members.
func (d *Driver) install(c *conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conn, d.leader, d.members = c, c.address, c.welcome.MemberAddresses
	for _, x := range d.inOrder() {
		d.route(x)
	}
	for _, s := range d.byID {
		if s.open {
			s.attach()
		}
	}
	for w := range d.watches {
		if !w.paused {
			w.start()
		}
	}
}

// uninstall notes that c has ended. Calls that were sent may have taken effect: they are in doubt, and wait for the
// next connection, where their sequence makes them harmless. Calls that must not be repeated (once) end with the error
// of unanswered.
//
// Sessions stay, attached to no connection. Holders are not notified: their holds remain until the next connection
// shows a loss, or until the core's deadline.
func (d *Driver) uninstall(c *conn) {
	cause := context.Cause(c.ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conn = nil
	if c.watchdog != nil {
		c.watchdog.Stop()
	}
	for _, s := range d.byID {
		s.on = nil
	}
	for _, x := range d.inOrder() {
		if x.on != c {
			continue
		}
		if x.once {
			d.finish(x, nil, x.unanswered(cause))
			continue
		}
		if x.sent != 0 {
			x.doubt, x.patient = true, x.patient || x.waits
		}
		x.on, x.sent = nil, 0
	}
}

// inOrder returns the unanswered calls in the order in which they were started, which is the order in which a new
// connection must send them. The caller holds d.mu.
func (d *Driver) inOrder() []*call {
	return slices.SortedFunc(maps.Values(d.calls), func(a, b *call) int { return cmp.Compare(a.number, b.number) })
}

// serve runs c until it ends. When it returns, no goroutine reads or writes c any more, so that two connections are
// never in use at the same time.
//
// Reading and writing end with c.ctx, whichever of them fails first. Only maintain calls it, for one connection at a
// time.
func (d *Driver) serve(c *conn) {
	d.install(c)
	var both sync.WaitGroup
	both.Go(c.write)
	both.Go(c.read)
	<-c.ctx.Done()
	both.Wait()
	d.uninstall(c)
}
