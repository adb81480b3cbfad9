package redlock

import (
	"context"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// stepFor writes one step for a node. Its sink must have room for it.
func (n *node) stepFor(sink chan<- *step, keys redisscript.Keys, code string, args ...string) *step {
	return &step{code: code, keys: keys, args: args, node: n, sink: sink}
}

// toAll writes the same step for every node, with the node's index. The sink has room for all.
func (d *Driver) toAll(keys redisscript.Keys, code string, args ...string) (steps []*step, sink chan *step) {
	sink = make(chan *step, len(d.nodes))
	all := make([]step, len(d.nodes))
	steps = make([]*step, len(d.nodes))
	for i, n := range d.nodes {
		s := &all[i]
		s.code, s.keys, s.args, s.node, s.index, s.sink = code, keys, args, n, i, sink
		steps[i] = s
	}
	return steps, sink
}

// poll asks all nodes the same and passes on each answer as it comes, until each returns true, all have answered, the
// nodes' time is over, or ctx ends. Steps without an answer by then go on by themselves: a release must arrive although
// nobody waits for it. silent are those steps which ran out of time.
func (d *Driver) poll(ctx context.Context, steps []*step, sink <-chan *step, patience time.Duration,
	each func(*step) (done bool)) (silent []*step) {
	began := time.Now()
	deadline := began.Add(patience)
	for _, s := range steps {
		s.deadline = deadline
	}
	byNode(steps, func(n *node, group []*step) { n.submit(group...) })
	t := time.NewTimer(patience)
	defer t.Stop()
	var answered int
	for answered < len(steps) {
		select {
		case s := <-sink:
			answered++
			s.node = nil // marks it as answered; its node is known by index
			if each(s) {
				return nil
			}
			continue
		case <-t.C:
		case <-ctx.Done():
		}
		break
	}
	if answered == len(steps) {
		return nil
	}
	late := time.Since(began) >= patience
	for _, s := range steps {
		if s.node == nil {
			continue
		}
		if late {
			s.node.sick.Store(true)
		}
		silent = append(silent, s)
	}
	return silent
}

// byNode calls act once for each node, with its steps in order. Steps of one node are neighbours.
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
// zero is the answer if there are too few.
func nth(proved []backend.Instant, n int) backend.Instant {
	sorted := slices.Clone(proved)
	slices.Sort(sorted)
	return sorted[len(sorted)-n]
}
