package check

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// scan checks the rules that need no search, each in one pass over the history.
func (p *Report) scan(r *run) {
	p.count(r)
	for _, n := range r.names {
		p.overlaps(r, n)
		p.early(r, n)
		p.losses(n)
		if r.rules.Fencing {
			p.tokens(r, n)
		}
		p.asked(n)
		p.idle(r, n)
	}
	p.stuck(r)
	p.recoveries(r)
}

func (p *Report) found(kind Kind, n string, at backend.Instant, format string, args ...any) {
	p.Violations = append(p.Violations, Violation{Kind: kind, Name: n, At: at, Text: fmt.Sprintf(format, args...)})
}

func (p *Report) count(r *run) {
	p.Operations, p.Renewals, p.Faults, p.Duration = len(r.calls), r.renewals, r.faults, r.end.Sub(r.begin)
	for _, c := range r.calls {
		switch c.out {
		case Refused:
			p.Refusals++
		case Unknown:
			p.Unknowns++
		}
	}
	for _, n := range r.names {
		p.Grants += len(n.holds)
	}
}

// overlaps finds conflicting holds of a name that were valid at the same time.
func (p *Report) overlaps(r *run, n *name) {
	var open []*hold // holds that may still be valid
	doubled := map[*hold]bool{}
	for _, h := range believed(n.holds) {
		open = slices.DeleteFunc(open, func(o *hold) bool { return o.end <= h.begin })
		rest := slices.DeleteFunc(slices.Clone(open), func(o *hold) bool { return o.takenBefore(h.begin, r.ttl()) })
		if other := exceeds(h, rest); other != nil {
			overlap := together(h, rest)
			p.Overlaps++
			p.Overlapped = max(p.Overlapped, overlap)
			p.Overrun = max(p.Overrun, other.end.Sub(h.begin))
			doubled[other] = true
			p.found(Overlap, n.name, h.begin, "%v began while %v went on: both for %v", h, other, overlap)
		}
		open = append(open, h)
	}
	p.Doubled += len(doubled)
}

// believed returns the holds that were valid at any time, ordered by the beginning of their validity.
func believed(holds []*hold) []*hold {
	all := slices.DeleteFunc(slices.Clone(holds), func(h *hold) bool { return h.end <= h.begin })
	slices.SortStableFunc(all, func(a, b *hold) int { return cmp.Compare(a.begin, b.begin) })
	return all
}

// together returns the time for which h and others, which were all valid when it began, exceeded the limit.
func together(h *hold, others []*hold) time.Duration {
	others = slices.Clone(others)
	slices.SortFunc(others, func(a, b *hold) int { return cmp.Compare(a.end, b.end) })
	until := h.begin
	for len(others) > 0 && exceeds(h, others) != nil {
		until = min(h.end, others[0].end)
		others = others[1:]
	}
	return until.Sub(h.begin)
}

// early finds grants that returned while the service had to keep an earlier conflicting hold.
func (p *Report) early(r *run, n *name) {
	returns := slices.Clone(n.holds)
	slices.SortStableFunc(returns, func(a, b *hold) int { return cmp.Compare(a.ret, b.ret) })
	var kept []*hold
	for _, h := range n.holds { // by call
		for len(returns) > 0 && returns[0].ret < h.call {
			kept = append(kept, returns[0])
			returns = returns[1:]
		}
		kept = slices.DeleteFunc(kept, func(o *hold) bool { return o.keeps() <= h.call })
		beside := slices.DeleteFunc(slices.Clone(kept), func(o *hold) bool { return o.keeps() <= h.ret })
		if other := exceeds(h, beside); other != nil {
			p.found(Early, n.name, h.ret, "%v was granted at %v, although %v was kept until %s",
				h, r.since(h.ret), other, instant(other.keeps(), h.ret))
		}
	}
}

// instant returns the time from now until at, as text.
func instant(at, now backend.Instant) string {
	if at == never {
		return "a release that never came"
	}
	return fmt.Sprintf("%v later", at.Sub(now))
}

