// This file makes and ends ZooKeeper sessions. A session owns the ephemeral nodes, and its timeout is the TTL. A hold
// ends without a request only when its session ends.
//
// A session moves through these states, and never back: blank (newSession), connecting (connect, which starts the
// library's goroutines), usable (create has checked the tick, the members and the token space), ended (end, for any
// reason), and closed (closeAfterEnd). An ended session never resumes; the next acquire makes another. The client
// library would continue with a new session on the same zk.Conn and send the old session's requests there, so that a
// waiter that was frozen would return a lock that it does not hold (TestPausedWaiterIsNotGranted). dial in wire.go
// therefore refuses every connection after the end.
//
// kit.Sessions records the session of each slot, and its users.

package zookeeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/notify"
)

// session is one ZooKeeper session on its own connection. All holds and waiters of one slot share it.
//
// Its goroutines, besides the library's own: closeAfterEnd runs from connect until the library's goroutines and all
// requests have ended, and Close waits for it through Driver.ending; keepAlive runs while the session is usable; ask
// runs for each proof and one goroutine of do for each request, counted in calls. mu is taken after Driver.mu, never
// before.
type session struct {
	kit.Session
	d     *Driver
	asked time.Duration // the timeout to request: the TTL, if the session may have holds

	// Set by connect, before any request is made.
	conn *zk.Conn

	shook chan struct{} // closed when the session has been made, or when its making has failed

	probe bool // it claims no zxid, and takes any timeout; wire.Write asks for the shortest, except for longestAsked
	any   bool // it has no holds, so that it accepts a shorter timeout than requested

	// dialing bounds the making of connections. end cancels it, even for a session that was never made.
	dialing  context.Context // ends with the session
	stopDial context.CancelFunc

	// The requests in progress on the session, for closeAfterEnd, slotFor and do.
	calls   sync.WaitGroup // requests under way
	busy    atomic.Int32   // the number of these
	written atomic.Int64   // messages that were sent, except pings
	zxid    atomic.Int64   // of the last reply; see also Driver.zxid

	disowned []disowned // nodes that removeDisowned deletes; protected by Driver.mu

	// Set before shook is closed, and never changed.
	id  int64
	ttl time.Duration // as granted

	mu      sync.Mutex     // protects the following fields; taken after Driver.mu, never before
	made    bool           // shook is closed
	err     error          // why it could not be made
	trouble error          // why the last attempt to connect failed
	why     backend.Reason // why it has ended
	usable  bool

	// up is closed when the session has a connection, and replaced under mu when that is lost, so that await can wait for
	// it without a mutex. link counts connections: nodes seen over an earlier one are reread.
	wire *wire // the connection that was opened last
	up   chan struct{}
	isUp bool
	link int

	missing  map[string]bool // the nodes that the wire makes before the next creation, see makeFirst
	failures int             // attempts to connect since a server last answered the connect request
	refused  int             // of these, failed dials since a connection was last opened

	// The state of the proofs. At most one question is open; last is the instant at which the last answered question was
	// sent; renewing is the instant since which renewals wait for a proof, or zero.
	proof    proof
	asking   *question
	last     backend.Instant
	renewing backend.Instant

	// The listeners for changes of a node, by its path.
	watched map[string][]notify.Signal
}

// errSessionLost: the session has ended with all its nodes.
var errSessionLost = errors.New("the ZooKeeper session is gone")

// callTime is the maximum time for the making of a session, for a wait for a connection, and for each try of the
// requests that run in the background. A caller's request is bounded only by its context, its session and its
// connection.
const callTime = 3 * time.Second

// slot is the place of a session among a driver's sessions.
type slot struct {
	ttl time.Duration // 0: any, see anySession
	n   int           // below sessionsPerTTL
}

const (
	// A server executes the requests of one session one by one, which limits a busy client: hence up to four sessions.
	// Other clients keep one session alive, since each costs a connection and a transaction per interval.
	sessionsPerTTL = 4
	busySession    = 16 // the number of concurrent requests from which a driver uses another session
)

// slotFor chooses the session for an attempt: the first one while it is not busy, and then one of the others, by a
// hash of the name that each driver seeds for itself.
func (d *Driver) slotFor(ttl time.Duration, name string) slot {
	if first, found := d.sessions.Find(slot{ttl, 0}); !found || first.busy.Load() < busySession {
		return slot{ttl, 0}
	}
	return slot{ttl, 1 + int(maphash.String(d.seed, name)%(sessionsPerTTL-1))}
}

