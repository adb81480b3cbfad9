package redlock

// This file is what travels to a node and back: a rediswire.Step with the node and the sink that it belongs to. A step
// is made for one exchange and never used again, so that a late answer can only reach the channel of the call that
// asked.

import (
	"sync/atomic"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/rediswire"
)

// step is one step for one node. Until it enters its sink it belongs to the node's line.
type step struct {
	rediswire.Step
	// Of the node, or in a renewal of the grant and the node.
	index int
	node  *node
	// Noted by poll, so that it knows which are silent.
	answered bool
	// It enters when it has ended, and there is room for it: the line must not block.
	sink chan<- *step

	// unwatched is set on a release whose caller does not wait for it any more: if it fails it becomes a leftover.
	unwatched atomic.Bool
	// Of a release: until when the name stays closed; zero: not at all.
	closed backend.Instant
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

// Ended is called by the line, once, when the step was answered or has failed. It must not block, as it runs on the
// goroutine that reads the connection: sink has room, and a leftover is only put on a list.
func (s *step) Ended() {
	s.sink <- s
	// In this order, so that one side sees the other: see ending.unwatch.
	if s.unwatched.Load() && s.incomplete() {
		s.node.leave(leftover{keys: s.Keys, start: s.Args[0], closed: s.closed})
	}
}

// incomplete reports whether a release that has ended may have left something: it failed, or has to be asked of the
// script, or met nothing where a vote may have been sent again behind it because the server had forgotten the script.
func (s *step) incomplete() bool { return s.Err != nil || s.Answer == nil || s.Answer == int64(0) }
