package redlock

import (
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/rediswire"
)

const maxSteps = 128 // that one call of the script takes

// step is one step for one node.
type step struct {
	wire  rediswire.Step
	code  string
	keys  redisscript.Keys
	args  []string
	index int // of the grant in a renewal
	node  *node
	to    *node // whose line has it

	// unwatched is set on a release whose caller does not wait for it any more: if it fails it becomes a debt.
	unwatched atomic.Bool
	closed    backend.Instant // of a release: until when the name stays closed; zero: not at all
	deadline  time.Time       // for its answer; set by submit's callers

	// Set before the step enters sink.
	sentAt backend.Instant // before the first byte left
	answer any
	err    *redisconn.Failure
	sink   chan<- *step // has room for it
}

// submit sends steps, in the order of submission: the release of a hold must not overtake its acquire on a node whose
// answer nobody awaited. Each enters its sink in the end, unless it was dropped.
func (n *node) submit(steps ...*step) {
	all := make([]*rediswire.Step, len(steps))
	for i, s := range steps {
		s.to = n
		s.wire.Code, s.wire.Keys, s.wire.Args, s.wire.Deadline, s.wire.Owner = s.code, s.keys, s.args, s.deadline, s
		all[i] = &s.wire
	}
	n.line.Submit(all...)
}

// drop takes a step back. It is false if that is too late.
func (s *step) drop() bool { return s.wire.Drop() }

// Ended implements rediswire.Owner.
func (s *step) Ended() {
	s.sentAt, s.answer, s.err = s.wire.SentAt, s.wire.Answer, s.wire.Err
	s.sink <- s
	if s.unwatched.Load() && s.unpaid() { // in this order, so that one side sees the other
		s.to.owe(debt{keys: s.keys, start: s.args[0], closed: s.closed})
	}
}

// unpaid reports whether a release that has ended may have left something: it failed, or has to be asked of the script,
// or met nothing where a vote may have been sent again behind it because the server had forgotten the script.
func (s *step) unpaid() bool { return s.err != nil || s.answer == nil || s.answer == int64(0) }
