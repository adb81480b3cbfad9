package redlock

// This file is Renew: many grants at once, on all servers at once, each decided by its own majority.
//
// All steps of a call have one sink and one deadline, and the index of a step says which grant on which node it is for:
// grant × number of nodes + node. The call returns with the last decision, not with the last answer, so that one silent
// server does not delay the others. Confirmed holds are then written to the nodes that lack them.

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// renewal is one grant on its way through Renew.
type renewal struct {
	tally
	// By node: the instant before the renewal left that it has confirmed; zero without one.
	proved []backend.Instant
	// The nodes that lack the hold.
	lacking []*node
	// A majority has answered one way.
	decided bool
}

// Renew prolongs grants, and returns a result for each of them, in order: one script call per node for up to 128
// grants, all of a node's calls in one pipeline, all nodes concurrently. A grant is renewed when a majority has
// prolonged it, and lost (backend.ErrNotHeld, with its reason) when a majority says that it is not there; any other
// outcome is a fault, and no loss (ErrUnavailable, or ErrUnknown if some servers may have prolonged it). It never
// shortens a hold. It waits for unresponsive servers as long as the shortest TTL of the grants allows.
//
// A node that lacks a hold which a majority has just confirmed gets it back, as a new vote that waits in its queue
// like any other: the hold exists by its majority, and is safer with more votes. Without a majority no vote is
// created.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	answers := make([]backend.Renewal, len(grants))
	if len(grants) == 0 {
		return answers
	}
	if err := d.probe.Begin(ctx); err != nil {
		return redisconn.Unrenewed(ctx, driverName, grants, err)
	}
	defer d.gate.Leave()
	for _, g := range grants {
		d.sendLater(g.RequestID, "")
	}
	now := d.clock.Now()
	sink := make(chan *step, len(grants)*len(d.nodes))
	steps := make([]*step, 0, len(grants)*len(d.nodes))
	// One deadline for the whole call: the shortest of the grants decides.
	patience := d.nodeTimeout(grants[0].TTL)
	for _, g := range grants {
		patience = min(patience, d.nodeTimeout(g.TTL))
	}
	held := make([]renewal, len(grants))
	proved := make([]backend.Instant, len(grants)*len(d.nodes))
	for i := range held {
		held[i].proved = proved[i*len(d.nodes) : (i+1)*len(d.nodes) : (i+1)*len(d.nodes)]
	}
	// By node and not by grant, so that each node's steps are neighbours and leave together.
	for _, n := range d.nodes {
		for i, g := range grants {
			s := n.stepFor(sink, d.keys(g.Name), redisscript.Renew,
				redisconn.StartOf(g), redisscript.Millis(redisconn.PXOf(g, now)))
			s.index = i*len(d.nodes) + n.index
			if g.Incarnation == "" {
				s.Args[0] = "none" // no hold starts so
			}
			steps = append(steps, s)
		}
	}
	undecided := len(grants)
	d.poll(ctx, steps, sink, patience, func(s *step, f *redisconn.Failure) bool {
		h, n := &held[s.index/len(d.nodes)], s.index%len(d.nodes)
		yes := h.yes
		h.count(s, f)
		switch {
		case h.yes > yes:
			h.proved[n] = s.SentAt
		// It answered, and does not have the hold.
		case f == nil:
			h.lacking = append(h.lacking, d.nodes[n])
		}
		// The poll ends with the last decision, however many nodes do not answer.
		if !h.decided && (h.yes >= d.quorum || h.no >= d.quorum) {
			h.decided = true
			undecided--
		}
		return undecided == 0
	})
	for i, g := range grants {
		h := &held[i]
		switch {
		case h.yes >= d.quorum:
			answers[i] = backend.Renewal{SentAt: nth(h.proved, d.quorum), TTL: g.TTL}
			continue
		case h.no >= d.quorum:
			answers[i].Err = &backend.NotHeldError{Name: g.Name, Reason: redisconn.LossReason(g, d.clock.Now())}
		default:
			answers[i].Err = h.undecided(ctx)
		}
		answers[i].Err = redisconn.CallError(ctx, driverName, "renew", g.Name, answers[i].Err)
	}
	d.refill(grants, held)
	return answers
}

// refill writes a majority's holds to the nodes that lack them. Nobody waits for it: the lines keep a later release
// behind it. It asks by SET NX, so that a node which has given its vote to another request in the meantime keeps it
// there. The steps' answers go to a sink that nobody reads.
func (d *Driver) refill(grants []backend.Grant, held []renewal) {
	room := 0
	for i := range held {
		if held[i].yes >= d.quorum {
			room += len(held[i].lacking)
		}
	}
	// Every node has every hold, which is the rule.
	if room == 0 {
		return
	}
	sink := make(chan *step, room) // which nobody reads
	now := d.clock.Now()
	for i, g := range grants {
		if held[i].yes < d.quorum {
			continue
		}
		for _, n := range held[i].lacking {
			s := n.stepFor(sink, d.keys(g.Name), redisscript.Set,
				redisconn.ValueOf(g), redisscript.Millis(redisconn.PXOf(g, now)))
			s.Deadline = time.Now().Add(d.nodeTimeout(g.TTL))
			n.ask(s)
		}
	}
}
