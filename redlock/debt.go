package redlock

// This file gives back what nobody waits for: votes of rounds that were lost, places in queues, releases that a server
// did not answer. Each node has a list of such debts and, while the list is not empty, one goroutine that pays them, so
// that a dead server costs the same whether one hold is released beside it or a million.
//
// A debt needs no order among connections: the line of a node is Ordered (internal/rediswire), and what a debt removes
// was sent on it before.

import (
	"context"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// debt is what a node may still keep of an attempt or hold that has ended.
type debt struct {
	keys  redisscript.Keys
	start string
	// Until when the name stays closed for a minimum hold; zero: not at all.
	closed backend.Instant
	// When the server has forgotten it by itself, or the driver gives up. Set by owe.
	until backend.Instant
}

const (
	// maxDebts bounds the debts of one node; what is more ends with its TTL.
	maxDebts = 10000
	// maxOwed bounds how long one is tried; likewise.
	maxOwed = 10 * time.Second
)

// owe has n give back d in the background, again and again while the node does not answer. The goroutine belongs to the
// gate: if the driver is closed to it, the debt ends with its TTL.
func (n *node) owe(d debt) {
	n.debtMu.Lock()
	defer n.debtMu.Unlock()
	if d.until.IsZero() {
		d.until = n.d.clock.Now().Add(min(n.d.o.MaxTTL, maxOwed))
	}
	// The server forgets it by itself when its TTL is over.
	if len(n.debts) >= maxDebts {
		return
	}
	n.debts = append(n.debts, d)
	if !n.settling {
		n.settling = n.d.gate.Go(n.settle)
	}
}

// settle pays a node's debts: all that are due in one pipeline, then those that came meanwhile or failed, with pauses
// that double to 640 ms. It ends when nothing is owed, so that settling is set and cleared under debtMu together with
// the list. While closing it tries once more and not for ever.
func (n *node) settle(ctx context.Context) {
	d := n.d
	for failed := 0; ; {
		n.debtMu.Lock()
		now := d.clock.Now()
		// What has run out by itself is nobody's debt any more.
		due := slices.DeleteFunc(n.debts, func(x debt) bool { return x.until < now })
		n.debts = nil
		// Under the lock under which owe looks at settling: no debt is added that nobody sees.
		if len(due) == 0 || failed > 0 && d.gate.Closed() || ctx.Err() != nil {
			n.settling = false
			n.debtMu.Unlock()
			return
		}
		n.debtMu.Unlock()

		sink := make(chan *step, len(due))
		steps := make([]*step, len(due))
		// Quit names the attempt, so that paying twice takes nothing from a later one.
		for i, x := range due {
			steps[i] = n.stepFor(sink, x.keys, redisscript.Quit, x.start, redisconn.ClosedFor(x.closed, now))
			steps[i].index = i
		}
		var again []debt
		unpaid := 0
		silent := d.poll(ctx, steps, sink, d.nodeTimeout(d.o.MaxTTL), func(s *step) bool {
			// What trying again cannot help is given up: it ends with its TTL.
			if s.Err != nil {
				unpaid++
				if !s.Err.Fatal {
					again = append(again, due[s.index])
				}
			}
			return false
		})
		for _, s := range silent {
			unpaid++
			again = append(again, due[s.index])
			s.Drop()
		}
		n.debtMu.Lock()
		// Those that failed come first: what is newer stands behind them on the connection too.
		n.debts = append(again, n.debts...)
		n.debtMu.Unlock()
		if unpaid == 0 {
			failed = 0
			continue
		}
		// A pause for all debts of the node and not for each: what one of them met, the others would.
		failed++
		// The pause is cut short by Close, which waits for this goroutine.
		t := time.NewTimer(10 * time.Millisecond << min(failed, 6))
		select {
		case <-t.C:
		case <-d.gate.Closing().Done():
		case <-ctx.Done():
		}
		t.Stop()
	}
}
