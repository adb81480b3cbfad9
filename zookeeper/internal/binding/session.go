package binding

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/notify"
)

// session is an engine.Session: a ZooKeeper session on its own connection. It reconnects until it has ended, and then
// sends nothing more: requests that were queued on it are not carried out.
//
// It has a node, its fence, and a request that creates an entry is carried out only while that is there. A step that has
// to forbid late creations replaces the fence.
type session struct {
	e     *service
	asked time.Duration
	spare bool          // it has no entries, and takes a shorter timeout than it asks for
	over  chan struct{} // closed when it has ended
	life  context.Context
	stop  context.CancelFunc

	mu       sync.Mutex // protects the following fields
	id       int64
	ttl      time.Duration // as granted
	password []byte
	link     *link         // nil without a connection
	links    int           // counts connections
	up       chan struct{} // closed when there is one, or the session has ended
	shut     chan struct{} // closed when run has ended
	failed   error         // why it could not be opened
	trouble  error         // why the last connection did not come to stand
	misses   int           // dials in a row without a connection
	why      backend.Reason
	base     backend.Instant   // the leader has heard of this one
	touches  []backend.Instant // when answered messages were sent since, in order
	fences   int               // the number of the present fence
	watchers map[string][]*watcher
	placed   map[string]*hold // the entries of holds, by path
	fresh    []*hold          // without a watch
	gone     []*hold
	news     notify.Signal // there are fresh or gone ones
	idle     *time.Timer   // ends a spare session
}

// watcher is somebody who waits for a change of a node. It is called once, on the goroutine that reads.
type watcher struct{ call func(typ int32) }

// hold is an entry that was answered as a hold.
type hold struct {
	path      string
	requestID string
	token     int64
	version   int32
	since     backend.Instant
	link      int // the connection over which it was seen with a watch; 0: none
	gone      bool
}

// errNoZooKeeper: the first answer cannot be a ZooKeeper's.
var errNoZooKeeper = errors.New("the server is not ZooKeeper, or requires TLS")

// TTL is engine.Session's.
func (s *session) TTL() time.Duration { return s.ttl }

func sessionOf(s engine.Session) *session {
	own, _ := s.(*session)
	return own
}

// pingEvery is the pause between two pings: see Prove.
func (s *session) pingEvery() time.Duration { return max(s.e.o.Tick*3/5, 10*time.Millisecond) }

// silence is the maximum time that answers may be due before another connection is made.
func (s *session) silence() time.Duration { return min(s.asked/2, 5*time.Second) }

// newSession starts a session. A spare one ends when it was unused for its timeout.
func (e *service) newSession(ttl time.Duration, spare bool) *session {
	s := &session{
		e: e, asked: ttl, spare: spare, over: make(chan struct{}), up: make(chan struct{}), shut: make(chan struct{}),
		watchers: map[string][]*watcher{}, placed: map[string]*hold{}, news: notify.New(),
	}
	s.life, s.stop = context.WithCancel(context.Background())
	go s.run()
	return s
}

// run keeps the session connected until it ends.
func (s *session) run() {
	defer close(s.shut)
	for n := 0; ; n++ {
		l, err := s.connect(s.e.o.addrs[n%len(s.e.o.addrs)])
		if err == nil {
			go l.write()
			l.shut(l.read())
			s.down()
		} else {
			s.missed(err)
		}
		s.mu.Lock()
		misses := s.misses
		s.mu.Unlock()
		if s.life.Err() != nil || misses >= len(s.e.o.addrs) && kit.Sleep(s.life, kit.RetryPause(s.asked)/2) != nil {
			return
		}
	}
}

// missed notes a connection that did not come to stand. A new session fails when all servers refuse in a row: one that
// starts, or elects a leader, accepts the connection and is worth a wait.
func (s *session) missed(err error) {
	s.mu.Lock()
	s.misses++
	s.trouble = err
	hopeless := s.id == 0 && s.misses >= len(s.e.o.addrs) && !isOneOf(err, errHello)
	s.mu.Unlock()
	if hopeless {
		s.fail(fmt.Errorf("%w: %w", errNoConnection, err))
	}
}

// errHello: a server has accepted the connection, and does not serve the session.
var errHello = errors.New("no answer to the connect request")

