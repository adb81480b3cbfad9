package redlock

import (
	"sync/atomic"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/rediswire"
)

const maxSteps = 128 // that one call of the script takes

// step is one step for one node.
type step struct {
	rediswire.Step
	index    int // of the node, or of the grant in a renewal
	node     *node
	answered bool         // noted by poll
	sink     chan<- *step // it enters when it has ended; has room for it

	// unwatched is set on a release whose caller does not wait for it any more: if it fails it becomes a debt.
	unwatched atomic.Bool
	closed    backend.Instant // of a release: until when the name stays closed; zero: not at all
}

// submit sends steps, in the order of submission: the release of a hold must not overtake its acquire on a node whose
// answer nobody awaited. Each enters its sink in the end, unless it was dropped.
func (n *node) submit(steps ...*step) {
	all := make([]*rediswire.Step, len(steps))
	for i, s := range steps {
		s.Owner, all[i] = s, &s.Step
	}
	n.line.Submit(all...)
}

// Ended implements rediswire.Owner.
func (s *step) Ended() {
	s.sink <- s
	if s.unwatched.Load() && s.unpaid() { // in this order, so that one side sees the other
		s.node.owe(debt{keys: s.Keys, start: s.Args[0], closed: s.closed})
	}
}

// unpaid reports whether a release that has ended may have left something: it failed, or has to be asked of the script,
// or met nothing where a vote may have been sent again behind it because the server had forgotten the script.
func (s *step) unpaid() bool { return s.Err != nil || s.Answer == nil || s.Answer == int64(0) }
