package builtin

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
)

// session is an engine.Session. An ended session is never used again, so that late requests of it cannot affect holds
// of another one.
type session struct {
	// id is 128 random bits. A client that knows it can act for the session, so no log and no error contains it.
	id    [16]byte
	place string // of the positions on it
	ttl   time.Duration
	over  chan struct{} // closed when it has ended

	proved atomic.Int64 // the instant before the last request that renewed it was sent

	// The following fields are protected by service.mu.

	open  bool // the server has it
	ended bool
	on    *conn           // to which it is attached; nil: not yet, or not any more
	asked backend.Instant // when another session's keepalive last included this one
}

// key identifies the hold or wait of one request for one name.
type key struct{ name, requestID string }

// entry is a hold or a wait on a session, as the server has answered or pushed: pushes name entries, and after a new
// connection the server's list is compared with them.
type entry struct {
	own    *session
	on     *conn         // on which the server has shown it last
	grant  *lockpb.Grant // nil: it waits
	queued bool          // it waited before it was granted
	of     int           // the number of names of a wait
	taken  bool          // another client has taken the place over
	// before is no later than the grant or, for a wait, than its beginning; closed is the end of the minimum hold at the
	// latest.
	before, closed backend.Instant
	last           backend.Instant // engine.Position.Last
}

// token returns the server's token of a hold, even if it does not fence, and 0 for a wait.
func (e *entry) token() uint64 { return e.grant.GetToken() }

// TTL is engine.Session's.
func (own *session) TTL() time.Duration { return own.ttl }

// renewed notes that a request which was sent at an instant has renewed the session.
func (own *session) renewed(sent backend.Instant) {
	if int64(sent) > own.proved.Load() { // under service.mu
		own.proved.Store(int64(sent))
	}
}

// Proved is engine.Proofs's.
func (s *service) Proved(es engine.Session) backend.Instant {
	return backend.Instant(es.(*session).proved.Load())
}

// Open is engine.Sessions's.
func (s *service) Open(ctx context.Context, ttl time.Duration) (engine.Session, error) {
	own := &session{place: rand.Text(), ttl: ttl, over: make(chan struct{})}
	rand.Read(own.id[:]) // never fails
	s.mu.Lock()
	s.sessions[string(own.id[:])] = own // its TTL bounds the patience with the server
	s.mu.Unlock()
	open := &lockpb.OpenSession{TtlNanos: int64(ttl)}
	r, err := s.ask(ctx, &call{
		request: &lockpb.Request{Call: &lockpb.Request_OpenSession{OpenSession: open}}, own: own, free: true, once: true,
		note: func(x *call, r *lockpb.Reply) {
			if r.GetSession() != nil {
				own.on, own.open = x.on, true
			}
		},
	})
	switch {
	case err == nil && r.Renewed:
		return own, nil
	case err == nil:
		return own, errNoAnswer
	case errors.As(err, new(*engine.Unanswered)), errors.Is(err, backend.ErrUnknown):
		return own, err
	}
	s.mu.Lock()
	s.end(own)
	s.mu.Unlock()
	return nil, err
}

// keepAlive is the request that renews a session. It is shared and read-only.
var keepAlive = &lockpb.Request{Call: &lockpb.Request_KeepAlive{KeepAlive: &lockpb.KeepAlive{}}}

// Prove is engine.Sessions's. The answer comes after all pushes that the server sent before it.
func (s *service) Prove(ctx context.Context, es engine.Session) error {
	r, err := s.ask(ctx, &call{request: keepAlive, own: es.(*session), looks: true})
	if err == nil && !r.Renewed {
		err = errNoAnswer
	}
	return err
}

// End is engine.Sessions's.
func (s *service) End(ctx context.Context, es engine.Session) error {
	own := es.(*session)
	s.mu.Lock()
	s.end(own)
	s.mu.Unlock()
	_, err := s.ask(ctx, &call{
		request: &lockpb.Request{Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}}},
		own:     own, free: true,
	})
	if errors.Is(err, engine.ErrNoSession) {
		return nil
	}
	return err
}