// connect makes the next connection. The session is shown only to a server that it may go on at: see examine.
func (s *session) connect(address string) (*link, error) {
	patience := max(s.asked/3, 100*time.Millisecond)
	ctx, cancel := context.WithTimeout(s.life, 2*patience)
	defer cancel()
	e := s.e
	if err := e.examine(ctx, address, s.ttl); err != nil {
		if s.id == 0 && kit.Classified(err) {
			s.fail(err)
		}
		return nil, err
	}
	l, seen := &link{s: s, address: address, opened: e.clock.Now(), work: make(chan struct{}, 1)}, e.history.seen()
	conn, err := e.dial(ctx, address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(s.life, func() { _ = conn.SetReadDeadline(time.Now().Add(endTimeout)) })
	l.conn, l.in = conn, bufio.NewReaderSize(conn, 16<<10)
	_ = conn.SetDeadline(time.Now().Add(patience))
	h, err := hello(conn, l.in, seen, s.asked, s.id, s.password)
	if err != nil {
		stop()
		_ = conn.Close()
		if seen > 0 && isOneOf(err, io.EOF, syscall.ECONNRESET) {
			e.recall(s.life, address)
		}
		return nil, fmt.Errorf("%s: %w: %w", address, errHello, err)
	}
	_ = conn.SetDeadline(time.Time{})
	if err := s.greeted(l, h); err != nil {
		stop()
		_ = conn.Close()
		return nil, err
	}
	return l, nil
}

// greeted takes in the server's answer to the connect request, and lets callers use the connection.
func (s *session) greeted(l *link, h greeting) error {
	s.mu.Lock()
	first := s.id == 0
	switch {
	case h.id == 0 || !first && (h.id != s.id || h.timeout < s.ttl):
		// The server does not know the session any more, or lets it end too early.
		s.mu.Unlock()
		if !first {
			s.end(backend.ReasonSessionExpired)
		}
		return errBroken
	case first && h.timeout < s.asked && !s.spare:
		s.mu.Unlock()
		s.fail(tooLong(s.asked, h.timeout))
		return errBroken
	}
	if first {
		s.id, s.ttl = h.id, h.timeout
	}
	s.password = h.password
	s.base, s.touches = l.opened, nil // pings that the previous server heard may have died with it
	s.mu.Unlock()
	if o := s.e.o; o.User != "" {
		l.mu.Lock()
		l.put(numberAuth, request{opAuth, appendText(appendText(appendInt(nil, 0), "digest"), o.User+":"+o.Password)})
		l.mu.Unlock()
	}
	reqs := []request{getData(s.e.root, true)}
	if first && !s.spare {
		reqs = append(reqs, s.makeFence(0))
	}
	l.start(&call{then: func(c *call) { s.arrived(l, c) }}, reqs...)
	return nil
}

// arrived takes in the answers to the first requests of a connection, and lets callers use it.
func (s *session) arrived(l *link, c *call) {
	if c.err != nil {
		return
	}
	if err := s.e.compareRoot(c.replies[0]); err != nil {
		s.fail(err)
		return
	}
	if len(c.replies) > 1 && c.replies[1].err != nil {
		s.fail(c.replies[1].err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.why != "" {
		return
	}
	s.link, s.misses, s.trouble = l, 0, nil
	s.links++
	close(s.up)
	s.news.Notify() // the watches have gone
}

// down notes that there is no connection, and wakes all who watch a node.
func (s *session) down() {
	s.mu.Lock()
	if s.link != nil {
		s.link = nil
		if s.up = make(chan struct{}); s.why != "" {
			close(s.up)
		}
	} else {
		s.misses++
	}
	all := s.watchers
	s.watchers = map[string][]*watcher{}
	s.mu.Unlock()
	for _, some := range all {
		for _, w := range some {
			w.call(0)
		}
	}
}

// current returns the connection, or nil and what is closed when there is one.
func (s *session) current() (*link, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle != nil {
		s.idle.Reset(s.asked)
	}
	return s.link, s.up
}

// fail is the end of a session that could not be opened.
func (s *session) fail(err error) {
	s.mu.Lock()
	if s.failed == nil {
		s.failed = err
	}
	s.mu.Unlock()
	s.end(backend.ReasonSessionExpired)
}

// end declares the session gone, and lets its connection close. Only the first call has an effect.
func (s *session) end(reason backend.Reason) {
	s.mu.Lock()
	first := s.why == ""
	var l *link
	if first {
		s.why, l = reason, s.link
		close(s.over)
		if l == nil {
			close(s.up)
		}
	}
	if s.idle != nil {
		s.idle.Stop()
	}
	s.mu.Unlock()
	if !first {
		return
	}
	s.e.drop(s)
	if l != nil {
		l.start(&call{then: func(*call) { _ = l.conn.Close() }}, request{op: opClose})
	}
	s.stop()
}

// endTimeout is the maximum time that the end of a session waits for the server's answer.
const endTimeout = time.Second

// ended is the error of a request on a session that has ended.
func (s *session) ended() error {
	if err := s.e.history.err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed != nil {
		return s.failed
	}
	return engine.ErrNoSession
}

func (s *session) reasonOf(err error) error {
	if isOneOf(err, errBroken) {
		if lost := s.e.history.err(); lost != nil {
			return lost
		}
	}
	return err
}

// unconnected is the error of a request that waited for a connection.
func (s *session) unconnected(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := errNoConnection
	if s.trouble != nil {
		err = fmt.Errorf("%w: %w", err, s.trouble)
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", err, ctx.Err())
	}
	return err
}

// Open is engine.Sessions's.
func (e *service) Open(ctx context.Context, ttl time.Duration) (engine.Session, error) {
	if err := e.history.err(); err != nil {
		return nil, err
	}
	s := e.newSession(ttl, false)
	if err := s.opened(ctx); err != nil {
		s.end(backend.ReasonSessionExpired)
		return nil, err
	}
	if !e.keep(s) {
		s.end(backend.ReasonClosed)
		return nil, backend.ErrClosed
	}
	return s, nil
}

// opened waits until the session stands.
func (s *session) opened(ctx context.Context) error {
	_, up := s.current()
	if _, how := engine.Await(ctx, up, nil); how != engine.Answered {
		return s.unconnected(ctx)
	}
	if s.isOver() {
		return s.ended()
	}
	return nil
}

// End is engine.Sessions's.
func (e *service) End(ctx context.Context, own engine.Session) error {
	s := sessionOf(own)
	s.end(backend.ReasonClosed)
	select {
	case <-s.shut:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// touch notes when an answered message was sent.
func (s *session) touch(l *link, sent backend.Instant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link == l && (len(s.touches) == 0 || sent.Sub(s.touches[len(s.touches)-1]) > s.e.o.Tick/10) {
		s.touches = append(s.touches[max(0, len(s.touches)-maxTouches):], sent)
	}
}

// maxTouches bounds the messages that are remembered, of a few ticks.
const maxTouches = 30

// Prove is engine.Sessions's. The leader alone ends sessions. It starts a session's time anew when it makes the session,
// when a client reconnects, and when a server tells it in one of its answers to the leader's pings, twice a tick, that
// it heard from the client. An answer alone proves little: a server that was cut off from the leader goes on answering
// reads until it notices, and a leader that froze while another one was elected goes on answering sync, and letting
// clients reconnect.
//
// So Prove asks with a transaction that changes nothing. A majority must log it, and the leader refuses it for sessions
// that have ended. When a transaction sent at t is answered, its leader has led until t at least, and everything that
// the client's server had to tell up to half a tick before t has reached it, on the same stream: a message that was sent
// at u ≤ t - tick/2, over the same connection, has started the session's time anew. A later leader starts the time of all
// sessions anew. The driver's margin is a tick, so u may be a tick before the call. The connection pings every 0.6
// ticks, so there is such a u, or there will be within a tenth of a tick.
func (e *service) Prove(ctx context.Context, own engine.Session) error {
	s, began := sessionOf(own), e.clock.Now()
	for {
		l, up := s.current()
		if l != nil && s.touched(began) {
			known := e.history.seen()
			c, err := s.call(ctx, confirmed())
			switch {
			case err != nil:
				return err
			case c.link != l:
				continue
			}
			_, _, err = c.replies[0].results()
			if err != nil && !isOneOf(err, codeNoAuth) { // a majority has agreed to a refusal as well
				return err
			}
			return e.checkZxid(ctx, known, c.replies[0].zxid)
		}
		var soon <-chan time.Time
		if l != nil {
			soon, up = time.After(s.e.o.Tick/10), s.over
		}
		select {
		case <-soon:
		case <-up:
		case <-s.over:
		case <-ctx.Done():
			return s.unconnected(ctx)
		}
		if s.isOver() {
			return s.ended()
		}
	}
}

// touched reports whether a transaction that is sent now proves the session since an instant.
func (s *session) touched(since backend.Instant) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	since, until := since.Add(-s.e.o.Tick), s.e.clock.Now().Add(-s.e.o.Tick/2)
	return s.base >= since || slices.ContainsFunc(s.touches, func(u backend.Instant) bool { return since <= u && u <= until })
}

func (s *session) isOver() bool {
	select {
	case <-s.over:
		return true
	default:
		return false
	}
}

// keep enters a session that stands. It is false if the driver has closed.
func (e *service) keep(s *session) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.sessions[s.id] = s
	return true
}

func (e *service) drop(s *session) {
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.sessions, func(_ int64, other *session) bool { return other == s })
	if e.spare == s {
		e.spare = nil
	}
}

// session returns the living session with an id, or nil.
func (e *service) session(id int64) *session {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sessions[id]
}

// spareTTL is the timeout for which a session without entries asks, and the time without use after which it ends.
const spareTTL = 10 * time.Second

// any returns a session for a step that needs no particular one: one with a connection, or a spare one.
func (e *service) any(ctx context.Context) (*session, error) {
	if err := e.history.err(); err != nil {
		return nil, err
	}
	e.mu.Lock()
	s := e.standing()
	if s == nil && !e.closed {
		if s = e.spare; s == nil {
			s = e.newSession(spareTTL, true)
			s.mu.Lock()
			s.idle = time.AfterFunc(spareTTL, func() { s.end(backend.ReasonClosed) })
			s.mu.Unlock()
			e.spare = s
		}
	}
	e.mu.Unlock()
	if s == nil {
		return nil, backend.ErrClosed
	}
	return s, s.opened(ctx)
}

// standing returns a session with a connection, or nil. The caller holds e.mu.
func (e *service) standing() *session {
	for _, s := range e.sessions {
		if l, _ := s.current(); l != nil {
			return s
		}
	}
	return nil
}

// or returns s while it lives, and any session otherwise.
func (e *service) or(ctx context.Context, s *session) (*session, error) {
	if s != nil && !s.isOver() {
		return s, nil
	}
	return e.any(ctx)
}

// event is called for a change of a watched node, on the goroutine that reads, in the order of the server's messages.
func (s *session) event(typ int32, path string) {
	if path == s.e.root {
		s.post(func(c *call) {
			if c.err == nil {
				_ = s.e.compareRoot(c.replies[0])
			}
		}, getData(path, true))
		return
	}
	s.mu.Lock()
	all := s.watchers[path]
	delete(s.watchers, path)
	if h := s.placed[path]; h != nil {
		h.link = 0
		if typ == eventDeleted {
			h.gone = true
			s.gone = append(s.gone, h)
		} else {
			s.fresh = append(s.fresh, h)
		}
		s.news.Notify()
	}
	s.mu.Unlock()
	for _, w := range all {
		w.call(typ)
	}
}

// listen adds a watcher of some nodes, before the watches are set: a notification may overtake the answer.
func (s *session) listen(w *watcher, paths []string) (unlisten func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, path := range paths {
		s.watchers[path] = append(s.watchers[path], w)
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, path := range paths {
			left := slices.DeleteFunc(s.watchers[path], func(other *watcher) bool { return other == w })
			if s.watchers[path] = left; len(left) == 0 {
				delete(s.watchers, path)
			}
		}
	}
}

// fenceNumber returns the number of the present fence.
func (s *session) fenceNumber() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fences
}

// fence is the path of a fence.
func (s *session) fence(n int) string {
	return fmt.Sprintf("%s/session:%x.%d", s.e.root, uint64(s.id), n)
}

func (s *session) makeFence(n int) request {
	return create(opCreate, s.fence(n), nil, s.e.own, flagEphemeral)
}

// fenced is the first operation of a creation. It fails if the fence was replaced, and shows the zxid.
func (s *session) fenced(n int) request { return setData(s.fence(n), nil, anyVersion) }

// advance makes the fence after the nth, which is missing.
func (s *session) advance(ctx context.Context, n int) error {
	replies, err := s.do(ctx, s.makeFence(n+1))
	if err != nil {
		return err
	}
	if err := ignore(replies[0].err, codeNodeExists); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fences = max(s.fences, n+1)
	return nil
}

// readQueue reads the children of a name, with all that the leader knows. forbid: creations that were sent before, on
// any connection of the session, are not carried out any more.
func (s *session) readQueue(ctx context.Context, dir string, forbid bool) (a reply, err error) {
	n, first := s.fenceNumber(), confirmed()
	if forbid {
		first = multi(remove(s.fence(n), anyVersion), s.makeFence(n+1))
	}
	replies, err := s.do(ctx, first, children(dir))
	if err != nil {
		return a, err
	}
	if _, _, err = replies[0].results(); forbid && (err == nil || isOneOf(err, codeNoNode)) {
		err = s.advance(ctx, n) // or somebody else has replaced it
	}
	return replies[1], ignore(err, codeNoAuth)
}
