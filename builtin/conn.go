package builtin

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/notify"
)

// conn is one stream to one server, which welcomed the driver as the leader, with a goroutine that writes and one that
// reads. cancel ends it, and the first reason stays: an error of the stream, errSilent, errDeposed, errPushLost, the
// reason of a Goodbye, a *backend.HistoryError, or the end of service.lineCtx.
type conn struct {
	s       *service
	stream  Stream
	address string
	welcome *lockpb.Welcome
	ctx     context.Context // of the stream
	cancel  context.CancelCauseFunc
	wake    notify.Signal // rings when a call is queued
	gone    chan struct{} // closed when no answer can come any more

	// The following fields are protected by service.mu.

	queue    []*call           // to send, oldest first
	last     uint64            // the number of the last request
	calls    map[uint64]*call  // that were sent and not answered, by number
	kept     map[uint64][]kept // the same of keepalives for several sessions
	watches  map[uint64]*feed  // by the number of the request that began each
	received backend.Instant   // of the last message: the server is alive
	pushed   uint64            // pushes about sessions; allPushed compares it with the server's count
	watchdog *time.Timer       // runs while a call is unanswered, and is nil otherwise
	looked   backend.Instant   // when keepOthers last checked the other sessions
}

// The bounds of one message: far below the server's own, and high enough for throughput.
const (
	batchSize  = 256       // requests
	batchBytes = 512 << 10 // no request is added from this size on
)

// push queues a call. The queue is bounded by the callers. The caller holds s.mu.
func (c *conn) push(x *call) {
	x.on = c
	c.queue = append(c.queue, x)
	c.wake.Notify()
}

// write sends the queued calls. While it sends one message, calls for the next one gather.
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

// take makes a message of the first calls in the queue, or returns nil. It reads the clock before any of the message is
// sent: the proof of an answer counts from that instant.
func (c *conn) take() *lockpb.ClientMessage {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(c.queue) == 0 {
		return nil
	}
	now := s.clock.Now()
	m := &lockpb.ClientMessage{Requests: make([]*lockpb.Request, 0, min(len(c.queue), batchSize))}
	var keep *lockpb.Request
	n, size := 0, 0
	for ; n < len(c.queue) && n < batchSize && size < batchBytes; n++ {
		x := c.queue[n]
		if x.withdrawn {
			continue
		}
		x.sent, x.seen = now, s.past.seen
		size += x.size
		if c.welcome.KeepsAll && x.request == keepAlive {
			if keep == nil {
				c.last++
				keep = &lockpb.Request{Number: c.last, Call: &lockpb.Request_KeepAlive{KeepAlive: &lockpb.KeepAlive{}}}
				m.Requests = append(m.Requests, keep)
			}
			c.keep(keep, kept{x.own, x, now, x.seen})
			continue
		}
		c.last++
		x.number = c.last
		r := &lockpb.Request{Number: c.last, Call: x.request.Call, OnBehalfOf: x.request.OnBehalfOf}
		if x.own != nil {
			r.Session = x.own.id[:]
		}
		c.calls[c.last] = x
		m.Requests = append(m.Requests, r)
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
		c.watchdog = time.AfterFunc(s.patience(), c.watch)
	}
	return m
}

// kept is one session in a keepalive.
type kept struct {
	own  *session
	call *call           // that waits for the answer; nil: keepOthers has included the session
	sent backend.Instant // just before the keepalive was sent
	seen uint64          // as in call
}

func (c *conn) keep(keep *lockpb.Request, k kept) {
	all := keep.GetKeepAlive()
	all.Sessions = append(all.Sessions, k.own.id[:])
	c.kept[keep.Number] = append(c.kept[keep.Number], k)
}

// maxLooked bounds the sessions that are checked for inclusion, and lookEvery is the time between two checks.
const (
	maxLooked = 64
	lookEvery = minTTL / 6
)

// keepOthers adds the sessions for which at least half of the time between their own keepalives has passed. The caller
// holds s.mu.
func (c *conn) keepOthers(keep *lockpb.Request, now backend.Instant) {
	if now.Sub(c.looked) < lookEvery {
		return
	}
	c.looked = now
	looked := 0
	for _, own := range c.s.sessions {
		if looked++; looked > maxLooked {
			return
		}
		if own.on == c && now.Sub(max(backend.Instant(own.proved.Load()), own.asked)) >= own.ttl/6 {
			own.asked = now
			c.keep(keep, kept{own: own, sent: now, seen: c.s.past.seen})
		}
	}
}

// errSilent: the server does not answer.
var errSilent = errors.New("the server does not answer")

// watch ends the connection if a call has been unanswered for too long and the server sent no other message meanwhile.
// TCP would notice an unresponsive server after minutes, when every lease is over. It runs in a timer, which uninstall
// stops. An idle connection has no watchdog; keepalives soon start one.
func (c *conn) watch() {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	c.watchdog = nil
	var oldest backend.Instant
	note := func(sent backend.Instant) {
		if oldest == 0 || sent < oldest {
			oldest = sent
		}
	}
	for _, x := range c.calls {
		note(x.sent)
	}
	for _, all := range c.kept {
		note(all[0].sent)
	}
	if s.conn != c || oldest == 0 {
		return
	}
	limit := s.patience()
	silent := s.clock.Now().Sub(max(oldest, c.received))
	if silent >= limit {
		c.cancel(errSilent)
		return
	}
	c.watchdog = time.AfterFunc(max(limit-silent, time.Millisecond), c.watch)
}

