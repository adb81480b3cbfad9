package server

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// stallAfter is how long a write to the local log may take before this node keeps silent towards the others.
const stallAfter = 500 * time.Millisecond

// errStalled is what raft gets instead of an answer while the local disk stands still.
var errStalled = errors.New("the local disk or log stands still: nothing is sent to the others")

// stallWatch knows whether this member keeps silent: because a write to the local log is stuck, because the state
// machine does not come to the end of a command, or because a leader found out that its log does not go on (see
// watchdog). A silent member asks for no votes either: elected, it would serve nobody, and send heartbeats.
//
// A leader whose disk hangs commits nothing, but raft sends its heartbeats from other goroutines, and so it stays
// leader for as long as the disk hangs. While a write is stuck nothing goes to the followers, and they elect another.
// Ending the write with an error was rejected: the write may still happen, later than what came after it, and leave a
// log that does not fit together.
//
// The deletion of old entries is not watched. Raft does that beside its writes, and where it hangs the next write does
// too.
type stallWatch struct {
	writing  span // raft writes from one goroutine at a time
	applying span // and applies in another
	hung     atomic.Bool
	damaged  atomic.Bool // the log is, and this member stops

	after     time.Duration // for a write
	hangAfter time.Duration // for the state machine
}

func newStallWatch() *stallWatch {
	return &stallWatch{
		writing: span{epoch: time.Now()}, applying: span{epoch: time.Now()}, after: stallAfter, hangAfter: hangAfter,
	}
}

// stalled reports whether this member is to keep silent.
func (w *stallWatch) stalled() bool {
	return w.hung.Load() || w.damaged.Load() || w.writing.lasts() > w.after || w.applying.lasts() > w.hangAfter
}

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

// watchedLog is a log store whose writes are watched.
type watchedLog struct {
	raft.LogStore
	watch *stallWatch
}

func (l *watchedLog) StoreLog(entry *raft.Log) error { return l.StoreLogs([]*raft.Log{entry}) }

func (l *watchedLog) StoreLogs(entries []*raft.Log) error {
	l.watch.writing.begin()
	defer l.watch.writing.end()
	return l.LogStore.StoreLogs(entries)
}

// IsMonotonic passes on whether the store refuses gaps: raft asks, and what does not pass it on corrupts raft-wal.
func (l *watchedLog) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}
