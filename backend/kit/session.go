package kit

// Sessions of a service, on which holds and waiters live. The driver opens a session in the service, keeps it alive
// and ends it; this file keeps the session to use, its users and its end, once for all drivers.
//
//	new ──Join──► opening ──Opened──► open ──End, Retire──► over
//	                 │                 └─Abandon─► open, but not joined ──End──► over
//	                 └──Opened(err)──────────────────────────────────────────► over
//
// One mutex, in Sessions, protects the table and the users of each Session. It is a leaf: only the function blank of
// Join and the clock are called under it. So the driver may call everything but Join while it holds its own mutexes,
// and must not take a mutex in blank.

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Sessions are the sessions of one driver: for each key, such as a TTL, the session for new holds and waiters. S is a
// pointer to the driver's own type, which embeds Session. All methods may be called by several goroutines, and all
// but Join while the driver holds its own mutexes.
//
// Sessions has no goroutine and no timer. The driver's own loop, which keeps a session alive, calls Retire, and End
// when the service has ended it; a session without a loop stays in the table indefinitely.
//
// A driver for a service that has sessions with a TTL; all holds of one TTL share a session:
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
//	defer s.Leave(1) // the call's own user; the hold adds another user, which stays
//
//	// run opens s in the service, and keeps it alive until it has ended, it was unused for a while, or ctx, the
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

	mu   sync.Mutex     // protects the following fields, and the fields of each Session
	used map[K]S        // by key: the sessions that Join joins
	live map[S]struct{} // these, and the sessions that were replaced
}

// embedder is a pointer to a type that embeds Session: only such a type has the method.
type embedder interface {
	comparable
	kitSession() *Session
}

// NewSessions returns an empty Sessions. The clock is the driver's; it times idle sessions.
func NewSessions[K comparable, S embedder](clock backend.Clock) *Sessions[K, S] {
	return &Sessions[K, S]{clock: clock, used: map[K]S{}, live: map[S]struct{}{}}
}

// Session is the common part of the sessions of all drivers. Its users are the holds, waiters and calls that need it;
// while there is one, Retire does not end it. Sessions.New makes one, and the zero value is not usable.
type Session struct {
	clock backend.Clock
	// mu is the mutex in Sessions. It protects err, users and idle.
	mu *sync.Mutex
	// opened and over are closed once each, by Opened and by the end. over may be closed first: a session can end
	// before it is open.
	opened, over chan struct{}
	// err is why it could not be opened: set before opened is closed.
	err   error
	users int
	// abandoned: an entry stays on it that its owner could not remove. It takes no new users.
	abandoned bool
	// idle is the instant since which it has had no users; meaningless while it has users.
	idle backend.Instant
}

// New returns the Session for a new session of the driver to embed, even for a session that is never joined.
func (all *Sessions[K, S]) New() Session {
	return Session{
		clock: all.clock, mu: &all.mu, opened: make(chan struct{}), over: make(chan struct{}), idle: all.clock.Now(),
	}
}

// kitSession reaches the embedded Session through the driver's type.
func (s *Session) kitSession() *Session { return s }

// Join returns the open session of a key, and adds a user to it, which Leave removes.
//
// Without a session, it makes one with blank, puts it into the table and calls open, on the caller's goroutine and
// without the mutex. open has to call Opened, or start a goroutine that does. The latter is better if opening takes
// time, because the end of one caller's context then does not fail other callers that wait for the same session. If
// it cannot be opened, they all get the error.
//
// If the session ends before the joining, Join retries with another one; it ends with ctx at the latest, with the
// error of Ended. A panic or runtime.Goexit in open ends the session, and propagates to the caller. blank must not
// lock a mutex, because it runs under the one of Sessions, so that two callers cannot make two sessions; open may.
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
			all.open(s, open)
		}
		if joined, err := s.kitSession().join(ctx); joined || err != nil {
			return s, err
		}
	}
}

// open calls open, and ends the session if open does not return, since no other caller would open it.
func (all *Sessions[K, S]) open(s S, open func(S)) {
	returned := false
	defer func() {
		if !returned {
			all.End(s)
		}
	}()
	open(s)
	returned = true
}

// join adds a user once the session is open. Without joined and without err, it has ended. The end of ctx comes
// first: a caller that has returned gets no user, which would never be removed.
func (s *Session) join(ctx context.Context) (joined bool, err error) {
	select {
	case <-s.opened:
	case <-s.over:
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

// Opened admits the callers that wait for a session, or ends it and returns err to them. It is called exactly once
// for each session that Join made. It returns false if the session has ended, now or before: then the driver must end
// the session that it has just opened in the service.
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

// End notes that a session has ended: its users notice that by Over, and the next Join makes another one. It returns
// true for the first call only, so that only one of several goroutines that notice the end acts on it.
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

// Retire ends a session that was unused for at least after, and reports whether it did. It checks and ends in one
// step, so that no caller joins in between; a driver that checked the users first and called End next would end
// sessions under new users.
func (all *Sessions[K, S]) Retire(s S, after time.Duration) bool {
	all.mu.Lock()
	defer all.mu.Unlock()
	own := s.kitSession()
	return own.users == 0 && (own.abandoned || all.clock.Now().Sub(own.idle) >= after) && all.end(s)
}

// Abandon is for a session with an unused entry that the service refuses to remove and that would live as long as the
// session, and for a session that is valid for its holds but not fit for new ones. No new user joins the session, and
// Retire ends it with its last user, without a pause. A driver that can move the other users to another session does
// so. Abandon returns true for the first call only, and never after the end.
func (all *Sessions[K, S]) Abandon(s S) bool {
	all.mu.Lock()
	defer all.mu.Unlock()
	own := s.kitSession()
	if own.abandoned || own.Ended() {
		return false
	}
	own.abandoned = true
	all.replace(s)
	return true
}

func (all *Sessions[K, S]) replace(s S) (found bool) {
	maps.DeleteFunc(all.used, func(_ K, other S) bool {
		found = found || other == s
		return other == s
	})
	return found
}

// Find returns the session that Join would join, if there is one, and adds no user. It may not be open yet, and it
// may end at any time: a caller that needs it to live calls Add.
func (all *Sessions[K, S]) Find(key K) (s S, found bool) {
	all.mu.Lock()
	defer all.mu.Unlock()
	s, found = all.used[key]
	return s, found
}

// Live returns the sessions that Join has made and that have not ended, including sessions that are being opened or
// were replaced. A driver's Close iterates over them.
func (all *Sessions[K, S]) Live() []S {
	all.mu.Lock()
	defer all.mu.Unlock()
	return slices.Collect(maps.Keys(all.live))
}

// Add adds n users, for holds that outlive the call that joined. It is false, and adds no users, if the session has
// ended.
func (s *Session) Add(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Ended() {
		return false
	}
	s.users += n
	return true
}

// Leave removes n users, or all if there are fewer. With the last one the idle time for Retire begins. After the end
// it has no effect.
func (s *Session) Leave(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users = max(s.users-n, 0); s.users == 0 {
		s.idle = s.clock.Now()
	}
}

// Over returns a channel that is closed when the session has ended, by End, Retire or a failed opening. The session
// may still exist in the service.
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
