// Package rediswire carries the steps of locks to Redis servers: the steps of concurrent callers share the pipelines of
// go-redis. Package redis has one line to its server or to each node of a cluster, package redlock one to each of its
// servers.
//
// The auto-pipelining of go-redis does not serve: it does not say whether a command was sent, which is the difference
// between ErrUnavailable and ErrUnknown, keeps commands for callers that have left, and closes a connection without
// waiting until the server has carried out the requests.
package rediswire

import (
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// Step is one step for one server: of the script, or one of the native ones. Its fields are the caller's until it is
// submitted, and again once its Owner was notified of its end.
type Step struct {
	Code string
	Keys redisscript.Keys
	// The keys of the further names of a TryAll or a Peek.
	Others []redisscript.Keys
	Args   []string
	// For its answer; zero without one.
	Deadline time.Time
	// It goes to a node of a cluster that is just taking the slot over.
	Asking bool
	Owner  Owner

	state atomic.Uint32
	// The script's source travels along, since the server did not know its hash.
	inline bool

	// An instant before the first byte left.
	SentAt backend.Instant
	Answer any
	Err    *redisconn.Failure
	// Of a failed step: closed when the server has run it or never will; may be nil.
	Drained <-chan struct{}
}

// Owner is notified when a step has ended, by any goroutine. It must not block.
type Owner interface{ Ended() }

// States of a step.
const (
	pending uint32 = iota
	// It may have left the process.
	taken
	// Its caller has left before it was taken.
	dropped
)

// Drop drops a step that has not left. Its Owner is not notified then. It is false if the step may have left.
func (s *Step) Drop() bool { return s.state.CompareAndSwap(pending, dropped) }

// Again makes a step that has ended, or was never submitted, ready to be submitted.
func (s *Step) Again() {
	s.Answer, s.Err, s.Drained, s.SentAt, s.inline = nil, nil, nil, 0, false
	s.state.Store(pending)
}

// fail ends a step with f.
func (s *Step) fail(f *redisconn.Failure) {
	s.Err = f
	s.Owner.Ended()
}
