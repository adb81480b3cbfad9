package simulation

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/check"
	"github.com/fencelock/fencelock/fencing"
)

// hold is one lease as its holder saw it, in the time of the service, which is the time of the world.
type hold struct {
	node    int
	name    string
	kind    backend.Kind
	permits int
	limit   int
	token   fencing.Token
	lease   *fencelock.Lease
	checked *check.Held // nil in worlds without a history

	// The following fields are protected by record.mu.
	call     time.Duration // Acquire was called
	begin    time.Duration // Acquire had returned
	end      time.Duration // the instant until which the holder relied on it
	over     bool          // end is known
	released time.Duration // the instant at which that became known, from which it may be released
	deadline time.Duration // the lease's deadline at the end
	told     time.Duration // the lease's context had ended by a loss; zero if it never did
	reason   backend.Reason
}

// event is one entry of the log.
type event struct {
	at     time.Duration
	who    int // the client; -1 - client: its core; weather
	what   string
	name   string
	token  fencing.Token
	answer string
}

const weather = -1000

// record is the history of one world.
type record struct {
	w *world

	mu      sync.Mutex // protects the following fields
	holds   []*hold
	taken   map[fencing.Token]time.Duration // the times at which the service ended holds
	events  []event
	found   []string // violations
	closest time.Duration

	operations, renewals, losses, refused, faults int
}

func (r *record) operation() {
	r.mu.Lock()
	r.operations++
	r.mu.Unlock()
}

func (r *record) note(e event) { r.noteAt(r.w.now(), e) }

// trace notes a message, in a traced world.
func (r *record) trace(n *node, m message, what string) {
	if r.w.traced {
		r.note(event{
			who: -1 - n.id, what: m.call + " " + what, name: m.name, answer: fmt.Sprintf("request %d", m.number),
		})
	}
}

func (r *record) noteAt(at time.Duration, e event) {
	e.at = at
	if !r.w.logged {
		return
	}
	r.mu.Lock()
	r.events = append(r.events, e)
	r.mu.Unlock()
}

// violation records a violated promise.
func (r *record) violation(format string, args ...any) {
	at := r.w.now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.found = append(r.found, fmt.Sprintf("%v: %s", at, fmt.Sprintf(format, args...)))
}

// granted begins a hold.
func (r *record) granted(h *hold) {
	now := r.w.now()
	r.mu.Lock()
	h.begin = now
	r.holds = append(r.holds, h)
	r.mu.Unlock()
}

// toldOf notes that the context of h's lease ended by a loss.
func (r *record) toldOf(h *hold, reason backend.Reason) {
	now := r.w.now()
	r.mu.Lock()
	h.told, h.reason = now, reason
	r.mu.Unlock()
	if reason == backend.ReasonExpired {
		now = r.w.expired(h)
	}
	r.noteAt(now, event{who: h.node, what: "told", name: h.name, token: h.token, answer: string(reason)})
}

// ended ends a hold: its holder is about to release it, or has found it lost.
func (r *record) ended(h *hold) {
	n := r.w.nodes[h.node]
	n.ends(h.token)
	c := n.clock
	now := r.w.now()
	left := c.real(time.Until(h.lease.Deadline()))
	r.mu.Lock()
	defer r.mu.Unlock()
	if !h.over {
		h.over, h.end, h.released, h.deadline = true, now, now, now+left
	}
}

// took notes that the service ends these holds now, even if their holders still rely on them.
func (r *record) took(info backend.State) {
	now := r.w.now()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range info.Holders {
		r.taken[h.Token] = now
	}
}

func (r *record) wasTaken(t fencing.Token) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, taken := r.taken[t]
	return taken
}

// stale counts a write that was refused.
func (r *record) stale() {
	r.mu.Lock()
	r.refused++
	r.mu.Unlock()
}

// verify checks the whole history and returns the violations. All holds must have ended.
func (r *record) verify() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closest = time.Duration(1<<63 - 1)
	byName := map[string][]*hold{}
	for _, h := range r.holds {
		byName[h.name] = append(byName[h.name], h)
	}
	for _, name := range r.w.names {
		r.beliefs(byName[name.text])
		r.tokens(byName[name.text])
	}
	return r.found
}

