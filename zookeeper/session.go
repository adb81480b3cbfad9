package zookeeper

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/background"
)

// session is one ZooKeeper session on a connection of its own. All holds and waiters with one TTL share it. When it ends it
// ends for good; the next acquire makes another one.
type session struct {
	d     *Driver
	asked time.Duration // the key in Driver.sessions
	conn  *zk.Conn

	shook chan struct{} // closed when a server has made the session, or refused to, or none could be reached
	ready chan struct{} // closed when the session can be used, or has ended
	lost  chan struct{} // closed when the session has ended

	dialing  context.Context // ends with the session
	stopDial context.CancelFunc
	calls    sync.WaitGroup // requests under way
	written  atomic.Int64   // requests that left, pings aside
	zxid     atomic.Int64   // of the last reply

	// Set before shook is closed.
	id  int64
	ttl time.Duration // as granted

	mu       sync.Mutex // protects the following fields; taken after Driver.mu, never before
	made     bool       // shook is closed
	err      error      // why it could not be made
	usable   bool
	wire     *wire // the present connection
	up       chan struct{}
	isUp     bool
	link     int                      // counts connections: what was seen over an earlier one is looked at again
	dirs     map[string]chan struct{} // closed when the creation of that node has been sent
	births   map[string]int64         // zxids of nodes whose creation was answered just now
	failures int                      // dials since the last connection
	proof    proof
	asking   *question       // not nil while a proof is asked for
	last     backend.Instant // when the last answered one was sent
	renewing backend.Instant // since when renewals wait for a proof; zero if none does
	users    int             // holds and waiters
	idle     backend.Instant // since when there are none
	ended    bool
}

// errSessionLost: the session is gone, and with it every node on it.
var errSessionLost = errors.New("the ZooKeeper session is gone")

// attemptTime bounds one request that is not bounded more tightly.
const attemptTime = 3 * time.Second

// sessionFor returns the session for ttl, with a user more. It makes one if there is none.
func (d *Driver) sessionFor(ctx context.Context, ttl time.Duration) (*session, error) {
	for {
		d.mu.Lock()
		s := d.sessions[ttl]
		creator := s == nil
		if creator {
			s = d.newSession(ttl)
			d.sessions[ttl] = s
			d.ending.Add(1)
		}
		d.mu.Unlock()
		if creator {
			if err := s.create(ctx); err != nil {
				return nil, err
			}
		}
		err := s.join(ctx)
		if err == nil {
			return s, nil
		}
		if ctx.Err() != nil {
			return nil, ended(ctx)
		}
		if !errors.Is(err, errSessionLost) {
			return nil, err
		}
		// Somebody else's attempt to make it failed, or it has just ended: make a new one.
	}
}

// anySession returns a session for a call that needs none in particular, with a user more.
func (d *Driver) anySession(ctx context.Context) (*session, error) {
	d.mu.Lock()
	var found *session
	for _, s := range d.sessions {
		s.mu.Lock()
		if s.usable && !s.ended && (found == nil || s.isUp) {
			found = s
		}
		s.mu.Unlock()
	}
	d.mu.Unlock()
	if found != nil && found.join(ctx) == nil {
		return found, nil
	}
	return d.sessionFor(ctx, min(max(10*time.Second, d.minTTL()), 20*d.o.Tick))
}

func (d *Driver) newSession(ttl time.Duration) *session {
	s := &session{
		d: d, asked: ttl, shook: make(chan struct{}), ready: make(chan struct{}), lost: make(chan struct{}), up: make(chan struct{}),
		proof: proof{tick: d.o.Tick}, dirs: map[string]chan struct{}{}, births: map[string]int64{},
	}
	s.dialing, s.stopDial = context.WithCancel(context.Background())
	return s
}

// create connects. Others that need the session wait in join.
func (s *session) create(ctx context.Context) error {
	defer close(s.ready)
	conn, events, err := zk.Connect(s.d.addrs, s.asked, zk.WithDialer(s.dial), zk.WithHostProvider(&servers{s: s}),
		zk.WithEventCallback(s.event), zk.WithLogInfo(false), zk.WithLogger(libraryLog{s.d.o.Logger}))
	if err != nil {
		s.end(backend.ReasonSessionExpired)
		s.d.ending.Done()
		return err
	}
	s.conn = conn
	go s.closeAfterEnd(events)
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	select {
	case <-s.shook:
	case <-ctx.Done():
		s.fail(s.unmade(ended(ctx)))
	}
	s.mu.Lock()
	err = s.err
	s.mu.Unlock()
	if err == nil {
		err = s.authenticate(ctx)
	}
	if err == nil {
		err = s.d.prepare(ctx, s)
	}
	if err != nil {
		s.end(backend.ReasonSessionExpired) // nobody holds anything on it
		return err
	}
	s.mu.Lock()
	s.usable = true
	s.mu.Unlock()
	s.d.background(s.keepAlive)
	return nil
}

