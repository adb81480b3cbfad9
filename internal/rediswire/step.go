// Package rediswire carries the steps of locks to Redis servers: one pipelined connection to each, with any number of
// requests in flight. Package redis has one line to its server or to each node of a cluster, package redlock one to each
// of its servers.
package rediswire

import (
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// Step is one step for one server: of the script, or one of the native ones. Its fields are the caller's until it is
// submitted, and again once its Owner was told of its end.
type Step struct {
	Code     string
	Keys     redisscript.Keys
	Others   []redisscript.Keys // of the further names of a TryAll
	Args     []string
	Deadline time.Time // for its answer; zero without one
	Asking   bool      // on a node of a cluster that is just taking the slot over
	Owner    Owner

	state  atomic.Uint32
	inline bool // the script's source travels along

	// What became of it.
	SentAt  backend.Instant // before the first byte left
	Answer  any
	Err     *redisconn.Failure
	Drained <-chan struct{} // of a failed step: closed when the server has run it or never will; may be nil
}

// Owner is told when a step has ended, by whoever ended it. It must not block.
type Owner interface{ Ended() }

// States of a step.
const (
	pending uint32 = iota
	taken          // it may have left the process
	dropped        // whoever asked gave up before it was taken
)

// Drop takes a step back, whose Owner is then told nothing. It is false if that is too late.
func (s *Step) Drop() bool { return s.state.CompareAndSwap(pending, dropped) }

// Again makes a step that has ended, or was never submitted, ready to be submitted.
func (s *Step) Again() {
	s.Answer, s.Err, s.Drained, s.SentAt, s.inline = nil, nil, nil, 0, false
	s.state.Store(pending)
}

func (s *Step) fail(f *redisconn.Failure) {
	s.Err = f
	s.Owner.Ended()
}