// beliefs checks that no two holders rely on holds that exclude each other.
func (r *record) beliefs(holds []*hold) {
	slices.SortStableFunc(holds, func(a, b *hold) int { return cmp.Compare(a.begin, b.begin) })
	var open, past []*hold
	for _, h := range holds {
		if !h.over {
			r.found = append(r.found, fmt.Sprintf("%v has no end", h))
			continue
		}
		taken, away := r.taken[h.token]
		switch {
		case h.told != 0:
			// A holder checks the context, which may end later than the deadline, by a timer's slack.
			h.end = min(h.end, h.told)
			if h.reason == backend.ReasonExpired && h.told > h.deadline+10*time.Millisecond {
				r.found = append(r.found, fmt.Sprintf("%v was notified %v after its deadline", h, h.told-h.deadline))
			}
			if !away && h.reason != backend.ReasonExpired && h.reason != backend.ReasonClosed {
				r.found = append(r.found, fmt.Sprintf("%v was lost, and nobody took it: %s", h, h.reason))
			}
		case h.end > h.deadline+10*time.Millisecond:
			r.found = append(r.found, fmt.Sprintf("%v was never notified", h))
		}
		if away {
			if longest := 3 * r.w.ttl; h.end > taken+longest {
				r.found = append(r.found, fmt.Sprintf("%v was taken away at %v, and is still believed in", h, taken))
			}
			h.end = min(h.end, taken)
		}
		if h.end <= h.begin {
			continue // it ended before its caller could rely on it
		}
		for i := 0; i < len(open); {
			o := open[i]
			if o.end > h.begin {
				i++
				continue
			}
			open = slices.Delete(open, i, i+1)
			past = append(past, o)
		}
		for _, o := range past {
			_, away := r.taken[o.token]
			if o.reason == backend.ReasonExpired && o.released > h.begin && !away && excludes(o, h) {
				r.closest = min(r.closest, h.begin-o.told)
			}
		}
		past = past[:0]
		permits := h.permits
		for _, o := range open {
			permits += o.permits
			if excludes(o, h) {
				r.found = append(r.found,
					fmt.Sprintf("%v began while %v was believed in, for another %v", h, o, o.end-h.begin))
			}
		}
		if h.kind == backend.KindPermits && permits > h.limit {
			r.found = append(r.found, fmt.Sprintf("%v: %d of %d permits are believed in", h, permits, h.limit))
		}
		open = append(open, h)
	}
}

func excludes(a, b *hold) bool {
	return a.kind == backend.KindExclusive || b.kind == backend.KindExclusive
}

// tokens checks that a grant has a greater token than every grant that was returned before its call, and that no two
// grants have the same token.
func (r *record) tokens(holds []*hold) {
	byCall := slices.Clone(holds)
	slices.SortStableFunc(byCall, func(a, b *hold) int { return cmp.Compare(a.call, b.call) })
	seen := map[fencing.Token]*hold{}
	var greatest *hold
	next := 0
	for _, h := range byCall {
		for next < len(holds) && holds[next].begin < h.call { // holds are in the order in which they began
			if greatest == nil || holds[next].token.Order() > greatest.token.Order() {
				greatest = holds[next]
			}
			next++
		}
		if h.token.Exclusive() != (h.kind == backend.KindExclusive) {
			r.found = append(r.found, fmt.Sprintf("%v has the wrong mark on its token", h))
		}
		if twin := seen[h.token]; twin != nil {
			r.found = append(r.found, fmt.Sprintf("%v and %v have one token", h, twin))
		}
		seen[h.token] = h
		if greatest != nil && h.token.Order() <= greatest.token.Order() {
			r.found = append(r.found,
				fmt.Sprintf("%v was asked for after %v was granted, and has no greater token", h, greatest))
		}
	}
}

// sorted returns the log in an order that does not depend on the order of goroutines at one instant. It replaces
// tokens by their ranks among the tokens of the name, because the order of grants of two names at one instant may
// vary.
func (r *record) sorted() []event {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Clone(r.events)
	byName := map[string][]fencing.Token{}
	for _, e := range all {
		if e.token.Valid() && !slices.Contains(byName[e.name], e.token) {
			byName[e.name] = append(byName[e.name], e.token)
		}
	}
	rank := map[string]map[fencing.Token]fencing.Token{}
	for name, tokens := range byName {
		slices.SortFunc(tokens, func(a, b fencing.Token) int { return cmp.Compare(a.Order(), b.Order()) })
		rank[name] = map[fencing.Token]fencing.Token{}
		for i, t := range tokens {
			rank[name][t] = fencing.Token(i + 1)
		}
	}
	for i := range all {
		if t := all[i].token; t.Valid() {
			all[i].token = rank[all[i].name][t]
		}
	}
	slices.SortFunc(all, func(a, b event) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.who, b.who), strings.Compare(a.what, b.what),
			strings.Compare(a.name, b.name), cmp.Compare(a.token, b.token), strings.Compare(a.answer, b.answer))
	})
	return all
}

func (e event) String() string {
	who := fmt.Sprintf("client %d", e.who)
	switch {
	case e.who == weather:
		who = "weather"
	case e.who < 0:
		who = fmt.Sprintf("core %d", -1-e.who)
	}
	s := fmt.Sprintf("%16v  %-9s %-15s %-8s", e.at, who, e.what, e.name)
	if e.token.Valid() {
		s += fmt.Sprintf(" #%v", e.token)
	}
	return s + " " + e.answer
}

func (h *hold) String() string {
	s := fmt.Sprintf("hold of %s (%v) by client %d with token %v, asked for at %v, from %v to %v", h.name, h.kind,
		h.node, h.token, h.call, h.begin, h.end)
	if h.told != 0 {
		s += fmt.Sprintf(", told %s at %v", h.reason, h.told)
	}
	return s
}