// losses checks the notifications of holders, and the holds that followed.
func (p *Report) losses(n *name) {
	order := slices.Clone(n.holds)
	slices.SortStableFunc(order, func(a, b *hold) int { return cmp.Compare(a.begin, b.begin) })
	for i, h := range order {
		if h.why != "" {
			if h.until != never {
				p.LateContext = max(p.LateContext, h.told.Sub(h.until))
			}
			if h.until != never && h.told < h.until && h.forced == never && h.why != string(backend.ReasonClosed) {
				p.found(EarlyLoss, n.name, h.told, "%v was notified of a loss %v before its deadline", h,
					h.until.Sub(h.told))
			}
		}
		if h.lost() {
			p.Losses++
		}
		rival := slices.IndexFunc(order[i+1:], func(o *hold) bool { return conflicts(h, o) })
		if rival < 0 {
			continue
		}
		next := order[i+1+rival]
		unreleased := h.why == "" && next.begin < min(h.relCall, h.killed)
		if !h.lost() && !unreleased {
			continue
		}
		if !h.lost() {
			p.Losses++ // without a notification
		}
		switch learnt := h.learnt(); {
		case learnt == never:
			p.NeverNotified++
		case learnt <= next.begin:
			p.NotifiedBefore++
		default:
			p.NotifiedAfter++
		}
		if h.begin < h.end && h.forced == never {
			margin := next.begin.Sub(h.end)
			if p.Margins == 0 || margin < p.Margin {
				p.Margin = margin
			}
			p.Margins++
		}
	}
}

// learnt returns the instant at which the holder of a lost hold was notified of the loss, possibly by its release.
func (h *hold) learnt() backend.Instant {
	switch {
	case h.told != never:
		return h.told
	case h.relOut == Gone:
		return h.relRet
	}
	return never
}

// tokens compares the tokens of a name: a grant must have a higher token than every grant that had returned before
// its call.
func (p *Report) tokens(r *run, n *name) {
	issued := map[uint64]*hold{}
	for _, h := range n.holds {
		if !h.token.Valid() || h.token.Exclusive() != (h.kind == backend.KindExclusive) {
			p.found(TokenMark, n.name, h.ret, "the token of %v does not fence what it holds", h)
		}
		if other := issued[h.token.Order()]; other != nil && h.token.Valid() {
			p.found(TokenTwice, n.name, h.ret, "%v has the token of %v", h, other)
		}
		issued[h.token.Order()] = h
	}
	returns := slices.Clone(n.holds)
	slices.SortStableFunc(returns, func(a, b *hold) int { return cmp.Compare(a.ret, b.ret) })
	var highest *hold // of the returned grants
	for _, h := range n.holds {
		for len(returns) > 0 && returns[0].ret < h.call {
			if r := returns[0]; highest == nil || r.token.Order() > highest.token.Order() {
				highest = r
			}
			returns = returns[1:]
		}
		if highest != nil && h.token.Order() < highest.token.Order() {
			p.found(TokenOrder, n.name, h.ret, "%v was asked for at %v, when the token %v had been granted",
				h, r.since(h.call), highest.token)
		}
	}
}

// asked compares the service's answers with the holds that it had to keep meanwhile.
func (p *Report) asked(n *name) {
	returns := slices.Clone(n.holds)
	slices.SortStableFunc(returns, func(a, b *hold) int { return cmp.Compare(a.ret, b.ret) })
	var kept []*hold
	for _, c := range n.calls { // by call
		if c.Op != OpAsk || c.out != OK {
			continue
		}
		for len(returns) > 0 && returns[0].ret < c.At {
			if returns[0].keeps() > c.At {
				kept = append(kept, returns[0])
			}
			returns = returns[1:]
		}
		kept = slices.DeleteFunc(kept, func(h *hold) bool { return h.keeps() <= c.At })
		for _, h := range kept {
			if h.token.Valid() && h.keeps() > c.ret && !slices.Contains(c.seen, h.token) {
				p.found(Forgotten, n.name, c.ret, "%v was promised, and the service knows of %v", h, c.seen)
			}
		}
	}
}

