package kit

// Sessions of a service, on which holds and waiters live. What is the service's own (opening a session, keeping it
// alive, ending it) stays in the driver; which one to use, who uses it and whether it has ended is here, once for all
// drivers.
//
//	new ──Join──► opening ──Opened──► open ──End, Retire──► over
//	                 │                 └─Replace─► open, but not joined ──End──► over
//	                 └──Opened(err)──────────────────────────────────────────► over
//
// One mutex, in Sessions, protects the table and the users of each Session. It is a leaf: nothing is called under it
// but the function blank of Join and the clock. So the driver may call everything but Join while it holds mutexes of
// its own, and must not take a mutex in blank.

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Sessions are the sessions of one driver: for each key, such as a TTL, the one on which everything new lives. S is a
// pointer to the driver's own type, which embeds Session. All methods may be called by several goroutines, and all but
// Join while the driver holds mutexes of its own.
//
// Sessions has no goroutine and no timer. The driver's own loop, which keeps a session alive, asks Retire, and calls
// End when the service has ended it; a session that nobody watches stays in the table for ever.
//
// A driver whose service has sessions with a TTL, and whose holds of one TTL share one of them:
//
//	type session struct {
//		kit.Session
//		ttl time.Duration
//		id  service.ID // set before Opened
//	}
//
//	s, err := d.sessions.Join(ctx, r.TTL,
//		func() *session { return &session{Session: d.sessions.New(), ttl: r.TTL} },
//		func(s *session) { d.gate.Go(func(context.Context) { d.run(d.gate.Closing(), s) }) })
//	if err != nil {
//		return backend.Grant{}, err
//	}
//	defer s.Leave(1) // the call's own user; the hold adds one that stays
//
//	// run opens s in the service, and keeps it alive until it has ended, nobody has used it for a while, or ctx, the
//	// gate's, ends: Close waits for it.
//	func (d *Driver) run(ctx context.Context, s *session) {
//		id, err := d.service.OpenSession(ctx, s.ttl)
//		s.id = id
//		if !d.sessions.Opened(s, err) {
//			return
//		}
//		for d.keepAlive(ctx, s) == nil && !d.sessions.Retire(s, s.ttl) {
//		}
//		d.sessions.End(s)
//	}
type Sessions[K comparable, S embedder] struct {
	clock backend.Clock

	mu   sync.Mutex     // protects the following fields, and those of each Session
	used map[K]S        // by key: those that Join joins
	live map[S]struct{} // these, and those that were replaced
}

// embedder is a pointer to a type that embeds Session: the only way to have the method that it asks for.
type embedder interface {
	comparable
	kitSession() *Session
}

// NewSessions returns the sessions of a driver that has none yet. The clock is the driver's; it times how long a
// session has been idle.
func NewSessions[K comparable, S embedder](clock backend.Clock) *Sessions[K, S] {
	return &Sessions[K, S]{clock: clock, used: map[K]S{}, live: map[S]struct{}{}}
}

// Session is what the sessions of all drivers have in common. Its users are the holds, waiters and calls that need it;
// while there is one, Retire does not end it. Sessions.New makes one, and the zero value is not usable.
type Session struct {
	clock backend.Clock
	// mu is the one in Sessions. It protects err, users and idle.
	mu *sync.Mutex
	// opened and over are closed once each, by Opened and by the end. over may be closed first: a session can end
	// before it is open.
	opened, over chan struct{}
	// err is why it could not be opened: set before opened is closed.
	err   error // why it could not be opened
	users int
	// idle is since when it has had no users; of no meaning while there are some.
	idle backend.Instant
}

// New returns what a new session of the driver embeds, also one that the driver makes for itself and that nobody joins.
func (all *Sessions[K, S]) New() Session {
	return Session{
		clock: all.clock, mu: &all.mu, opened: make(chan struct{}), over: make(chan struct{}), idle: all.clock.Now(),
	}
}

// kitSession reaches the embedded Session through the driver's type.
func (s *Session) kitSession() *Session { return s }

