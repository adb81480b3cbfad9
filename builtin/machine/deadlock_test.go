package machine

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// waitsFor returns which agents each agent waits for, in plain words of the package comment and independent of claims.
func waitsFor(holds []*hold, waits []*wait) map[string][]string {
	edges := map[string][]string{}
	for i, w := range waits {
		self := w.requests[0].Agent
		for j := range w.requests {
			r := &w.requests[j]
			for _, h := range holds {
				full := r.Kind == Permits && r.Name == h.Name && uint64(r.Permits)+uint64(h.Permits) > uint64(r.Limit)
				if full || excludes(r, &h.Request) {
					edges[self] = append(edges[self], agentOf(h, nil))
				}
			}
			for _, e := range waits[:i] {
				if waitsBehind(r, e) {
					edges[self] = append(edges[self], e.requests[0].Agent)
				}
			}
		}
	}
	return edges
}

// hasCycle tells whether some agent waits for itself, over any number of others.
func hasCycle(edges map[string][]string) bool {
	for start := range edges {
		reached := slices.Clone(edges[start])
		seen := map[string]bool{}
		for len(reached) > 0 && start != "" {
			next := reached[0]
			reached = reached[1:]
			if next == start {
				return true
			}
			if next != "" && !seen[next] {
				seen[next] = true
				reached = append(reached, edges[next]...)
			}
		}
	}
	return false
}

// Any log: no agent ever waits for itself, and a request is refused only if it would.
func TestNoDeadlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newWorld(1)
		for range rapid.IntRange(10, 100).Draw(t, "length") {
			c := drawCommand(t, m)
			if c.Op == OpSetLimits {
				continue // a short search finds not all
			}
			result, _ := m.Apply(1, &c)
			holds, waits := sorted(m.holds), sorted(m.waits)
			if hasCycle(waitsFor(holds, waits)) {
				t.Fatalf("after %+v somebody waits for itself", c)
			}
			if result.Code == CodeDeadlock && c.Seq == 0 {
				newcomer := &wait{session: c.Session, requests: c.Requests}
				if !hasCycle(waitsFor(holds, append(waits, newcomer))) {
					t.Fatalf("%+v was refused for no cycle: %+v", c, result.Cycle)
				}
			}
		}
	})
}
