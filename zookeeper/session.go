package zookeeper

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/notify"
)

// session is an engine.Session: a ZooKeeper session on its own connection. It reconnects until it has ended, and sends
// nothing more from then on. Requests that were sent over a former connection are done before those of the present one,
// or never: the servers let a session make requests over one connection at a time.
type session struct {
	e       *service
	asked   time.Duration // the TTL, or for a session without entries the time for which it is worth a wait
	timeout time.Duration // to request: asked, or another one if the session has no entries
	only    string        // the one server of a question
	idle    *time.Timer   // ends the spare session
	over    chan struct{} // closed when it has ended
	shut    chan struct{} // closed when its goroutines have ended, too
	life    context.Context
	stop    context.CancelFunc
	reads   sync.WaitGroup // goroutines that read connections

	mu       sync.Mutex // protects the following fields
	id       int64
	ttl      time.Duration // as granted; it does not change
	password []byte
	link     *link             // nil without a connection
	links    int               // counts connections; a request is answered over the last one or a later one
	up       chan struct{}     // closed when there is one, or the session has ended
	failed   error             // why it could not be opened
	trouble  error             // why the last connection did not come to stand
	misses   int               // tries in a row without a connection
	refused  int               // of these, failed dials in a row
	base     backend.Instant   // the leader has heard of this one
	touches  []backend.Instant // when answered messages were sent since, in order
	watchers map[string][]chan<- change
	holds    map[string]*hold // by path
	fresh    []*hold          // without a watch
	gone     []*hold          // deleted, or moved
	changes  int              // of holds
	news     notify.Signal    // there are fresh or gone ones
}

// spareTTL is the time without use after which a session without entries ends.
const spareTTL = 10 * time.Second

// endTimeout is the maximum time that the end of a session waits for the server's answer.
const endTimeout = time.Second

// newSession returns a session, for the caller to run.
func (e *service) newSession(asked, timeout time.Duration, only string) *session {
	s := &session{
		e: e, asked: asked, timeout: timeout, only: only, over: make(chan struct{}), up: make(chan struct{}),
		shut: make(chan struct{}), watchers: map[string][]chan<- change{}, holds: map[string]*hold{}, news: notify.New(),
	}
	s.life, s.stop = context.WithCancel(context.Background())
	return s
}

// TTL is engine.Session's.
func (s *session) TTL() time.Duration { return s.ttl }

// run keeps the session connected until it ends.
func (s *session) run() {
	defer close(s.shut)
	defer s.reads.Wait()
	addrs := s.e.addrs
	if s.only != "" {
		addrs = []string{s.only}
	}
	for n := s.e.first; ; n++ {
		if l, err := s.connect(addrs[n%len(addrs)]); err != nil {
			s.missed(err)
		} else {
			s.reads.Go(l.read)
			l.write()
		}
		s.mu.Lock()
		pause := s.misses >= len(addrs)
		s.mu.Unlock()
		if s.only != "" {
			s.end()
		}
		if s.isOver() || pause && kit.Sleep(s.life, kit.RetryPause(s.asked)/2) != nil {
			return
		}
	}
}

// missed notes a connection that did not come to stand. A new session fails when as many dials in a row have failed as
// there are servers: a wrong port is reported immediately. A server that accepts the connection is worth a wait: it
// starts, or elects a leader.
func (s *session) missed(err error) {
	s.mu.Lock()
	s.trouble = err
	s.misses++
	if s.refused++; isOneOf(err, errHello) {
		s.refused = 0
	}
	hopeless := s.id == 0 && (s.only != "" || s.refused >= len(s.e.addrs))
	s.mu.Unlock()
	if hopeless {
		s.fail(fmt.Errorf("%w: %w", errNoConnection, err))
	}
}

