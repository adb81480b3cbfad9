package replica

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// stallAfter bounds a write to the local log before this member keeps silent towards the others.
	stallAfter = 500 * time.Millisecond
	// hangAfter bounds the time of a command in the state machine, of an entry on its way into the log and through
	// it, and the time for which raft may refuse entries because it hands the leadership over. It is far beyond a
	// slow disk, a slow follower or a hand-over: raft abandons a hand-over after an election timeout and one message.
	hangAfter = 5 * time.Second
)

// silence alone decides whether this member keeps silent towards the others. Parts that find a reason report it here;
// senders of heartbeats, entries, snapshots and requests for votes ask reason before.
//
// A leader with a blocked part (the disk, the main loop of raft, the state machine, a hand-over of the leadership
// that never ends) commits no entry. But raft sends its heartbeats from other goroutines, so it would stay leader for
// as long as that lasts, and nobody would be served. A silent leader is replaced, and raft steps down here when it
// does not hear from the others. A silent member asks for no votes either: elected, it would serve nobody. No session
// expires meanwhile: renewals and reads are served correctly, and the end of a session is a write.
//
// A stuck write does not end with an error: it may still happen, after later writes, and leave an inconsistent log.
// The deletion of old entries is not watched. Raft does that beside its writes, and if it hangs the next write does
// too.
type silence struct {
	writing  span        // of the local log: raft writes from one goroutine at a time
	applying span        // of commands: raft applies in another
	damaged  atomic.Bool // the log is, and this member stops

	writeAfter time.Duration // how long a write may last
	hangAfter  time.Duration // how long all else may

	mu      sync.Mutex
	flying  []time.Time // when each pending entry was proposed here, in their order
	refused time.Time   // since when raft hands the leadership over; zero: no hand-over
}

func newSilence() *silence {
	return &silence{
		writing: span{epoch: time.Now()}, applying: span{epoch: time.Now()},
		writeAfter: stallAfter, hangAfter: hangAfter,
	}
}

// reason returns the reason why this member keeps silent; nil while it speaks.
func (s *silence) reason() error {
	if s.damaged.Load() {
		return errors.New("the log is damaged")
	}
	if lasts := s.writing.lasts(); lasts > s.writeAfter {
		return fmt.Errorf("a write to the log has been going on for %v", lasts.Round(time.Millisecond))
	}
	if lasts := s.applying.lasts(); lasts > s.hangAfter {
		return fmt.Errorf("a command has been in the state machine for %v", lasts.Round(time.Millisecond))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.flying) > 0 {
		if lasts := time.Since(s.flying[0]); lasts > s.hangAfter {
			return fmt.Errorf("a log entry has been on its way for %v", lasts.Round(time.Millisecond))
		}
	}
	if !s.refused.IsZero() {
		if lasts := time.Since(s.refused); lasts > s.hangAfter {
			return fmt.Errorf("leadership was handed over %v ago, and no member has taken it",
				lasts.Round(time.Millisecond))
		}
	}
	return nil
}

// proposed reports that an entry is about to be given to raft.
func (s *silence) proposed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flying = append(s.flying, time.Now())
}

// landed reports that the first of the pending entries has landed, and raft's error.
func (s *silence) landed(err error) {
	s.mu.Lock()
	s.flying = s.flying[1:]
	s.mu.Unlock()
	s.answered(err)
}

// answered reports raft's result of an entry whose proposal was not reported: an entry that waits until all earlier
// ones are applied may take any time.
func (s *silence) answered(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !errors.Is(err, raft.ErrLeadershipTransferInProgress):
		s.refused = time.Time{}
	case s.refused.IsZero():
		s.refused = time.Now()
	}
}

// deposed reports that this member no longer leads: it does not hand over the leadership.
func (s *silence) deposed() { s.answered(nil) }

// span is a recurring operation of one goroutine, which others observe.
type span struct {
	epoch time.Time
	since atomic.Int64 // start of the present operation, in nanoseconds since epoch; zero between operations
}

func (s *span) begin() { s.since.Store(max(1, int64(time.Since(s.epoch)))) }
func (s *span) end()   { s.since.Store(0) }

// lasts returns the duration of the present operation.
func (s *span) lasts() time.Duration {
	since := s.since.Load()
	if since == 0 {
		return 0
	}
	return time.Since(s.epoch) - time.Duration(since)
}

// watchedLog is a log store that reports its writes.
type watchedLog struct {
	raft.LogStore
	silence *silence
}

func (l *watchedLog) StoreLog(entry *raft.Log) error { return l.StoreLogs([]*raft.Log{entry}) }

func (l *watchedLog) StoreLogs(entries []*raft.Log) error {
	l.silence.writing.begin()
	defer l.silence.writing.end()
	return l.LogStore.StoreLogs(entries)
}

// IsMonotonic reports whether the store refuses gaps: raft asks, and a wrapper without it corrupts raft-wal.
func (l *watchedLog) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}
