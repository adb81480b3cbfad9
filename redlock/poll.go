package redlock

// This file asks nodes and gathers their answers. A question is one step for each node, all with one sink, a channel
// with room for every answer: so a line never waits for the asker, and a caller that has left only costs the memory of
// its channel.
//
// poll is the plain form, the same question to all; vote.go and release.go ask in two waves and gather the answers
// themselves.

import (
	"context"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/rediswire"
)

// stepFor writes one step for a node. Its sink must have room for it.
func (n *node) stepFor(sink chan<- *step, keys redisscript.Keys, code string, args ...string) *step {
	return &step{Step: rediswire.Step{Code: code, Keys: keys, Args: args}, node: n, sink: sink}
}

// toAll writes the same step for every node, with the node's index. The sink has room for all.
func (d *Driver) toAll(keys redisscript.Keys, code string, args ...string) (steps []*step, sink chan *step) {
	sink = make(chan *step, len(d.nodes))
	return d.to(d.all(), sink, keys, code, args...), sink
}

// to writes the same step for some nodes, with the node's index.
func (d *Driver) to(nodes set, sink chan<- *step, keys redisscript.Keys, code string, args ...string) (steps []*step) {
	steps = make([]*step, 0, len(d.nodes))
	for i, n := range d.nodes {
		if nodes.has(i) {
			s := n.stepFor(sink, keys, code, args...)
			s.index = i
			steps = append(steps, s)
		}
	}
	return steps
}

// gather passes on each answer as it comes, until each returns true. It is false when patience or ctx is over before
// that. slow, unless nil, is called once, after hedge; if it returns true, gather ends. Everything runs on the caller's
// goroutine.
func gather(ctx context.Context, sink <-chan *step, hedge, patience time.Duration,
	each func(*step) (done bool), slow func() (done bool)) bool {
	// One timer serves both: for the hedge at first, then for the rest of the patience.
	wait := min(hedge, patience)
	t := time.NewTimer(wait)
	defer t.Stop()
	for {
		select {
		case s := <-sink:
			if each(s) {
				return true
			}
		// The hedge at first, and the end of patience the second time.
		case <-t.C:
			if slow == nil {
				return false
			}
			if slow() {
				return true
			}
			slow = nil
			t.Reset(patience - wait)
		case <-ctx.Done():
			return false
		}
	}
}

// poll asks all nodes the same and passes on the end of each step, on the caller's goroutine, until each returns true
// or all have ended; steps without an answer then continue in the background. When the nodes' time is over, or ctx
// ends, the steps without an answer are taken back where possible, and passed on with a failure that says whether a
// node
// may still run them. Their nodes count as sick if the whole patience has passed.
func (d *Driver) poll(ctx context.Context, steps []*step, sink <-chan *step, patience time.Duration,
	each func(*step, *redisconn.Failure) (done bool)) {
	began := time.Now()
	deadline := began.Add(patience)
	for _, s := range steps {
		s.Deadline = deadline
	}
	byNode(steps, func(n *node, group []*step) { n.ask(group...) })
	answered := 0
	if gather(ctx, sink, patience, patience, func(s *step) bool {
		answered++
		s.answered = true
		return each(s, s.Err) || answered == len(steps)
	}, nil) {
		return
	}
	// If the caller left early, the nodes may be well.
	late := time.Since(began) >= patience
	for _, s := range steps {
		if s.answered {
			continue
		}
		if late {
			s.node.sick.Store(true)
		}
		each(s, &redisconn.Failure{Cause: errSilent, Sent: !s.Drop()})
	}
}

// byNode calls act once for each node, with its steps in order, so that they leave in one piece. Steps of one node are
// neighbours: callers that ask many things order them so, which needs no map here.
func byNode(steps []*step, act func(*node, []*step)) {
	for len(steps) > 0 {
		n := steps[0].node
		end := slices.IndexFunc(steps, func(s *step) bool { return s.node != n })
		if end < 0 {
			end = len(steps)
		}
		act(n, steps[:end])
		steps = steps[end:]
	}
}

// nth returns the instant from which n of the given ones are proved: the n-th newest. Zero instants do not count, and
// zero is the answer if there are too few. The n-th newest and not the oldest: a majority is enough, and the votes
// beyond it may be as old as they like.
func nth(proved []backend.Instant, n int) backend.Instant {
	sorted := slices.Clone(proved)
	slices.Sort(sorted)
	return sorted[len(sorted)-n]
}
