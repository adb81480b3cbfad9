package redlock

// This file gives back what nobody waits for: votes of rounds that were lost, places in queues, releases that a server
// did not answer. Each node has a list of such leftovers and, while the list is not empty, one goroutine that removes
// them, so that a dead server costs the same whether one hold is released beside it or a million.
//
// A leftover needs no order among connections: the line of a node is Ordered (internal/rediswire), and what is removed
// was sent on it before.

import (
	"context"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// leftover is what a node may still keep of a try or hold that has ended.
type leftover struct {
	keys  redisscript.Keys
	start string
	// Until when the name stays closed for a minimum hold; zero: not at all.
	closed backend.Instant
	// When the server has forgotten it by itself, or the driver gives up. Set by leave.
	until backend.Instant
}

const (
	// maxLeftovers bounds the leftovers of one node; what is more ends with its TTL.
	maxLeftovers = 10000
	// leftoverTime bounds how long the removal of one is tried; likewise.
	leftoverTime = 10 * time.Second
)

// leave has n give back l in the background, again and again while the node does not answer. The goroutine belongs to
// the gate: if the driver is closed to it, the leftover ends with its TTL.
func (n *node) leave(l leftover) {
	n.leftoverMu.Lock()
	defer n.leftoverMu.Unlock()
	if l.until.IsZero() {
		l.until = n.d.clock.Now().Add(min(n.d.o.MaxTTL, leftoverTime))
	}
	// The server forgets it by itself when its TTL is over.
	if len(n.leftovers) >= maxLeftovers {
		return
	}
	n.leftovers = append(n.leftovers, l)
	if !n.tidying {
		n.tidying = n.d.gate.Go(n.tidy)
	}
}

// tidy removes what is left on a node: all that is due in one pipeline, then what came meanwhile or failed, with pauses
// that double to 640 ms. It ends when nothing is left, so that tidying is set and cleared under leftoverMu together
// with the list. While closing it tries once more and not for ever.
func (n *node) tidy(ctx context.Context) {
	d := n.d
	closing, free := d.gate.Bind(ctx)
	defer free()
	for failed := 0; ; {
		n.leftoverMu.Lock()
		now := d.clock.Now()
		// What has run out by itself needs no removal any more.
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
		// Quit names the try, so that removing twice takes nothing from a later one.
		for i, l := range due {
			steps[i] = n.stepFor(sink, l.keys, redisscript.Quit, l.start, redisconn.ClosedFor(l.closed, now))
			steps[i].index = i
		}
		var again []leftover
		kept := 0
		d.poll(ctx, steps, sink, d.nodeTimeout(d.o.MaxTTL), func(s *step, f *redisconn.Failure) bool {
			// What trying again cannot help is given up: it ends with its TTL.
			if f != nil {
				kept++
				if !f.Fatal {
					again = append(again, due[s.index])
				}
			}
			return false
		})
		n.leftoverMu.Lock()
		// Those that failed come first: what is newer stands behind them on the connection too.
		n.leftovers = append(again, n.leftovers...)
		n.leftoverMu.Unlock()
		if kept == 0 {
			failed = 0
			continue
		}
		// A pause for all leftovers of the node and not for each: what one of them met, the others would.
		failed++
		// Close cuts the pause short, and waits for this goroutine; the beginning of the loop sees it.
		redisconn.Pause(closing, failed)
	}
}
