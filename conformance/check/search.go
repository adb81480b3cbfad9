package check

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/fencelock/fencelock/backend"
)

// search looks, for each name, for an order in which a lock could have executed all operations. It skips names for
// which a scan has already shown that no such order exists.
func (p *Report) search(ctx context.Context, r *run) {
	begin := time.Now()
	for _, n := range r.names {
		if p.illegal(n.name) {
			continue
		}
		for _, part := range r.parts(n) {
			p.Searched += len(part.ops)
			left := time.Until(begin.Add(r.rules.Timeout))
			if end, ok := ctx.Deadline(); ok {
				left = min(left, time.Until(end))
			}
			verdict := porcupine.Unknown
			if left > 0 && ctx.Err() == nil {
				verdict = porcupine.CheckOperationsTimeout(part.model(), part.ops, left)
			}
			switch verdict {
			case porcupine.Illegal:
				p.found(Illegal, n.name, backend.Instant(part.ops[0].Call),
					"no lock could have done what happened to %q from %v to %v",
					n.name, r.since(backend.Instant(part.ops[0].Call)), r.since(backend.Instant(part.end())))
			case porcupine.Unknown:
				p.found(Undecided, n.name, backend.Instant(part.ops[0].Call),
					"whether a lock could have done what happened to %q was not decided in %v", n.name, r.rules.Timeout)
			default:
				continue
			}
			break // one illegal part is enough
		}
	}
	p.Search = time.Since(begin)
}

// illegal reports whether a violation excludes every order for a name.
func (p *Report) illegal(name string) bool {
	return slices.ContainsFunc(p.Violations, func(v Violation) bool {
		switch v.Kind {
		case Early, TokenOrder, TokenTwice, Forgotten:
			return v.Name == name
		}
		return false
	})
}

// part is a part of a name's history. No operation is in flight at its beginning or end.
type part struct {
	ops   []porcupine.Operation
	holds []*hold
	first state
	rules Rules
}

func (q *part) model() porcupine.Model { return model(q.holds, q.rules.Fencing, q.first) }

func (q *part) end() int64 {
	var end int64
	for _, op := range q.ops {
		if op.Return < int64(never) {
			end = max(end, op.Return)
		}
	}
	return end
}

