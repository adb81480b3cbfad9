package machine

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// tester is the common part of testing.T and rapid.T.
type tester interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// excludes reports whether two requests exclude each other, in plain words of the package comment and independent of
// claims.
func excludes(a, b *Request) bool {
	related := a.Name == b.Name ||
		a.Hierarchical && b.Hierarchical && (isAncestor(a.Name, b.Name) || isAncestor(b.Name, a.Name))
	bothShared := a.Kind == Shared && b.Kind == Shared
	bothPermits := a.Kind == Permits && b.Kind == Permits // counted together
	return related && !bothShared && !bothPermits
}

func isAncestor(a, b string) bool {
	return a != "" && len(a) < len(b) && strings.HasPrefix(b, a) && b[len(a)] == '/'
}

// mismatch reports whether two requests must not use their names at the same time.
func mismatch(a, b *Request) bool {
	if a.Name == b.Name {
		return a.Hierarchical != b.Hierarchical || (a.Kind == Permits) != (b.Kind == Permits) || a.Limit != b.Limit
	}
	return a.Hierarchical && !b.Hierarchical && isAncestor(b.Name, a.Name) ||
		b.Hierarchical && !a.Hierarchical && isAncestor(a.Name, b.Name)
}

// checkState checks the invariants between any two commands.
func checkState(t tester, m *Machine) {
	t.Helper()
	holds, waits := sorted(m.holds), sorted(m.waits)
	if bad := badHolders(holds); bad != "" {
		t.Fatal(bad)
	}
	for i, w := range waits {
		if !isBlocked(w, holds, waits[:i]) {
			t.Fatalf("%+v waits, and nobody is in the way", w)
		}
		for j := range w.requests {
			for _, h := range holds {
				if mismatch(&w.requests[j], &h.Request) {
					t.Fatalf("%+v waits where %+v is held", w.requests[j], h)
				}
			}
		}
	}
	for _, h := range holds {
		if h.token.Order() > m.revision || h.token.Exclusive() != (h.Kind == Exclusive) {
			t.Fatalf("%+v: the token is not right at revision %d", h, m.revision)
		}
	}
	checkIndexes(t, m)
	checkUsage(t, m)
}

// badHolders returns the holds that must not exist at the same time.
func badHolders(holds []*hold) string {
	for i, a := range holds {
		for _, b := range holds[:i] {
			if excludes(&a.Request, &b.Request) {
				return fmt.Sprintf("%+v and %+v exclude each other, and both are held", a, b)
			}
			if mismatch(&a.Request, &b.Request) {
				return fmt.Sprintf("%+v and %+v do not mix, and both are held", a, b)
			}
			if a.Name == b.Name && a.ID == b.ID && !a.lingering() && !b.lingering() {
				return fmt.Sprintf("%+v and %+v are one request, held twice", a, b)
			}
		}
	}
	return ""
}

// isBlocked reports whether w has to wait: for a holder, or for an earlier waiter.
func isBlocked(w *wait, holds []*hold, earlier []*wait) bool {
	for i := range w.requests {
		r := &w.requests[i]
		taken := uint64(0)
		for _, h := range holds {
			if excludes(r, &h.Request) {
				return true
			}
			if h.Name == r.Name {
				taken += uint64(h.Permits)
			}
		}
		if r.Kind == Permits && taken+uint64(r.Permits) > uint64(r.Limit) {
			return true
		}
		for _, e := range earlier {
			if waitsBehind(r, e) {
				return true
			}
		}
	}
	return false
}

// waitsBehind reports whether r must not be granted before the waiter e.
func waitsBehind(r *Request, e *wait) bool {
	for i := range e.requests {
		q := &e.requests[i]
		if excludes(r, q) || r.Kind == Permits && q.Kind == Permits && r.Name == q.Name {
			return true
		}
	}
	return false
}

// checkIndexes checks that the state derived from holds and waits equals a fresh derivation, and that the last
// command left nothing over.
func checkIndexes(t tester, m *Machine) {
	t.Helper()
	fresh := New(1)
	fresh.revision = m.revision
	for id, s := range m.sessions {
		fresh.sessions[id] = &session{id: id, ttl: s.ttl}
	}
	for _, h := range sorted(m.holds) {
		fresh.addHold(h)
	}
	for _, w := range sorted(m.waits) {
		fresh.addWait(w)
	}
	if got, want := indexes(m), indexes(fresh); got != want {
		t.Fatalf("computed step by step:\n%s\nfrom scratch:\n%s", got, want)
	}
	if len(m.touched) > 0 || len(m.notices) > 0 {
		t.Fatal("something is left from the last command")
	}
}

// indexes prints the derived state.
func indexes(m *Machine) string {
	var lines []string
	for name, e := range m.names {
		line := fmt.Sprintf("name %q %q limit %d tree %v held %v waiting %v permits %d:", name, e.name, e.limit, e.tree,
			e.held, e.waits().waiting, e.permits)
		for h := range e.holds.all {
			line += fmt.Sprintf(" hold %v %x", h.token, h.session)
		}
		for h := range e.intents.all {
			line += fmt.Sprintf(" intent %v %x", h.token, h.session)
		}
		for _, p := range e.waits().queue {
			line += fmt.Sprintf(" wait %d %d", p.wait.ticket, p.claim.modes)
		}
		lines = append(lines, line)
	}
	for id, s := range m.sessions {
		line := fmt.Sprintf("session %v:", id)
		for _, h := range sorted(s.holds) {
			line += fmt.Sprintf(" hold %v", h.token)
		}
		for _, w := range sorted(s.waits) {
			line += fmt.Sprintf(" wait %d", w.ticket)
		}
		lines = append(lines, line)
	}
	for id, waits := range m.under {
		line := fmt.Sprintf("under %q:", id)
		for _, w := range waits {
			line += fmt.Sprintf(" wait %d", w.ticket)
		}
		lines = append(lines, line)
	}
	for key, c := range m.claimants {
		line := fmt.Sprintf("claimant %q %q:", key.name, key.id)
		if c.hold != nil {
			line += fmt.Sprintf(" hold %v %x", c.hold.token, c.hold.session)
		}
		if c.wait != nil {
			line += fmt.Sprintf(" wait %d %x", c.wait.ticket, c.wait.session)
		}
		lines = append(lines, line)
	}
	slices.SortFunc(lines, cmp.Compare)
	return strings.Join(lines, "\n")
}

// checkUsage checks that the usage of every client is counted.
func checkUsage(t tester, m *Machine) {
	t.Helper()
	want := map[string]Usage{}
	for _, s := range m.sessions {
		if s.client != "" {
			u := want[s.client]
			want[s.client] = Usage{u.Sessions + 1, u.Holds + len(s.holds), u.Waits + len(s.waits)}
		}
	}
	if !maps.Equal(m.clients, want) {
		t.Fatalf("the clients have %v, and %v is counted", want, m.clients)
	}
}
