package machine

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// inTheWay returns the holds and waits that w waits for, in plain words of the package comment and independent of
// claims.
func inTheWay(w *wait, holds []*hold, waits []*wait) (ofHolds []*hold, ofWaits []*wait) {
	for j := range w.requests {
		r := &w.requests[j]
		for _, h := range holds {
			full := r.Kind == Permits && r.Name == h.Name && uint64(r.Permits)+uint64(h.Permits) > uint64(r.Limit)
			if full || excludes(r, &h.Request) {
				ofHolds = append(ofHolds, h)
			}
		}
		for _, e := range waits {
			if e.ticket < w.ticket && waitsBehind(r, e) {
				ofWaits = append(ofWaits, e)
			}
		}
	}
	return ofHolds, ofWaits
}

// closesCycle reports whether w waits, over any number of others, for a hold under which it is made.
func closesCycle(w *wait, holds []*hold, waits []*wait) bool {
	queue, seen := []*wait{w}, map[*wait]bool{w: true}
	for ; len(queue) > 0; queue = queue[1:] {
		ofHolds, ofWaits := inTheWay(queue[0], holds, waits)
		for _, h := range ofHolds {
			if h.lingering() {
				continue
			}
			if slices.Contains(w.under, h.ID) {
				return true
			}
			for _, x := range waits {
				if slices.Contains(x.under, h.ID) {
					ofWaits = append(ofWaits, x)
				}
			}
		}
		for _, x := range ofWaits {
			if !seen[x] {
				seen[x] = true
				queue = append(queue, x)
			}
		}
	}
	return false
}

// Any log: a request waits only if it closes no cycle, and is refused only if it would.
func TestNoDeadlocks(t *testing.T) {
	refused := 0
	rapid.Check(t, func(t *rapid.T) {
		m := newWorld(1)
		for range rapid.IntRange(10, 100).Draw(t, "length") {
			c := drawCommand(t, m)
			if c.Op == OpSetLimits {
				continue // a short search misses cycles
			}
			holds, waits, before := sorted(m.holds), sorted(m.waits), m.revision
			result, _ := m.Apply(1, &c)
			newcomer := &wait{session: c.Session, requests: slices.Clone(c.Requests), under: c.Under, ticket: before + 1}
			for i := range newcomer.requests {
				r := &newcomer.requests[i]
				r.Limit = m.policies.limit(r.Name, r.Limit)
			}
			switch {
			case result.Code == CodeQueued && c.Op == OpAcquire && result.Ticket > before &&
				closesCycle(newcomer, holds, waits):
				t.Fatalf("%+v waits for itself", c)
			case result.Code == CodeDeadlock && c.Seq == 0:
				if refused++; !closesCycle(newcomer, holds, waits) {
					t.Fatalf("%+v was refused for no cycle: %+v", c, result.Cycle)
				}
			}
		}
	})
	if refused == 0 {
		t.Error("no request was refused: the logs do not try the search")
	}
}
