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
	// stallAfter is how long a write to the local log may take before this member keeps silent towards the others.
	stallAfter = 500 * time.Millisecond
	// hangAfter is how long a command may be in the state machine, or an entry on its way into the log and through it,
	// and how long raft may refuse entries because it hands the leadership over. All are far beyond what a slow disk, a
	// slow follower or a hand-over takes: raft gives up a hand-over after an election timeout and one message.
	hangAfter = 5 * time.Second
)

// silence is the one place that decides whether this member keeps silent towards the others. Those who find a reason
// report it here; those who send heartbeats, entries, snapshots and requests for votes ask reason before.
//
// A leader of which a part stands still (the disk, the main loop of raft, the state machine, a hand-over of the
// leadership that never ends) commits nothing. But raft sends its heartbeats from other goroutines, so it would stay
// leader for as long as that lasts, and nobody would be served. A silent one is succeeded, and raft steps down here
// when it hears nothing of the others. A silent member asks for no votes either: elected, it would serve nobody.
// Nothing is timed meanwhile: renewals and reads are served rightly, and the end of a session is a write.
//
// Ending a stuck write with an error was rejected: the write may still happen, later than what came after it, and leave
// a log that does not fit together. The deletion of old entries is not watched. Raft does that beside its writes, and
// where it hangs the next write does too.
type silence struct {
	writing  span        // of the local log: raft writes from one goroutine at a time
	applying span        // of commands: raft applies in another
	damaged  atomic.Bool // the log is, and this member stops

	writeAfter time.Duration // how long a write may last
	hangAfter  time.Duration // how long all else may

	mu      sync.Mutex
	flying  []time.Time // when each entry was proposed here that has not landed, in their order
	refused time.Time   // since when raft hands the leadership over; zero: it does not
}

func newSilence() *silence {
	return &silence{
		writing: span{epoch: time.Now()}, applying: span{epoch: time.Now()},
		writeAfter: stallAfter, hangAfter: hangAfter,
	}
}

// reason is why this member keeps silent; nil while it speaks.
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
			return fmt.Errorf("the leadership has been handed over for %v, and nobody took it",
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

// landed reports that the first of the entries on their way has landed, and what raft said to it.
func (s *silence) landed(err error) {
	s.mu.Lock()
	s.flying = s.flying[1:]
	s.mu.Unlock()
	s.answered(err)
}

// answered reports what raft said to an entry of which it was not reported that it was proposed: one that waits for all
// that is to be applied before it takes as long as it takes.
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

// deposed reports that this member leads no more: it hands nothing over.
func (s *silence) deposed() { s.answered(nil) }

// span is something that one goroutine does over and over, and others look at.
type span struct {
	epoch time.Time
	since atomic.Int64 // when the present one began, in nanoseconds since epoch; zero if there is none
}

func (s *span) begin() { s.since.Store(max(1, int64(time.Since(s.epoch)))) }
func (s *span) end()   { s.since.Store(0) }

// lasts is for how long the present one has gone on.
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

// IsMonotonic passes on whether the store refuses gaps: raft asks, and what does not pass it on corrupts raft-wal.
func (l *watchedLog) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}