// sessionFor returns the session of a slot, and counts one more user of it. It makes one if necessary; callers that
// wait for the same slot meanwhile get the same session, or the same error. If the making fails after the end of this
// caller's context, the other callers make another session instead of failing. A caller with waits, which will retry,
// gets the error of a recent failure instead of a new session.
func (d *Driver) sessionFor(ctx context.Context, at slot, waits bool) (*session, error) {
	var failed error
	s, err := d.sessions.Join(ctx, at, func() *session { return d.newSession(at.ttl) }, func(s *session) {
		if waits {
			failed = d.failedLately(at)
		}
		if failed != nil {
			s.end(backend.ReasonSessionExpired) // nobody holds anything on it
			d.sessions.Opened(s, failed)
			return
		}
		failed = s.create(ctx)
		told := failed
		if ctx.Err() != nil {
			told = nil // the other callers make another one
		}
		d.noteFailure(at, told)
		d.sessions.Opened(s, told)
	})
	return s, cmp.Or(failed, err)
}

// failurePause is the time after a failure to make a session during which no waiter makes another session in that
// slot. Without the pause, each waiter would make one whenever it retries, at a cost of 1.5 MB each.
const failurePause = 250 * time.Millisecond

// failure is the error that waiters get, until an instant, instead of another session.
type failure struct {
	err   error
	until backend.Instant
}

// noteFailure records why the session of a slot could not be made; nil clears that.
func (d *Driver) noteFailure(at slot, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if delete(d.failures, at); err != nil {
		d.failures[at] = failure{err, d.clock.Now().Add(failurePause)}
	}
}

// failedLately returns why the session of a slot could not be made recently, or nil.
func (d *Driver) failedLately(at slot) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.failures[at]
	if d.clock.Now() < f.until {
		return f.err
	}
	delete(d.failures, at)
	return nil
}

// standing returns a usable session, preferably one with a connection, or nil.
func (d *Driver) standing() (found *session) {
	for _, s := range d.sessions.Live() {
		s.mu.Lock()
		if s.usable && !s.Ended() && (found == nil || s.isUp) {
			found = s
		}
		s.mu.Unlock()
	}
	return found
}

// anySession returns any session for a call that does not depend on one, and counts one more user of it. If there is
// none it makes one without holds, with a TTL of 10 s or the nearest that the servers grant.
func (d *Driver) anySession(ctx context.Context) (*session, error) {
	if found := d.standing(); found != nil && found.Add(1) {
		return found, nil
	}
	return d.sessionFor(ctx, slot{}, false)
}

// anyTTL is the timeout for which a session without holds asks.
const anyTTL = 10 * time.Second

// newSession returns a session that has not been made in ZooKeeper. It must not lock a mutex, since kit.Sessions.Join
// calls it under its own.
func (d *Driver) newSession(ttl time.Duration) *session {
	s := &session{
		Session: d.sessions.New(), d: d, shook: make(chan struct{}), up: make(chan struct{}),
		proof: proof{tick: d.o.Tick}, missing: map[string]bool{},
		watched: map[string][]notify.Signal{}, any: ttl == 0,
	}
	s.asked = cmp.Or(ttl, anyTTL)
	s.dialing, s.stopDial = context.WithCancel(context.Background())
	return s
}

// create makes the session usable, or ends it and returns the reason. A usable session is connected and authenticated,
// on servers with a tick no longer than Options.Tick, with counted members, and with the token space of this driver.
// Only then may a hold be granted on it.
//
// callTime bounds all of that. create checks the tick and counts the members after it has made the session, so that it
// reports a wrong address or a refused authentication first.
func (s *session) create(whole context.Context) error {
	if err := s.d.historyLost(); err != nil {
		s.end(backend.ReasonHistoryLost)
		return err
	}
	ctx, cancel := context.WithTimeout(whole, callTime)
	defer cancel()
	err := s.connect(ctx)
	if err == nil {
		if err = s.d.checkTick(ctx, s.server()); err != nil && !kit.Classified(err) {
			err = fmt.Errorf("%w: %w", errNoConnection, err)
		}
	}
	if err == nil {
		err = s.readConfig(ctx)
	}
	if err == nil {
		err = s.d.recognize(ctx, s)
	}
	if err != nil {
		s.end(backend.ReasonSessionExpired) // nobody holds anything on it
		// The time to make the session is over, but the caller's context has not ended: do not return a context's error.
		if kit.IsContext(err) && whole.Err() == nil && !errors.Is(err, errNoConnection) {
			err = fmt.Errorf("%w: no session within %v: %v", backend.ErrUnavailable, callTime, err)
		}
		return err
	}
	s.mu.Lock()
	s.usable = true
	s.mu.Unlock()
	s.d.background(s.keepAlive)
	return nil
}