// join adds a user, once the session stands. If it does not come to stand or has ended since, the error is errSessionLost.
func (s *session) join(ctx context.Context) error {
	select {
	case <-s.ready:
	case <-ctx.Done():
		return ended(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || !s.usable {
		return errSessionLost
	}
	s.users++
	return nil
}

// share adds a user to a session that has one.
func (s *session) share() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.users++
}

// leave takes a user away.
func (s *session) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users--; s.users == 0 {
		s.idle = s.d.clock.Now()
	}
}

// authenticate tells the server who we are. The library does it again on every later connection.
func (s *session) authenticate(ctx context.Context) error {
	if s.d.o.User == "" {
		return nil
	}
	_, err := do(ctx, s, nil, func(c *zk.Conn) (struct{}, error) {
		return struct{}{}, c.AddAuth("digest", []byte(s.d.o.User+":"+s.d.o.Password))
	})
	return err
}

// fail ends the making of the session.
func (s *session) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.made {
		s.made, s.err = true, err
		close(s.shook)
	}
}

// unmade is the error of a session that did not come to stand in time. Without a connection nothing was sent.
func (s *session) unmade(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wire == nil {
		return fmt.Errorf("%w: %w", errNoConnection, err)
	}
	return err
}

// over reports whether the session has ended.
func (s *session) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

// setWire notes a connection that was opened, so that end can close it.
func (s *session) setWire(w *wire) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false
	}
	s.wire = w
	return true
}

// dialFailed ends the making of the session when no server can be reached: nothing was sent.
func (s *session) dialFailed(err error) {
	s.mu.Lock()
	s.failures++
	failed := !s.made && s.failures >= len(s.d.addrs)
	s.mu.Unlock()
	if failed {
		s.fail(fmt.Errorf("%w: %w", errNoConnection, err))
	}
}

// paceDial pauses after every server has been tried once.
func (s *session) paceDial() error {
	s.mu.Lock()
	failures := s.failures
	s.mu.Unlock()
	if failures < len(s.d.addrs) {
		return s.dialing.Err()
	}
	return sleep(s.dialing, s.dialing, background.RetryPause(s.asked)/2)
}

// shaken looks at a server's answer to the connect request.
func (s *session) shaken(w *wire, timeout time.Duration, id int64) error {
	s.mu.Lock()
	first := s.id == 0
	switch {
	case s.ended:
		s.mu.Unlock()
		return errEnded
	case id == 0 || !first && id != s.id:
		s.mu.Unlock()
		s.end(backend.ReasonSessionExpired)
		return errEnded
	case first && timeout < s.asked:
		s.mu.Unlock()
		s.fail(&backend.InvalidError{
			Kind: backend.ErrInvalidTTL, What: "TTL", Value: s.asked.String(),
			Why: fmt.Sprintf("the servers grant no session of more than %v (maxSessionTimeout, or 20 times tickTime)", timeout),
		})
		return errEnded
	}
	if first {
		s.id, s.ttl, s.idle = id, timeout, w.sent
		s.proof.made(w.sent)
	} else {
		s.proof.reconnected(w.sent)
	}
	s.failures = 0
	s.mu.Unlock()
	return nil
}

// event is called by the library, in the order of what the server sends. It must not block.
func (s *session) event(e zk.Event) {
	switch {
	case e.Type == zk.EventSession && e.State == zk.StateHasSession:
		s.mu.Lock()
		if !s.isUp {
			s.isUp = true
			s.link++
			close(s.up)
		}
		if s.made {
			s.startAsking() // what was proved before is old by now
		} else {
			s.made = true
			close(s.shook)
		}
		s.mu.Unlock()
	case e.Type == zk.EventSession && e.State == zk.StateDisconnected:
		s.mu.Lock()
		if s.isUp {
			s.isUp = false
			s.up = make(chan struct{})
		} else if s.wire != nil {
			s.failures++ // a server that accepts connections and does not answer
		}
		s.mu.Unlock()
	case e.Type == zk.EventNodeDeleted, e.Type == zk.EventNodeDataChanged:
		s.d.changed(s, e)
	}
}

// connected reports whether a connection stands.
func (s *session) connected() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isUp
}

// linkNumber tells over which connection what is asked now will be answered, or an earlier one.
func (s *session) linkNumber() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.link
}

// end declares the session gone and tells every holder on it. It does not wait until the connection is closed.
func (s *session) end(reason backend.Reason) {
	s.fail(errSessionLost)
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return
	}
	s.ended = true
	close(s.lost)
	s.mu.Unlock()
	s.stopDial()
	for _, lost := range s.d.forget(s) {
		lost(reason)
	}
}

// closeAfterEnd closes the session in ZooKeeper and waits until the library's goroutines have ended.
func (s *session) closeAfterEnd(events <-chan zk.Event) {
	defer s.d.ending.Done()
	<-s.lost
	s.mu.Lock()
	w, up := s.wire, s.isUp
	s.mu.Unlock()
	if !up && w != nil {
		_ = w.Conn.Close() // whatever the library waits for there
	}
	s.conn.Close() // waits for the answer, for a second at most
	s.mu.Lock()
	w = s.wire
	s.mu.Unlock()
	if w != nil {
		_ = w.Conn.Close()
	}
	for range events { // until the library has ended
	}
	s.calls.Wait()
}