// read receives messages from the server, until the stream ends. It handles replies in their order: a loss that was
// pushed before an answer takes effect before the caller that waits for the answer continues.
func (c *conn) read() {
	for {
		m, err := c.stream.Recv()
		if err != nil {
			c.cancel(err)
			return
		}
		c.s.mu.Lock()
		c.received = c.s.clock.Now()
		for _, r := range m.Replies {
			c.receive(r)
		}
		c.s.unlock()
	}
}

var (
	// errDeposed: the server no longer leads.
	errDeposed = errors.New("the server no longer leads")
	// errPushLost: a push of the server did not arrive, or the server does not push to this connection. Either is a fault.
	errPushLost = errors.New("a notification from the server was lost")
)

// cut ends a connection, on which no further call is queued. The caller holds s.mu.
func (s *service) cut(c *conn, why error) {
	if c.cancel(why); s.conn == c {
		s.conn = nil
	}
}

// receive handles one reply. The caller holds s.mu.
func (c *conn) receive(r *lockpb.Reply) {
	if r.Number == 0 {
		c.notified(r)
		return
	}
	if e := r.GetError(); e != nil && e.Code == lockpb.Code_CODE_NOT_LEADER {
		c.s.leader = e.LeaderAddress
		c.s.cut(c, errDeposed)
	}
	if all, there := c.kept[r.Number]; there {
		delete(c.kept, r.Number)
		c.keptAlive(all, r)
		return
	}
	if x := c.calls[r.Number]; x != nil {
		delete(c.calls, r.Number)
		if c.accept(x.own, x.sent, x.seen, r) {
			if x.note != nil && (x.own == nil || !x.own.ended) {
				x.note(x, r)
			}
			x.answer <- r
		}
	}
}

// keptAlive handles the answer to a keepalive for several sessions.
func (c *conn) keptAlive(all []kept, r *lockpb.Reply) {
	lives := r.GetAlive().GetLives()
	for i, k := range all {
		answer := &lockpb.Reply{Pushed: r.Pushed, Answer: r.Answer} // an error for all
		if i < len(lives) {
			if answer.Renewed = lives[i].Renewed; lives[i].Error != nil {
				answer.Answer = &lockpb.Reply_Error{Error: lives[i].Error}
			}
		}
		switch accepted := c.accept(k.own, k.sent, k.seen, answer); {
		case !accepted:
			return
		case k.call != nil:
			k.call.answer <- answer
		case answer.GetError().GetCode() == lockpb.Code_CODE_CONFLICT:
			c.s.cut(c, errPushLost) // the server does not know where to push
		}
	}
}

// accept handles what a reply says about the service and the session. It is false if the answer does not count: the
// past is lost, or a push is missing, which may have been the loss of what the reply seems to prove.
func (c *conn) accept(own *session, sent backend.Instant, seen uint64, r *lockpb.Reply) bool {
	s := c.s
	if s.compare(seen, r); s.past.lost != nil {
		return false
	}
	if r.Pushed != nil && r.GetPushed() != c.pushed {
		s.log.Warn("fencelock: a notification from the server was lost", "driver", driverName, "server", c.address,
			"sent", r.GetPushed(), "received", c.pushed)
		s.cut(c, errPushLost)
		return false
	}
	if own == nil || own.ended {
		return true
	}
	if r.Renewed {
		own.renewed(sent)
	}
	if r.GetError().GetCode() == lockpb.Code_CODE_SESSION_ENDED {
		s.end(own)
	}
	return true
}

// notified handles unsolicited messages. It counts pushes that concern sessions, as the server does.
func (c *conn) notified(r *lockpb.Reply) {
	s := c.s
	switch p := r.Answer.(type) {
	case *lockpb.Reply_Granted:
		c.pushed++
		s.sawGrants(p.Granted.Grants)
		s.granted(c, p.Granted)
	case *lockpb.Reply_Lost:
		c.pushed++
		s.lost(p.Lost)
	case *lockpb.Reply_Events:
		if f := c.watches[p.Events.Watch]; f != nil {
			f.happened(p.Events)
		}
	case *lockpb.Reply_Goodbye:
		s.leader = p.Goodbye.LeaderAddress
		s.cut(c, fmt.Errorf("the server closed the connection: %v: %s", p.Goodbye.Code, p.Goodbye.Message))
	}
}

// serve runs c until it ends. When it returns, no goroutine reads or writes c any more. The new leader's member
// addresses replace the earlier ones, some of which may belong to removed members.
func (s *service) serve(c *conn) {
	s.mu.Lock()
	s.conn, s.leader, s.members, s.outage = c, c.address, c.welcome.MemberAddresses, nil
	for _, own := range s.sessions {
		if own.open {
			s.lines.Go(func() { s.attach(c, own) })
		}
	}
	s.signal()
	s.mu.Unlock()
	var both sync.WaitGroup
	both.Go(c.write)
	both.Go(c.read)
	<-c.ctx.Done()
	both.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cut(c, nil); c.watchdog != nil {
		c.watchdog.Stop()
	}
	for _, own := range s.sessions {
		own.on = nil
	}
	close(c.gone)
}
