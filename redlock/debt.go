package redlock

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
	keys   redisscript.Keys
	start  string
	closed backend.Instant // until when the name stays closed; zero: not at all
	until  backend.Instant // when the server has forgotten it by itself
}

const (
	maxDebts = 10000            // of one node; what is more ends with its TTL
	maxOwed  = 10 * time.Second // likewise
)

// owe has n give back d in the background, again and again while the node does not answer. A node's debts share one
// goroutine, so that a dead node costs the same whether one hold is released beside it or a million.
func (n *node) owe(d debt) {
	n.debtMu.Lock()
	defer n.debtMu.Unlock()
	if d.until.IsZero() {
		d.until = n.d.clock.Now().Add(min(n.d.o.MaxTTL, maxOwed))
	}
	if len(n.debts) >= maxDebts {
		return
	}
	n.debts = append(n.debts, d)
	if !n.settling {
		n.settling = n.d.gate.Go(n.settle)
	}
}

// settle pays a node's debts. While closing it tries once.
func (n *node) settle(ctx context.Context) {
	d := n.d
	for failed := 0; ; {
		n.debtMu.Lock()
		now := d.clock.Now()
		due := slices.DeleteFunc(n.debts, func(x debt) bool { return x.until < now })
		n.debts = nil
		if len(due) == 0 || failed > 0 && d.gate.Closed() || ctx.Err() != nil {
			n.settling = false
			n.debtMu.Unlock()
			return
		}
		n.debtMu.Unlock()

		sink := make(chan *step, len(due))
		steps := make([]*step, len(due))
		for i, x := range due {
			steps[i] = n.stepFor(sink, x.keys, redisscript.Quit, x.start, redisconn.ClosedFor(x.closed, now))
			steps[i].index = i
		}
		var again []debt
		unpaid := 0
		silent := d.poll(ctx, steps, sink, d.nodeTimeout(d.o.MaxTTL), func(s *step) bool {
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
		n.debts = append(again, n.debts...)
		n.debtMu.Unlock()
		if unpaid == 0 {
			failed = 0
			continue
		}
		failed++
		t := time.NewTimer(10 * time.Millisecond << min(failed, 6))
		select {
		case <-t.C:
		case <-d.gate.Closing().Done():
		case <-ctx.Done():
		}
		t.Stop()
	}
}