// connect makes the session in ZooKeeper, for the user of the options. It waits for the server's answer and then
// authenticates, in the order that the library prescribes.
func (s *session) connect(ctx context.Context) error {
	conn, events, err := zk.Connect(s.d.addrs, s.asked, zk.WithDialer(s.dial), zk.WithHostProvider(&servers{s: s}),
		zk.WithEventCallback(s.event), zk.WithLogInfo(false), zk.WithLogger(libraryLog{s.d.o.Logger}))
	if err != nil {
		return err
	}
	s.conn = conn
	// Close does not wait for ending yet: it first waits for the call or the background work that got here.
	s.d.ending.Add(1)
	go s.closeAfterEnd(events)
	select {
	case <-s.shook:
	case <-ctx.Done():
		s.fail(s.unmade(kit.Ended(ctx)))
	}
	s.mu.Lock()
	err = s.err
	s.mu.Unlock()
	if err != nil || s.d.o.User == "" {
		return err
	}
	// The library repeats this on every later connection.
	return s.run(ctx, func(c *zk.Conn) error {
		return c.AddAuth("digest", []byte(s.d.o.User+":"+s.d.o.Password))
	})
}

// fail ends the making of the session with err and closes shook, unless the making has ended already.
func (s *session) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.made {
		s.made, s.err = true, err
		close(s.shook)
	}
}

// unmade returns the error of a session that was not made in time. Without a connection no request was sent, so the
// error becomes ErrUnavailable and not the bare end of a context.
func (s *session) unmade(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.trouble != nil {
		err = fmt.Errorf("%w: %w", s.trouble, err)
	}
	if s.wire == nil {
		return fmt.Errorf("%w: %w", errNoConnection, err)
	}
	return err
}

// reason returns why the session has ended; "" before that.
func (s *session) reason() backend.Reason {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.why
}

// setWire notes a connection that was opened, so that closeAfterEnd can close it. It returns false if the session has
// ended: the caller then closes the connection. closeAfterEnd reads s.wire under s.mu after the end, so no connection
// stays open.
func (s *session) setWire(w *wire) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Ended() {
		return false
	}
	s.wire, s.refused = w, 0
	return true
}

// dialFailed notes a failed dial. When as many dials in a row have failed as there are servers, it ends the making of
// the session: a wrong port is reported immediately, and not at the caller's deadline. The driver does wait for a
// server that accepts connections and does not serve yet, because it starts or elects a leader.
func (s *session) dialFailed(err error) {
	s.mu.Lock()
	s.failures++
	s.refused++
	s.trouble = err
	failed := !s.made && s.refused >= len(s.d.addrs)
	s.mu.Unlock()
	if failed {
		s.fail(fmt.Errorf("%w: %w", errNoConnection, err))
	}
}

// turnedAway notes that a connection has ended without a valid answer to the connect request. A server closes the
// connection while it does not serve, and when the client claims a higher zxid than the server has seen. The two cases
// look the same, so turnedAway calls suspect in both, if the client claimed a zxid.
func (s *session) turnedAway(w *wire, err error) {
	s.mu.Lock()
	s.trouble = fmt.Errorf("%s did not answer the connect request: %w", w.address, err)
	s.mu.Unlock()
	if w.seen > 0 && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)) {
		s.d.suspect()
	}
}

// paceDial pauses before a dial once as many attempts have failed as there are servers. It returns an error once the
// session has ended, and servers.Next then ends the library's loop.
func (s *session) paceDial() error {
	s.mu.Lock()
	failures := s.failures
	s.mu.Unlock()
	if failures < len(s.d.addrs) {
		return s.dialing.Err()
	}
	return kit.Sleep(s.dialing, kit.RetryPause(s.asked)/2)
}

// shaken examines a server's answer to the connect request, on the goroutine that reads, before the library sees it.
// The library closes the connection after an error.
//
// A session unknown to the server has ended. A timeout below the TTL is refused with ErrInvalidTTL: the servers would
// end holds before the promised time. An existing session that gets such a timeout ends immediately, since its holds
// would be valid for longer than the session; examine keeps sessions from such servers, unless their limit changes in
// between. Probes and sessions without holds take a shorter timeout, and every session takes a longer one.
func (s *session) shaken(w *wire, timeout time.Duration, id int64) error {
	s.mu.Lock()
	// Each case ends the session, or prevents its creation.
	first := s.id == 0
	switch {
	case s.Ended():
		s.mu.Unlock()
		return errSessionLost
	case id == 0 || !first && id != s.id, !first && timeout < s.ttl:
		// The server no longer has the session, or has made another, which must not be used, or would end the session too
		// early.
		s.mu.Unlock()
		s.end(backend.ReasonSessionExpired)
		return errSessionLost
	case first && timeout < s.asked && !s.probe && !s.any:
		s.mu.Unlock()
		s.fail(tooLong(s.asked, timeout))
		return errSessionLost
	}
	// The proof's base: the instant before the connection was opened, which is before the connect request was sent.
	if first {
		s.id, s.ttl = id, timeout
		s.proof.made(w.sent)
	} else {
		s.proof.reconnected(w.sent)
	}
	s.failures, s.trouble = 0, nil
	s.mu.Unlock()
	return nil
}