// parts divides a name's history wherever no operation is in flight. The state there is known: the holds that were
// acquired before that point and end after it.
//
// One search over the whole history would take quadratic memory for a legal history, and practically unlimited time
// for an illegal one.
func (r *run) parts(n *name) []*part {
	ops := r.operations(n)
	slices.SortStableFunc(ops, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
	var parts []*part
	now, begin, until := state{}, 0, int64(0)
	for i, op := range ops {
		if i > begin && op.Call > until {
			q := &part{ops: ops[begin:i:i], holds: n.holds, first: now, rules: r.rules}
			parts = append(parts, q)
			now, begin = q.last(), i
		}
		until = max(until, op.Return)
	}
	if begin < len(ops) {
		parts = append(parts, &part{ops: ops[begin:], holds: n.holds, first: now, rules: r.rules})
	}
	return parts
}

// last returns the state after all operations of a part.
func (q *part) last() state {
	s := q.first
	var held []int
	for _, op := range q.ops {
		if in := op.Input.(input); in.do == take {
			held = append(held, in.hold)
			s.top = max(s.top, q.holds[in.hold].token.Order())
		}
	}
	s.holders = holders(append(s.all(), held...))
	for _, op := range q.ops {
		if in := op.Input.(input); in.do == give || in.do == expire {
			s = s.without(in.hold)
		}
	}
	return s
}

// operations returns the operations of the model for a name's history. Their intervals are as short as the history
// allows, since shorter intervals leave fewer orders to search.
func (r *run) operations(n *name) []porcupine.Operation {
	clients := map[string]int{} // numbers
	id := func(client string) int {
		if _, ok := clients[client]; !ok {
			clients[client] = len(clients)
		}
		return clients[client]
	}
	gone := goneBy(n.holds)
	var ops []porcupine.Operation
	add := func(client string, from, to backend.Instant, in input) {
		ops = append(ops, porcupine.Operation{
			ClientId: id(client), Input: in, Call: int64(from), Return: int64(max(from, to)),
		})
	}
	after := notBefore(n.holds)
	for i, h := range n.holds {
		add(h.client, after[i], h.ret, input{do: take, hold: i})
		if h.forced == never {
			for _, again := range h.grants[1:] {
				add(h.client, again.At, again.ret, input{do: prove, hold: i})
			}
			for _, seen := range h.proofs {
				add(h.client, seen.sent, seen.seen, input{do: prove, hold: i})
			}
		}
		ends := min(h.expires, h.forced) // or later, unless released before
		confirmed := h.relOut == OK && h.relRet <= ends
		if h.relCall != never {
			to := max(h.relCall, gone[i])
			if h.relOut != Unknown && h.relOut != "" {
				to = min(to, h.relRet)
			}
			add(h.client, h.relCall, to, input{do: give, hold: i, held: confirmed})
		}
		if !confirmed {
			to := gone[i]
			if h.relOut == OK || h.relOut == Gone {
				to = min(to, h.relRet)
			}
			add(h.client+" expires", ends, to, input{do: expire, hold: i})
		}
	}
	for _, c := range n.calls {
		if c.Op == OpAsk && c.out == OK {
			add(c.Client, c.At, c.ret, input{do: ask, seen: c.seen})
		}
	}
	return ops
}

// goneBy returns, for each hold, the instant by which it must have ended: the first return of a later grant that it
// would have excluded, alone or with the holds that were certainly kept. An operation that ends the hold, or finds it
// ended, can be assumed to have happened by then.
func goneBy(holds []*hold) []backend.Instant {
	gone := make([]backend.Instant, len(holds))
	returns := make([]int, len(holds))
	for i := range holds {
		gone[i], returns[i] = never, i
	}
	slices.SortStableFunc(returns, func(a, b int) int { return cmp.Compare(holds[a].ret, holds[b].ret) })
	var before []int // holds that were granted before the call of g, and may go on
	var kept []*hold // the holds among these that were certainly kept until g returned
	for _, g := range holds {
		for len(returns) > 0 && holds[returns[0]].ret < g.call {
			before = append(before, returns[0])
			returns = returns[1:]
		}
		kept = kept[:0]
		before = slices.DeleteFunc(before, func(i int) bool {
			h := holds[i]
			if h.keeps() > g.ret {
				kept = append(kept, h)
			}
			return gone[i] < g.call || h.relOut == OK && h.relRet < g.call
		})
		for _, i := range before {
			if h := holds[i]; h.keeps() <= g.ret && exceeds(g, append(kept, h)) != nil {
				gone[i] = min(gone[i], g.ret)
			}
		}
	}
	return gone
}

// notBefore returns, for each hold, an instant before which it cannot have been granted, since another hold excluded
// it. Granted earlier, it would have had to exist beside the other hold until its acquire returned.
func notBefore(holds []*hold) []backend.Instant {
	ends := slices.Clone(holds)
	slices.SortStableFunc(ends, func(a, b *hold) int { return cmp.Compare(a.keeps(), b.keeps()) })
	after := make([]backend.Instant, len(holds))
	for i, h := range holds {
		after[i] = h.call
		if h.keeps() < h.ret {
			continue
		}
		last, _ := slices.BinarySearchFunc(ends, h.ret+1, func(o *hold, at backend.Instant) int {
			return cmp.Compare(o.keeps(), at)
		})
		for _, o := range slices.Backward(ends[:last]) {
			if o.keeps() <= h.call {
				break
			}
			if o != h && conflicts(h, o) && o.ret <= o.keeps() {
				after[i] = o.keeps()
				break
			}
		}
	}
	return after
}