// connect makes a connection, and returns when the server has answered the connect request. A session with entries is
// shown only to a server on which it may be. Both steps are bounded by a third of the TTL, so that there is time for
// another server before the session ends.
func (s *session) connect(address string) (*link, error) {
	e, bound := s.e, max(s.asked/3, 100*time.Millisecond)
	ctx, cancel := context.WithTimeout(s.life, 2*bound)
	defer cancel()
	seen := e.history.zxid.Load()
	if s.only != "" {
		seen = 0
	}
	if s.timeout == s.asked {
		if err := e.examine(ctx, address, s.ttl); err != nil {
			if s.ttl == 0 && kit.Classified(err) {
				s.fail(err)
			}
			return nil, err
		}
	}
	l := &link{s: s, address: address, opened: e.clock.Now(), work: make(chan struct{}, 1), broken: make(chan struct{})}
	conn, err := e.dial(ctx, address)
	if err != nil {
		return nil, err
	}
	l.stop = context.AfterFunc(s.life, func() { _ = conn.SetReadDeadline(time.Now().Add(endTimeout)) })
	l.conn, l.in = conn, bufio.NewReaderSize(conn, 16<<10)
	_ = conn.SetDeadline(time.Now().Add(bound))
	g, err := hello(conn, l.in, seen, s.timeout, s.id, s.password)
	if err != nil {
		l.close()
		if seen > 0 && isOneOf(err, io.EOF, syscall.ECONNRESET) {
			go e.recall(s.life, address)
		}
		return nil, fmt.Errorf("%s %w: %w", address, errHello, err)
	}
	if _ = conn.SetDeadline(time.Time{}); s.isOver() { // whose deadline this may have been
		err = s.ended()
	} else {
		err = s.greeted(l, g)
	}
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// greeted judges a server's answer to the connect request, and sends the first requests. A session that the server does
// not know has ended, and so has one that it would end too early: its holds would be valid for longer.
func (s *session) greeted(l *link, g greeting) error {
	s.mu.Lock()
	first, holds := s.id == 0, s.timeout == s.asked
	var err error
	switch {
	case g.id == 0 || !first && g.id != s.id || !first && holds && g.timeout < s.ttl:
		err = engine.ErrNoSession
	case !holds && s.only == "":
		err = s.e.checkTick(g.timeout)
	case first && holds && g.timeout < s.asked:
		err = tooLong(s.asked, g.timeout)
	}
	if err != nil {
		s.mu.Unlock()
		s.fail(err)
		return err
	}
	if first {
		s.id, s.ttl = g.id, g.timeout
	}
	s.password = g.password
	s.base, s.touches = l.opened, nil // pings that the previous server heard may be lost with it
	s.mu.Unlock()
	if o := s.e.o; o.User != "" {
		l.mu.Lock()
		l.put(numberAuth, request{opAuth, appendText(appendText(appendInt(nil, 0), "digest"), o.User+":"+o.Password)})
		l.mu.Unlock()
	}
	l.start(&call{then: func(c *call) { s.arrived(l, c) }}, getData(s.e.root, true))
	return nil
}

// arrived compares the root as it was read over a new connection, and lets callers use that.
func (s *session) arrived(l *link, c *call) {
	if c.err != nil {
		return
	}
	if s.only == "" {
		if err := s.e.compareRoot(c.replies[0]); err != nil {
			if s.sight().link == 0 {
				s.fail(err)
			}
			l.end(err)
			return
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isOver() {
		return
	}
	s.link, s.misses, s.refused, s.trouble = l, 0, 0, nil
	s.links++
	close(s.up)
	s.news.Notify() // the watches have gone
}

// down notes that a connection has broken, and wakes all who watch a node.
func (s *session) down(l *link, why error) {
	s.mu.Lock()
	if s.link == l {
		s.link = nil
		if !s.isOver() {
			s.up = make(chan struct{})
		}
	} else { // a server that accepts connections, and does not answer
		s.misses++
		s.trouble = fmt.Errorf("%s %w: %w", l.address, errHello, why)
	}
	all := s.watchers
	s.watchers = map[string][]chan<- change{}
	s.mu.Unlock()
	for _, some := range all {
		tell(some, change{})
	}
}

// current returns the connection, or nil and what is closed when there is one.
func (s *session) current() (*link, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle != nil {
		s.idle.Reset(spareTTL)
	}
	return s.link, s.up
}

// fail ends the session with the error of all its calls. Others that could not be opened fail with it for a while.
func (s *session) fail(err error) {
	s.mu.Lock()
	if s.failed == nil {
		s.failed = err
	}
	opening := s.links == 0 && s.only == ""
	s.mu.Unlock()
	if opening {
		s.e.mu.Lock()
		s.e.failure, s.e.failed = err, s.e.clock.Now()
		s.e.mu.Unlock()
	}
	s.end()
}

// end declares the session over, and lets its connection close. Only the first call has an effect.
func (s *session) end() {
	s.mu.Lock()
	if s.isOver() {
		s.mu.Unlock()
		return
	}
	l := s.link
	close(s.over)
	if l == nil {
		close(s.up)
	}
	if s.idle != nil {
		s.idle.Stop()
	}
	s.mu.Unlock()
	s.e.drop(s)
	if l != nil {
		l.start(&call{then: func(*call) { l.end(errBroken) }}, request{op: opClose})
	}
	s.stop()
}

func (s *session) isOver() bool {
	select {
	case <-s.over:
		return true
	default:
		return false
	}
}

// ended is the error of a request on a session that is over.
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

// unconnected is the error of a request that waited for a connection: an operator who mistypes a port should read
// "connection refused" and not only a timeout.
func (s *session) unconnected(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if why := cmp.Or(s.trouble, ctx.Err()); why != nil {
		return fmt.Errorf("%w: %w", errNoConnection, why)
	}
	return errNoConnection
}

// opened waits until the session has a connection.
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

// Open is engine.Sessions's.
func (e *service) Open(ctx context.Context, ttl time.Duration) (engine.Session, error) {
	e.mu.Lock()
	err := e.unopened()
	e.mu.Unlock()
	if lost := e.history.err(); lost != nil {
		err = lost
	}
	if err != nil {
		return nil, err
	}
	s := e.newSession(ttl, ttl, "")
	go s.run()
	if err := s.opened(ctx); err != nil {
		s.end()
		return nil, err
	}
	e.mu.Lock()
	if !e.closed && !s.isOver() {
		e.sessions[s.id] = s
	}
	e.mu.Unlock()
	return s, nil
}

// End is engine.Sessions's.
func (e *service) End(ctx context.Context, own engine.Session) error {
	s := own.(*session)
	s.end()
	select {
	case <-s.shut:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// maxTouches bounds the messages that are remembered, of a few ticks.
const maxTouches = 30

// touch notes when an answered message was sent.
func (s *session) touch(sent backend.Instant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sent >= s.base && (len(s.touches) == 0 || sent.Sub(s.touches[len(s.touches)-1]) > s.e.o.Tick/10) {
		s.touches = append(s.touches[max(0, len(s.touches)-maxTouches):], sent)
	}
}

// pingEvery is the pause between two pings: see Prove.
func (s *session) pingEvery() time.Duration { return max(s.e.o.Tick*3/5, 10*time.Millisecond) }

// Prove is engine.Sessions's. The leader alone ends sessions. It restarts a session's timeout when it makes the
// session, when a client reconnects, and when a server reports, in its answers to the leader's pings twice a tick, that
// it heard from the client. An answer alone proves little: a server that was cut off from the leader still answers
// reads until it notices, and a leader that froze while another one was elected still answers sync, and lets clients
// reconnect.
//
// So Prove asks with a transaction that changes nothing. A majority must log it, and the leader refuses it for sessions
// that have ended. When a transaction sent at t is answered, its leader has led until t at least, and has received, on
// the same stream, all reports of the client's server up to half a tick before t: a message that was sent over the
// present connection at u ≤ t - tick/2 has restarted the session's timeout. A later leader restarts the timeouts of all
// sessions. The driver declares a margin of one tick, so that u may be up to a tick before the call. The connection
// pings every 0.6 ticks, so there is such a u, or there will be within a tenth of a tick.
func (e *service) Prove(ctx context.Context, own engine.Session) error {
	s, began := own.(*session), e.clock.Now()
	for {
		if s.isOver() {
			return s.ended()
		}
		l, up := s.current()
		if l != nil && s.touched(began) {
			seen := e.history.zxid.Load()
			c, err := s.call(ctx, confirmed())
			switch {
			case err != nil:
				return err
			case c.link != l:
				continue
			}
			// A majority has agreed to the refusal of a user without the right to read "/" as well.
			if err := ignore(c.replies[0].failed(), codeNoAuth); err != nil {
				return err
			}
			return e.checkZxid(seen, c.replies[0].zxid)
		}
		var soon <-chan time.Time
		if l != nil {
			soon, up = time.After(s.e.o.Tick/10), nil
		}
		select {
		case <-soon:
		case <-up:
		case <-s.over:
		case <-ctx.Done():
			return s.unconnected(ctx)
		}
	}
}

// touched reports whether a transaction that is sent now proves the session since an instant.
func (s *session) touched(since backend.Instant) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	since, until := since.Add(-s.e.o.Tick), s.e.clock.Now().Add(-s.e.o.Tick/2)
	return s.base >= since ||
		slices.ContainsFunc(s.touches, func(u backend.Instant) bool { return since <= u && u <= until })
}

// event handles a change of a watched node, on the goroutine that reads, in the order of the server's messages.
func (s *session) event(typ int32, path string) {
	if path == s.e.root {
		if l, _ := s.current(); l != nil {
			l.start(&call{then: func(c *call) {
				if c.err == nil {
					_ = s.e.compareRoot(c.replies[0])
				}
			}}, getData(path, true))
		}
		return
	}
	s.mu.Lock()
	some := s.watchers[path]
	delete(s.watchers, path)
	if h := s.holds[path]; h != nil {
		s.changes++
		s.unwatched(h, typ == eventDeleted)
	}
	s.mu.Unlock()
	tell(some, change{typ, path})
}

// change is an event of a node, or zero: the connection has broken.
type change struct {
	typ  int32
	path string
}

// tell passes a change on to those who listen. One that has not read its last one reads all nodes again anyway.
func tell(some []chan<- change, c change) {
	for _, events := range some {
		select {
		case events <- c:
		default:
		}
	}
}

// listen sends the next change of each of some nodes, before the watches are set: a notification may overtake the
// answer.
func (s *session) listen(events chan<- change, paths []string) (unlisten func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, path := range paths {
		s.watchers[path] = append(s.watchers[path], events)
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, path := range paths {
			left := slices.DeleteFunc(s.watchers[path], func(other chan<- change) bool { return other == events })
			if s.watchers[path] = left; len(left) == 0 {
				delete(s.watchers, path)
			}
		}
	}
}

// listening reports whether somebody listens to each of some nodes.
func (s *session) listening(paths []string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !slices.ContainsFunc(paths, func(path string) bool { return len(s.watchers[path]) == 0 })
}

var (
	// errHello: a server has accepted the connection, and does not serve the session.
	errHello = errors.New("did not answer the connect request")
	// errNoConnection: the request was not sent, and never will be.
	errNoConnection = errors.New("no connection to ZooKeeper")
	// errBroken: the connection broke before the reply came.
	errBroken = errors.New("the connection to ZooKeeper broke")
)