// event is called by the library, on the goroutine that reads, in the order of the server's messages. It must not
// block, and it must not send requests: the same goroutine would have to read their answers.
//
// The states of a connection arrive here too. StateHasSession counts a new link and wakes the callers that wait for a
// connection; after a reconnection it also asks for a proof, since earlier proofs are old by then. StateDisconnected
// replaces the channel for which await waits. A change of the root may mean that everything was deleted, and is
// checked in the background. Changes of other nodes wake waiters (wake) and end holds (changed).
func (s *session) event(e zk.Event) {
	switch {
	case e.Type == zk.EventSession && e.State == zk.StateHasSession:
		s.mu.Lock()
		if !s.isUp {
			s.isUp = true
			s.link++
			close(s.up)
		}
		// If made, this is a reconnection. The next renewal rereads the holds, since link has changed.
		if s.made {
			s.startAsking()
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
	case e.Path == s.d.root && (e.Type == zk.EventNodeDeleted || e.Type == zk.EventNodeDataChanged):
		s.d.background(func() { s.d.rootChanged(s) })
	case e.Type == zk.EventNodeDeleted, e.Type == zk.EventNodeDataChanged:
		s.wake(e.Path)
		s.d.changed(s, e)
	}
}

// connected reports whether the session has a connection.
func (s *session) connected() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isUp
}

// exists reports whether a server has made the session.
func (s *session) exists() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.id != 0
}

// server returns the address of the server to which the session connected last.
func (s *session) server() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wire.address
}

// linkNumber returns the number of connections that the session has had. A request that is sent after the call is
// answered over the last of these or a later one.
func (s *session) linkNumber() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.link
}

// end marks the session as ended and notifies every holder on it, with the given reason. Only the first call has an
// effect. Callers of end must not block, so end does not wait until the connection is closed: closeAfterEnd waits for
// Over and closes it. end notifies holders without holding a mutex.
func (s *session) end(reason backend.Reason) {
	s.fail(errSessionLost)
	s.mu.Lock()
	// End and why are set in one step, so that a reader that sees the end finds the reason.
	first := s.d.sessions.End(s)
	if first {
		s.why = reason
	}
	s.mu.Unlock()
	if !first {
		return
	}
	s.stopDial()
	for _, lost := range s.d.forget(s) {
		lost(backend.Loss{Reason: reason})
	}
}

// closeAfterEnd waits for the end of the session, closes it in ZooKeeper, so that its nodes end immediately and not
// after the timeout, and waits until the library's goroutines and the requests in progress have ended. It is the only
// goroutine that closes conn, and Close of the driver waits for it.
//
// It first closes a connection that is not up: the library's Close asks the server to end the session and would wait a
// second for an answer that never comes. Another connection may have been opened meanwhile, so closeAfterEnd checks
// again afterwards. It reads the events until the library closes their channel, which is the library's last step. When
// Close of the driver stops waiting (severed), the connection is closed without an answer.
func (s *session) closeAfterEnd(events <-chan zk.Event) {
	defer s.d.ending.Done()
	<-s.Over()
	s.mu.Lock()
	// A pending read on a dead connection would delay the library's Close and the end of its goroutines.
	w, up := s.wire, s.isUp
	s.mu.Unlock()
	if !up && w != nil {
		_ = w.Close()
	}
	stop := context.AfterFunc(s.d.severed, func() {
		s.mu.Lock()
		w := s.wire
		s.mu.Unlock()
		if w != nil {
			_ = w.Close()
		}
	})
	defer stop()
	s.conn.Close() // waits for the answer, for a second at most
	s.mu.Lock()
	// The library may have redialled meanwhile. From here on dial and setWire refuse new connections.
	w = s.wire
	s.mu.Unlock()
	if w != nil {
		_ = w.Close()
	}
	for range events { // until the library has ended
	}
	s.calls.Wait()
}
