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
	// stallAfter is the maximum time of a write to the local log, after which this member stops sending to the others.
	stallAfter = 500 * time.Millisecond
	// hangAfter is the maximum time of a command in the state machine, of an entry from its proposal to its result, and of
	// a leadership transfer, during which raft refuses entries. It is much longer than the delays of a slow disk or a slow
	// follower, and than a transfer: raft abandons a transfer after an election timeout and one message.
	hangAfter = 5 * time.Second
)

// silence decides whether this member must stop sending to the others. Parts that find a reason report it here. Senders
// of heartbeats, entries, snapshots and vote requests call reason first.
//
// A leader with a blocked part (the disk, the main loop of raft, the state machine, a leadership transfer that never
// ends) cannot commit entries. But raft sends heartbeats from other goroutines, so the member would stay leader for
// that time, and no client would be served. If it stops sending, the others elect another leader, and raft here steps
// down when it gets no answers. Such a member does not ask for votes either: as leader it could not serve clients. No
// session expires during that time, because the end of a session is a write. Renewals and reads stay correct.
//
// A blocked write does not fail with an error: it could still happen after later writes, and leave an inconsistent log.
// silence does not watch the deletion of old entries. Raft deletes them concurrently with its writes, and if a deletion
// blocks, the next write blocks too.
type silence struct {
	writing  span        // writes to the local log: raft writes from one goroutine at a time
	applying span        // commands: raft applies them in another goroutine
	damaged  atomic.Bool // the log is damaged, and this member stops

	writeAfter time.Duration // the maximum for a write
	hangAfter  time.Duration // the maximum for the rest

	mu      sync.Mutex
	flying  []time.Time // the times at which the pending entries were proposed, in order
	refused time.Time   // the begin of a leadership transfer; zero: none
}

func newSilence() *silence {
	return &silence{
		writing: span{epoch: time.Now()}, applying: span{epoch: time.Now()},
		writeAfter: stallAfter, hangAfter: hangAfter,
	}
}

// reason returns the reason why this member must not send; nil if it may.
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

// proposed records that an entry is about to be passed to raft.
func (s *silence) proposed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flying = append(s.flying, time.Now())
}

// landed records the end of the first pending entry, with raft's error.
func (s *silence) landed(err error) {
	s.mu.Lock()
	s.flying = s.flying[1:]
	s.mu.Unlock()
	s.answered(err)
}

// answered records raft's result of an entry without a call of proposed: an entry that waits until all earlier entries
// are applied may take any time.
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

// deposed records that this member no longer leads, so that no transfer of the leadership is in progress.
func (s *silence) deposed() { s.answered(nil) }

// span is a recurring operation of one goroutine, which others observe.
type span struct {
	epoch time.Time
	since atomic.Int64 // start of the current operation, in nanoseconds since epoch; zero between operations
}

func (s *span) begin() { s.since.Store(max(1, int64(time.Since(s.epoch)))) }
func (s *span) end()   { s.since.Store(0) }

// lasts returns the duration of the current operation; zero between operations.
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

// IsMonotonic reports whether the store refuses gaps. Raft calls it if it exists: a wrapper without this method would
// corrupt raft-wal.
func (l *watchedLog) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}
