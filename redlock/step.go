package redlock

import (
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// step is one step of the script for one node.
type step struct {
	code  string
	keys  redisscript.Keys
	args  []string
	index int // of the grant in a renewal
	node  *node

	// unwatched is set on a Quit whose caller does not wait for it any more: if it fails it becomes a debt.
	unwatched atomic.Bool
	closed    backend.Instant // of Quit: until when the name stays closed; zero: not at all
	deadline  time.Time       // for its answer; set by submit's callers
	state     atomic.Uint32

	// Set before the step enters sink.
	sentAt backend.Instant // before the first byte left
	answer any
	err    *redisconn.Failure
	sink   chan<- *step // has room for it
}

// States of a step.
const (
	stepPending uint32 = iota
	stepTaken          // it may have left the process
	stepDropped        // whoever asked gave up before it was taken
)

// drop takes a step back. It is false if that is too late.
func (s *step) drop() bool { return s.state.CompareAndSwap(stepPending, stepDropped) }

// fail completes a step that got no answer.
func (s *step) fail(n *node, f *redisconn.Failure) {
	s.err = f
	s.end(n)
}

// end hands a step back.
func (s *step) end(n *node) {
	s.sink <- s
	if s.err != nil && s.unwatched.Load() { // in this order, so that one side sees the other
		n.owe(debt{keys: s.keys, start: s.args[0], closed: s.closed})
	}
}
