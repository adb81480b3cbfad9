package redlock

// This file is a step on its way to a node and back: a rediswire.Step with its node and its sink. A step is made for
// one exchange and never reused, so that a late answer can only reach the channel of the same call.

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

	// unwatched is set on a release that its caller no longer waits for: if it fails it becomes a leftover.
	unwatched atomic.Bool
	// Of a release: until when the name stays closed; zero: not at all.
	closed backend.Instant
}

// submit sends steps, in the order of submission: on a node, the release of a hold must not overtake its acquire, even
// if nobody awaited the acquire's answer. Each enters its sink in the end, unless it was dropped.
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

// incomplete reports whether a release that has ended may have left something: it failed, or needs the whole script, or
// found no hold while a vote may have been repeated behind it because the server had forgotten the script.
func (s *step) incomplete() bool { return s.Err != nil || s.Answer == nil || s.Answer == int64(0) }