// stuck finds calls that did not end with their context.
func (p *Report) stuck(r *run) {
	if r.rules.Patience <= 0 {
		return
	}
	for _, c := range r.calls {
		switch {
		case c.gone:
		case c.ret == never:
			p.found(Stuck, c.Name, c.At, "%s of %q by %s, from %v, never returned", c.Op, c.Name, c.Client,
				r.since(c.At))
		case c.Until != 0 && c.ret.Sub(max(c.Until, c.At)) > r.rules.Patience:
			p.found(Stuck, c.Name, c.At, "%s of %q by %s, from %v, returned %v after its context's end",
				c.Op, c.Name, c.Client, r.since(c.At), c.ret.Sub(max(c.Until, c.At)))
		}
	}
}

// idle finds waits for free names without a fault.
func (p *Report) idle(r *run, n *name) {
	busy := slices.Clone(r.troubles)
	for _, h := range n.holds {
		busy = append(busy, span{h.ret, h.over(r)})
	}
	ttl := r.ttl()
	// The cleanup of an acquire of unknown outcome takes up to one TTL, and its leftover lives for one more. The outcome
	// was lost in a fault, or when the caller abandoned the call.
	for _, c := range n.calls {
		if c.out != Unknown || c.Op != OpAcquire && c.Op != OpTry {
			continue
		}
		end := c.ret
		if end == never && c.gone {
			end = r.killedAt(c)
		}
		if end != never {
			busy = append(busy, span{end, end.Add(2 * ttl)})
		}
		for _, t := range r.troubles {
			if t.from < end && t.to > c.At && t.to != never {
				busy = append(busy, span{t.from, t.to.Add(2 * ttl)})
			}
		}
	}
	slices.SortFunc(busy, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	free := gaps(busy)
	for _, c := range n.calls {
		if c.Op != OpAcquire || c.gone {
			continue
		}
		to := min(c.ret, r.end)
		if c.Until != 0 {
			to = min(to, max(c.Until, c.At))
		}
		first, _ := slices.BinarySearchFunc(free, c.At, func(g span, at backend.Instant) int {
			return cmp.Compare(g.to, at)
		})
		for _, g := range free[first:] {
			if g.from >= to {
				break
			}
			waited := min(g.to, to).Sub(max(g.from, c.At))
			p.Idle = max(p.Idle, waited)
			if r.rules.Recovery > 0 && waited > r.rules.Recovery {
				p.found(Stuck, n.name, max(g.from, c.At), "%q was free for %v, while %s waited for it from %v",
					n.name, waited, c.Client, r.since(c.At))
			}
		}
	}
}

// over returns the latest instant at which a hold excludes others.
func (h *hold) over(r *run) backend.Instant {
	switch {
	case h.relOut == OK:
		return h.relRet
	case h.relCall != never && h.relRet != never:
		return max(h.relRet, h.expiry()).Add(2 * r.ttl())
	case h.killed != never:
		return max(h.killed, h.expiry()).Add(r.ttl())
	case h.expires != never:
		return h.expires.Add(2 * r.ttl())
	}
	return never
}

// expiry returns the instant at which the hold expires or, if unknown, the beginning of its validity.
func (h *hold) expiry() backend.Instant {
	if h.expires == never {
		return h.begin
	}
	return h.expires
}

// gaps returns the gaps between sorted spans.
func gaps(busy []span) []span {
	var free []span
	at := backend.Instant(-1 << 62)
	for _, s := range busy {
		if s.from > at {
			free = append(free, span{at, s.from})
		}
		at = max(at, s.to)
	}
	if at < never {
		free = append(free, span{at, never})
	}
	return free
}

// recoveries measures the time from each end of the faults to the next grant.
func (p *Report) recoveries(r *run) {
	var begins []backend.Instant
	for _, n := range r.names {
		for _, h := range n.holds {
			begins = append(begins, h.begin)
		}
	}
	slices.Sort(begins)
	for _, at := range r.healed {
		p.Recoveries++
		took := r.end.Sub(at)
		i, _ := slices.BinarySearch(begins, at)
		if i < len(begins) {
			took = begins[i].Sub(at)
		}
		if i < len(begins) {
			p.Recovery = max(p.Recovery, took)
		}
		if r.rules.Recovery > 0 && took > r.rules.Recovery {
			p.found(Stuck, "", at, "all faults were over at %v and nothing was granted for %v", r.since(at), took)
		}
	}
}
