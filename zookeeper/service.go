package zookeeper

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// service is the engine.Service. The package has its own client for the protocol, since the order of the requests on a
// connection is what makes several of them one step.
type service struct {
	o       Options // with defaults
	addrs   []string
	first   int    // of addrs, to which sessions connect first
	root    string // chroot included
	own     []zk.ACL
	clock   backend.Clock
	bad     error // the fault of the options, or nil
	history history
	quorum  atomic.Bool // several servers vote

	mu       sync.Mutex // protects the following fields; taken before session.mu
	closed   bool
	sessions map[int64]*session         // that the engine has opened
	spare    *session                   // for steps that need no particular session
	dirs     map[string]backend.Instant // the nodes of names, and their last use
	failure  error                      // why the last session could not be opened
	failed   backend.Instant            // when
}

// Unfit is engine.Checked's.
func (e *service) Unfit() error { return e.bad }

// Prompt is engine.Prompt's: all steps wait by engine.Await.
func (e *service) Prompt() {}

// OneEntry is engine.OneEntry's: the entries of a request have its id in their names, and Enter keeps one of them.
func (e *service) OneEntry() {}

// patience is the maximum duration of an exchange: it may begin on a connection that is silent, and end on the next
// one.
const patience = 10 * time.Second

// Patience is engine.Patient's.
func (e *service) Patience() time.Duration { return patience }

// Describe is engine.Service's. TokenSpace is empty and Exclusion is that of one durable server until the ensemble is
// known. MinTTL and MaxTTL are 2 and 20 ticks, in steps of a millisecond; for very short ticks, MinTTL leaves a little
// time to hold the lock. Margin is one tick, by which a hold ends before its session may: see Prove.
func (e *service) Describe() backend.Description {
	exclusion := backend.ExclusionDurableServer
	if e.quorum.Load() {
		exclusion = backend.ExclusionQuorum
	}
	return backend.Description{
		Name: driverName, Clock: e.clock, Exclusion: exclusion, KeepsHolds: true,
		Capabilities: backend.CapFencing | backend.CapFair | backend.CapMetadata | backend.CapPushLoss |
			backend.CapInspect | backend.CapList | backend.CapForceRelease | backend.CapShared | backend.CapPermits,
		MinTTL: max(2*e.o.Tick, e.o.Tick+200*time.Millisecond), MaxTTL: 20 * e.o.Tick, TTLGranularity: time.Millisecond,
		Margin: e.o.Tick, TokenSpace: e.history.learn(""),
		Shows: backend.Shows{
			Look: backend.StateFields{Since: true, Limit: true, Waiters: true, Queue: true, QueueSince: true},
			List: backend.StateFields{Since: true, Limit: true, Waiters: true},
		},
	}
}

// Ping is engine.Service's.
func (e *service) Ping(ctx context.Context) error { return e.Probe(ctx) }

// Close is engine.Service's. The engine has ended its sessions.
func (e *service) Close(ctx context.Context) error {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	var errs []error
	for _, s := range e.all() {
		errs = append(errs, e.End(ctx, s))
	}
	return errors.Join(errs...)
}

// all returns the living sessions.
func (e *service) all() []*session {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := slices.Collect(maps.Values(e.sessions))
	if e.spare != nil {
		all = append(all, e.spare)
	}
	return all
}

// ours returns the living session of this driver with an id, or nil.
func (e *service) ours(id int64) *session {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sessions[id]
}

// failurePause is the time after a failure to open a session during which it is the failure of all others too. Without
// it, each waiter would try whenever it repeats.
const failurePause = 250 * time.Millisecond

// unopened returns why no session can be opened now, or nil. The caller holds e.mu.
func (e *service) unopened() error {
	switch {
	case e.closed:
		return backend.ErrClosed
	case e.failure != nil && e.clock.Now().Sub(e.failed) < failurePause:
		return e.failure
	}
	return nil
}

// any returns a session for a step that needs no particular one: one with a connection, or the spare one, which ends
// when it was unused for spareTTL.
func (e *service) any(ctx context.Context) (*session, error) {
	if err := e.history.err(); err != nil {
		return nil, err
	}
	e.mu.Lock()
	s, err := e.standing(), error(nil)
	if s == nil {
		if s = e.spare; s == nil {
			if err = e.unopened(); err == nil {
				s = e.newSession(spareTTL, time.Millisecond, "")
				s.idle = time.AfterFunc(spareTTL, s.end)
				e.spare = s
				go s.run()
			}
		}
	}
	e.mu.Unlock()
	if err != nil {
		return nil, err
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

// drop forgets a session that has ended.
func (e *service) drop(s *session) {
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.sessions, func(_ int64, other *session) bool { return other == s })
	if e.spare == s {
		e.spare = nil
	}
}

// maxDirs bounds the names that are remembered.
const maxDirs = 20000

// useDir notes that a name is used, and reports whether the driver has used it lately: then its node probably exists.
func (e *service) useDir(dir string) (known bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, known = e.dirs[dir]
	if len(e.dirs) > maxDirs {
		clear(e.dirs)
	}
	e.dirs[dir] = e.clock.Now()
	return known
}

// emptyAfter is the time from the last use of a name until its node is removed. Removing and remaking it costs two
// writes, which a busy name should not pay.
const emptyAfter = 2 * time.Second

// Settle is engine.Settles's: it removes the node of a name that is not used any more. The servers remove empty
// containers too, but once a minute, and some 150 in a second. A node with the reason of a forced release is left to
// them. The server refuses to remove a node with entries.
func (e *service) Settle(ctx context.Context, name string) (again time.Duration, err error) {
	dir := e.dir(name)
	e.mu.Lock()
	used, known := e.dirs[dir]
	left := used.Add(emptyAfter).Sub(e.clock.Now())
	s := e.standing()
	if s == nil || !known || left > 0 {
		e.mu.Unlock()
		return max(0, left), nil
	}
	delete(e.dirs, dir)
	e.mu.Unlock()
	replies, err := s.do(ctx, exists(dir))
	if err != nil {
		return 0, nil // an empty node does no harm
	}
	if stat, err := replies[0].stat(); err == nil && stat.NumChildren == 0 && stat.DataLength == 0 {
		_, _ = s.do(ctx, remove(dir, stat.Version))
	}
	return 0, nil
}