// Join returns the open session of a key, and adds a user to it, whom Leave takes away.
//
// If there is none, it makes one with blank, puts it into the table and calls open, on the caller's goroutine and
// without the mutex. open has to see to it that Opened is called: itself, or from a goroutine that it starts. The
// latter is better where opening takes time, because the end of one caller's context then does not fail the others who
// wait for the same session. If it cannot be opened, they all get the error.
//
// If the session ends between its opening and the joining, Join begins again with another one; it ends with ctx at the
// latest, with the error of Ended. blank must not lock a mutex, because it runs under the one of Sessions, so that two
// callers cannot make two sessions; open may.
func (all *Sessions[K, S]) Join(ctx context.Context, key K, blank func() S, open func(S)) (S, error) {
	for {
		all.mu.Lock()
		s, there := all.used[key]
		if !there {
			s = blank()
			all.used[key], all.live[s] = s, struct{}{}
		}
		all.mu.Unlock()
		if !there {
			open(s)
		}
		if joined, err := s.kitSession().join(ctx); joined || err != nil {
			return s, err
		}
	}
}

// join adds a user once the session is open. Without joined and without err, it has ended. The end of ctx comes first:
// a caller who gave up gets no user, which nobody would take away.
func (s *Session) join(ctx context.Context) (joined bool, err error) {
	select {
	case <-s.opened:
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		err = Ended(ctx)
	case s.Ended():
		err = s.err
	default:
		s.users++
		joined = true
	}
	return joined, err
}

// Opened lets those in who wait for a session, or ends it with the error that they get. It is called exactly once for
// each session that Join made. It is false if the session has ended, now or before: then the driver ends in the service
// what it has just opened there.
func (all *Sessions[K, S]) Opened(s S, err error) bool {
	all.mu.Lock()
	defer all.mu.Unlock()
	if err != nil {
		all.end(s)
	}
	own := s.kitSession()
	own.err, own.idle = err, all.clock.Now()
	close(own.opened)
	return !own.Ended()
}

// End notes that a session has ended: its users learn that by Over, and the next Join makes another one. It is true for
// the first call only, so that one of several goroutines that notice the end draws the consequences.
func (all *Sessions[K, S]) End(s S) bool {
	all.mu.Lock()
	defer all.mu.Unlock()
	return all.end(s)
}

// end is End. The caller holds the mutex.
func (all *Sessions[K, S]) end(s S) bool {
	if s.kitSession().Ended() {
		return false
	}
	delete(all.live, s)
	all.replace(s)
	close(s.kitSession().over)
	return true
}

// Retire ends a session that nobody has used for at least that long, and reports whether it did. Looking and ending are
// one step, so nobody joins in between; a driver that looked at the users first and called End next would end sessions
// under new users.
func (all *Sessions[K, S]) Retire(s S, after time.Duration) bool {
	all.mu.Lock()
	defer all.mu.Unlock()
	own := s.kitSession()
	return own.users == 0 && all.clock.Now().Sub(own.idle) >= after && all.end(s)
}

// Replace has the next Join make another session, while s lives on for those who use it. It is for sessions that are
// sound for what they hold and no longer fit for new holds. It is true for the first call only, and never after the
// end.
func (all *Sessions[K, S]) Replace(s S) bool {
	all.mu.Lock()
	defer all.mu.Unlock()
	return all.replace(s)
}

// replace takes s out of the table of those that are joined. The caller holds the mutex.
func (all *Sessions[K, S]) replace(s S) (found bool) {
	maps.DeleteFunc(all.used, func(_ K, other S) bool {
		found = found || other == s
		return other == s
	})
	return found
}

// Find returns the session that Join would join, if there is one, and adds no user. It may not be open yet, and it may
// end at any time: what needs it to live calls Add.
func (all *Sessions[K, S]) Find(key K) (s S, found bool) {
	all.mu.Lock()
	defer all.mu.Unlock()
	s, found = all.used[key]
	return s, found
}

// Live returns the sessions that Join has made and that have not ended: also those that are being opened and those that
// were replaced. A driver's Close goes through them.
func (all *Sessions[K, S]) Live() []S {
	all.mu.Lock()
	defer all.mu.Unlock()
	return slices.Collect(maps.Keys(all.live))
}

// Add adds n users, for holds that outlive the call that joined. It is false, and adds none, if the session has ended.
func (s *Session) Add(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Ended() {
		return false
	}
	s.users += n
	return true
}

// Leave takes n users away. With the last one the time begins that Retire looks at. After the end it means nothing.
func (s *Session) Leave(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users -= n; s.users == 0 {
		s.idle = s.clock.Now()
	}
}

// Over returns a channel that is closed when the session has ended, by End, Retire or a failed opening. It says nothing
// about what the service still believes.
func (s *Session) Over() <-chan struct{} { return s.over }

// Ended reports whether the session has ended. It takes no lock; the answer true is final.
func (s *Session) Ended() bool {
	select {
	case <-s.over:
		return true
	default:
		return false
	}
}
