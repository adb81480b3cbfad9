package redlock

// This file removes leftovers that nobody waits for: votes of rounds that were lost, places in queues, releases that a
// server did not answer. Each node has a list of such leftovers and, while the list is not empty, one goroutine that
// removes them, so that a dead server costs the same whether one hold is released beside it or a million.
//
// A leftover needs no order among connections: the line of a node is Ordered (internal/rediswire), and the entry to
// remove was sent on it before.

import (
	"context"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// leftover is a possible entry of an ended try or hold on a node.
type leftover struct {
	keys  redisscript.Keys
	start string
	// Until when the name stays closed for a minimum hold; zero: not at all.
	closed backend.Instant
	// The time when the server has expired it, or the driver stops trying. Set by leave.
	until backend.Instant
}

const (
	// maxLeftovers bounds the leftovers of one node; further ones end with their TTL.
	maxLeftovers = 10000
	// leftoverTime bounds how long the removal of one is tried; likewise.
	leftoverTime = 10 * time.Second
)

// leave has n remove l in the background, with retries while the node does not answer. The goroutine belongs to
// the gate: if the driver is closed to it, the leftover ends with its TTL.
func (n *node) leave(l leftover) {
	n.leftoverMu.Lock()
	defer n.leftoverMu.Unlock()
	if l.until.IsZero() {
		l.until = n.d.clock.Now().Add(min(n.d.o.MaxTTL, leftoverTime))
	}
	// A leftover beyond the bound expires on the server.
	if len(n.leftovers) >= maxLeftovers {
		return
	}
	n.leftovers = append(n.leftovers, l)
	if !n.tidying {
		n.tidying = n.d.gate.Go(n.tidy)
	}
}

// tidy removes a node's leftovers: all that are due in one pipeline, then new and failed ones, with pauses that double
// to 640 ms. It ends when the list is empty, so that tidying is set and cleared under leftoverMu together with the
// list. While the driver closes, it tries once more.
func (n *node) tidy(ctx context.Context) {
	d := n.d
	closing, free := d.gate.Bind(ctx)
	defer free()
	for failed := 0; ; {
		n.leftoverMu.Lock()
		now := d.clock.Now()
		// Expired leftovers need no removal.
		due := slices.DeleteFunc(n.leftovers, func(l leftover) bool { return l.until < now })
		n.leftovers = nil
		// Under the lock under which leave looks at tidying: no leftover is added that nobody sees.
		if len(due) == 0 || failed > 0 && d.gate.Closed() || ctx.Err() != nil {
			n.tidying = false
			n.leftoverMu.Unlock()
			return
		}
		n.leftoverMu.Unlock()

		sink := make(chan *step, len(due))
		steps := make([]*step, len(due))
		// Quit names the try, so that a second removal does not affect a later one.
		for i, l := range due {
			steps[i] = n.stepFor(sink, l.keys, redisscript.Quit, l.start, redisconn.ClosedFor(l.closed, now))
			steps[i].index = i
		}
		var again []leftover
		kept := 0
		d.poll(ctx, steps, sink, d.nodeTimeout(d.o.MaxTTL), func(s *step, f *redisconn.Failure) bool {
			// After a permanent failure the leftover is dropped, and ends with its TTL.
			if f != nil {
				kept++
				if !f.Fatal {
					again = append(again, due[s.index])
				}
			}
			return false
		})
		n.leftoverMu.Lock()
		// Failed ones come first: newer ones stand behind them on the connection too.
		n.leftovers = append(again, n.leftovers...)
		n.leftoverMu.Unlock()
		if kept == 0 {
			failed = 0
			continue
		}
		// A pause for all leftovers of the node and not for each: the others would meet the same fault.
		failed++
		// Close cuts the pause short, and waits for this goroutine; the beginning of the loop sees it.
		redisconn.Pause(closing, failed)
	}
}
