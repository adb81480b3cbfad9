package machine

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
)

// The pages of a session together list all its holds and waits, at any page size; a page never divides the entries of
// one name.
func TestSessionPages(t *testing.T) {
	m := New(1)
	mine, other := sid("mine"), sid("other")
	for _, s := range []SessionID{mine, other} {
		m.Apply(1, &Command{Op: OpOpenSession, Session: s, TTL: 1})
	}
	acquire := func(s SessionID, name, request string, kind Kind, want Code) {
		t.Helper()
		r, _ := m.Apply(1, &Command{Op: OpAcquire, Session: s, Wait: true, Requests: []Request{
			{Name: name, ID: id(request), Kind: kind},
		}})
		if r.Code != want {
			t.Fatalf("acquire %s: code %d (%s), want %d", name, r.Code, r.Detail, want)
		}
	}
	for i := range 100 {
		name := fmt.Sprint("name/", (i*37)%100) // not in the order of the names
		switch i % 4 {
		case 0:
			acquire(mine, name, fmt.Sprint("alone-", i), Exclusive, CodeGranted)
		case 1:
			acquire(other, name, fmt.Sprint("theirs-", i), Exclusive, CodeGranted)
			acquire(mine, name, fmt.Sprint("waits-", i), Exclusive, CodeQueued)
		case 2:
			for j := range 5 {
				acquire(mine, name, fmt.Sprintf("shared-%d-%d", i, j), Shared, CodeGranted)
			}
		default:
			acquire(other, name, fmt.Sprint("theirs-", i), Exclusive, CodeGranted)
		}
	}
	s, _ := m.Session(mine)
	var want []SessionEntry
	for _, h := range s.Holds {
		want = append(want, SessionEntry{Name: h.Name, RequestID: h.RequestID, Token: h.Token})
	}
	for _, w := range s.Waits {
		want = append(want, SessionEntry{Name: w.Requests[0].Name, RequestID: w.Requests[0].ID})
	}
	slices.SortFunc(want, func(a, b SessionEntry) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.RequestID, b.RequestID))
	})
	for _, limit := range []int{0, 1, 2, 3, 7, 60, len(want) - 1, len(want), 1000} {
		var got []SessionEntry
		for after := ""; ; {
			page, ok := m.SessionPage(mine, after, limit)
			if !ok || page.TTL != 1 || len(page.Entries) == 0 {
				t.Fatalf("limit %d: the page after %q is %+v, %v", limit, after, page, ok)
			}
			last := page.Entries[len(page.Entries)-1].Name
			if n := len(page.Entries); n > max(limit, 1) && page.Entries[max(limit, 1)-1].Name != last {
				t.Errorf("limit %d: %d entries after %q", limit, n, after)
			}
			if got, after = append(got, page.Entries...), last; !page.More {
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("limit %d: got %d entries, want %d:\n%v\n%v", limit, len(got), len(want), got, want)
		}
	}
	if page, _ := m.SessionPage(mine, "name/99999", 1); len(page.Entries) > 0 || page.More {
		t.Errorf("after the last name: %+v", page)
	}
	if _, ok := m.SessionPage(sid("nobody"), "", 1); ok {
		t.Error("a session that is not there has a page")
	}
}

// One operation is all pages of a session with 100,000 holds.
func BenchmarkSessionPages(b *testing.B) {
	m := New(1)
	m.Apply(1, &Command{Op: OpOpenSession, Session: sid("bench"), TTL: 1})
	for i := range 100_000 {
		m.Apply(1, &Command{Op: OpAcquire, Session: sid("bench"), Requests: []Request{
			{Name: fmt.Sprint("filler/", i), ID: id(fmt.Sprint(i))},
		}})
	}
	b.ReportAllocs()
	for b.Loop() {
		for after, more := "", true; more; {
			page, _ := m.SessionPage(sid("bench"), after, 5000)
			after, more = page.Entries[len(page.Entries)-1].Name, page.More
		}
	}
}
