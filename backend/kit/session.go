package kit

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Sessions are the sessions of one driver: for each key, such as a TTL, the one on which everything lives that comes
// now. S is a pointer to the driver's own type, which embeds Session. The driver opens sessions in its service, keeps
// them alive and ends them there; the kit knows who uses them and which have ended. All methods may be called by several
// goroutines, and all but Join while the driver holds mutexes of its own.
type Sessions[K comparable, S embedder] struct {
	clock backend.Clock

	mu   sync.Mutex     // protects the following fields, and those of each Session
	used map[K]S        // by key: those that Join joins
	live map[S]struct{} // these, and those that were replaced
}

// embedder is a pointer to a type that embeds Session.
type embedder interface {
	comparable
	kitSession() *Session
}

// NewSessions returns the sessions of a driver that has none yet.
func NewSessions[K comparable, S embedder](clock backend.Clock) *Sessions[K, S] {
	return &Sessions[K, S]{clock: clock, used: map[K]S{}, live: map[S]struct{}{}}
}

// Session is what the sessions of all drivers have in common. Its users are the holds, waiters and calls that need it.
// Sessions.New makes one.
type Session struct {
	clock        backend.Clock
	mu           *sync.Mutex   // of Sessions; protects the fields after the next two
	opened, over chan struct{} // closed when that is so
	err          error         // why it could not be opened
	users        int
	idle         backend.Instant // since when there are none
}

// New returns what a new session of the driver embeds, also one that the driver makes for itself and that nobody joins.
func (all *Sessions[K, S]) New() Session {
	return Session{
		clock: all.clock, mu: &all.mu, opened: make(chan struct{}), over: make(chan struct{}), idle: all.clock.Now(),
	}
}

func (s *Session) kitSession() *Session { return s }

// Join returns the open session of a key, and adds a user to it. If there is none, it makes a blank one and calls open.
// That calls Opened, or starts a goroutine which will: then the end of one caller's context does not fail the others who
// wait for the same session. If it cannot be opened, they all get the error. If it ends before they have joined it, Join
// begins again. blank must not lock a mutex; open may.
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

// join adds a user once the session is open. Without joined and without err, it has ended.
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

// Opened lets those in who wait for a session, or ends it with the error that they get. It is false if the session has
// ended, now or before.
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

// End notes that a session has ended: the next Join makes another one. It is true for the first call only.
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

// Retire ends a session that nobody has used for so long. Nobody joins it between the look and the end.
func (all *Sessions[K, S]) Retire(s S, after time.Duration) bool {
	all.mu.Lock()
	defer all.mu.Unlock()
	own := s.kitSession()
	return own.users == 0 && all.clock.Now().Sub(own.idle) >= after && all.end(s)
}

// Replace has the next Join make another session, while s lives on for those who use it. It is true for the first call
// only, and never after the end.
func (all *Sessions[K, S]) Replace(s S) bool {
	all.mu.Lock()
	defer all.mu.Unlock()
	return all.replace(s)
}

func (all *Sessions[K, S]) replace(s S) (found bool) {
	maps.DeleteFunc(all.used, func(_ K, other S) bool {
		found = found || other == s
		return other == s
	})
	return found
}

// Find returns the session that Join would join, if there is one, without a user more. It may not be open yet.
func (all *Sessions[K, S]) Find(key K) (s S, found bool) {
	all.mu.Lock()
	defer all.mu.Unlock()
	s, found = all.used[key]
	return s, found
}

// Live returns the sessions that Join has made and that have not ended, with those that are being opened and those that
// were replaced.
func (all *Sessions[K, S]) Live() []S {
	all.mu.Lock()
	defer all.mu.Unlock()
	return slices.Collect(maps.Keys(all.live))
}

// Add adds n users. It is false, and adds none, if the session has ended.
func (s *Session) Add(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Ended() {
		return false
	}
	s.users += n
	return true
}

// Leave takes n users away. After the end it means nothing.
func (s *Session) Leave(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users -= n; s.users == 0 {
		s.idle = s.clock.Now()
	}
}

// Over is closed when the session has ended.
func (s *Session) Over() <-chan struct{} { return s.over }

// Ended reports whether the session has ended.
func (s *Session) Ended() bool {
	select {
	case <-s.over:
		return true
	default:
		return false
	}
}