// Follow is engine.Follower's.
func (s *service) Follow(ctx context.Context, es engine.Session, _ func(engine.Push)) error {
	select {
	case <-es.(*session).over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// end notes that a session has ended, with all that stood on it. The caller holds s.mu.
func (s *service) end(own *session) {
	if own.ended {
		return
	}
	own.ended = true
	delete(s.sessions, string(own.id[:]))
	for k, e := range s.entries {
		if e.own == own {
			delete(s.entries, k)
		}
	}
	close(own.over)
	s.signal()
}

// sessionPage bounds the entries of a session in one page: for each page the server visits the whole session. 100,000
// holds are 20 pages, some 9 MB together, and cost the leader a second of its processor. One message of that size would
// delay every other answer on the connection.
const sessionPage = 5000

// attach directs the session's pushes to a new connection, and compares the server's list with the entries: the
// previous connection may have lost pushes and answers. The steps of the session wait until this is done. It ends with
// the connection. The list comes page by page, while pushes continue, so a page may show a hold after the push of its
// loss: a page confirms entries, and does not make any.
func (s *service) attach(c *conn, own *session) {
	for after := ""; ; {
		x := &call{
			request: &lockpb.Request{Call: &lockpb.Request_Attach{
				Attach: &lockpb.Attach{After: after, Limit: sessionPage},
			}},
			own: own, free: true, answer: make(chan *lockpb.Reply, 1), note: s.attached,
		}
		s.mu.Lock()
		if own.ended || s.conn != c {
			s.mu.Unlock()
			return
		}
		c.push(x)
		s.mu.Unlock()
		r, err := s.await(c.ctx, x)
		if err != nil {
			return
		}
		state := r.GetSession()
		if after = state.GetNextAfter(); state != nil && after == "" {
			return
		}
		if state == nil && kit.Sleep(c.ctx, spread(busyPause)) != nil { // not yet: again, from the first page
			return
		}
	}
}

// attached handles one page of a session. After the last one, holds that no page has shown are lost, and waiters have
// lost their places or were granted: they repeat their requests. The caller holds s.mu.
func (s *service) attached(x *call, r *lockpb.Reply) {
	state, own := r.GetSession(), x.own
	if r.GetError().GetCode() == lockpb.Code_CODE_DENIED { // the certificate of this client has another name by now
		s.end(own)
	}
	if state == nil || own.ended {
		return
	}
	for _, e := range state.Holds {
		if known := s.entries[key{e.Name, e.RequestId}]; known != nil && known.own == own && known.token() == e.Token {
			known.on = x.on
		}
	}
	for _, e := range state.Waits {
		if known := s.entries[key{e.Name, e.RequestId}]; known != nil && known.own == own && known.grant == nil {
			known.on = x.on
		}
	}
	if state.NextAfter != "" {
		return
	}
	for k, e := range s.entries {
		if e.own == own && e.on != x.on && s.moving[k] == 0 {
			s.lose(k, e, backend.Loss{Reason: backend.ReasonEvicted})
		}
	}
	own.on = x.on
	s.signal()
}

// lose drops an entry and notifies its holder or waiter. The caller holds s.mu, and unlocks it with unlock.
func (s *service) lose(k key, e *entry, loss backend.Loss) {
	delete(s.entries, k)
	if e.grant == nil {
		s.push(engine.Push{What: engine.PushTurn, RequestID: k.requestID})
		return
	}
	s.push(engine.Push{
		What: engine.PushLost, RequestID: k.requestID, Loss: loss, Incarnation: strconv.FormatUint(e.token(), 10),
	})
}

// hold notes a granted lock. from is no later than the instant from which the server counts the maximum hold time. The
// clocks of client and server may differ in rate by 1 %. The caller holds s.mu.
func (s *service) hold(own *session, on *conn, g *lockpb.Grant, from backend.Instant) *entry {
	k := key{g.Name, g.RequestId}
	e := &entry{
		own: own, on: on, grant: g, before: from, closed: s.clock.Now().Add(time.Duration(g.ClosedNanos)),
	}
	if bound := time.Duration(g.LastNanos); bound > 0 {
		e.last = from.Add(bound - bound/100)
	}
	if old := s.entries[k]; old != nil {
		if e.queued = old.queued || old.grant == nil; old.token() == g.Token && !old.last.IsZero() {
			e.last = old.last // a new leader restarts the count
		}
	}
	s.entries[k] = e
	return e
}

// position returns the position of a request that holds. The caller holds s.mu.
func (s *service) position(e *entry, r *engine.Entering) engine.Position {
	g := e.grant
	p := engine.Position{
		Held: true, Placed: true, Place: e.own.place, Incarnation: strconv.FormatUint(g.Token, 10), Queued: e.queued,
		Last: e.last,
	}
	copy(p.Nonce[:], g.Nonce)
	if s.fences() {
		p.Token, p.Generation = fencing.Token(g.Token), s.past.generation
	}
	if r.MinHold > 0 {
		p.MinHoldUntil = min(e.before.Add(r.MinHold), e.closed)
	}
	return p
}

// granted handles the push of grants, all of one place in the queue. The caller holds s.mu.
func (s *service) granted(c *conn, m *lockpb.Granted) {
	own := s.sessions[string(m.Session)]
	for _, g := range m.Grants {
		e := s.entries[key{g.Name, g.RequestId}]
		if own == nil || e == nil || e.own != own || e.grant != nil || e.of != len(m.Grants) {
			return // nobody waits for them, so that a Leave is on its way
		}
	}
	for _, g := range m.Grants {
		from := max(s.entries[key{g.Name, g.RequestId}].before, backend.Instant(own.proved.Load()))
		s.hold(own, c, g, from)
		s.push(engine.Push{What: engine.PushTurn, RequestID: g.RequestId})
	}
}

// lost handles the push of the end of a session, a wait, or a hold. A message about what is unknown, or about an earlier
// grant, has no effect. The caller holds s.mu, and unlocks it with unlock.
func (s *service) lost(l *lockpb.Lost) {
	own := s.sessions[string(l.Session)]
	if own != nil && l.Name == "" {
		s.end(own)
		return
	}
	k := key{l.Name, l.RequestId}
	e := s.entries[k]
	moved := l.Reason == lockpb.Reason_REASON_MOVED
	switch {
	case own == nil || e == nil || e.own != own || e.token() != l.Token || moved && s.moving[k] > 0:
		return
	case moved && e.grant == nil: // the two would take the place from each other
		e.taken = true
		s.push(engine.Push{What: engine.PushTurn, RequestID: k.requestID})
		return
	}
	loss := backend.Loss{Reason: cmp.Or(reasonOf(l.Reason), backend.ReasonEvicted)}
	if loss.Reason == backend.ReasonForceReleased {
		loss.Text, loss.By, loss.Principal = l.Message, l.By, l.Principal
	}
	s.lose(k, e, loss)
}
