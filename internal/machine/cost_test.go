package machine

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fencelock/fencelock/fencing"
)

// crowd returns a machine with a shared hold of a/x, an exclusive waiter for it, and n shared waiters behind that.
func crowd(t testing.TB, n int) *Machine {
	m := New(1)
	limits := DefaultLimits()
	limits.WaitersPerName = n + 10
	m.Apply(1, &Command{Op: OpSetLimits, Limits: &limits})
	m.Apply(1, &Command{Op: OpOpenSession, Session: sid("crowd"), TTL: time.Second})
	for i := range n + 2 {
		c := Command{Op: OpAcquire, Session: sid("crowd"), Wait: true, Requests: []Request{{
			Name: "a/x", ID: fmt.Sprintf("request-%016d", i), Kind: Shared, Hierarchical: true,
		}}}
		if i == 1 {
			c.Requests[0].Kind = Exclusive
		}
		want := CodeQueued
		if i == 0 {
			want = CodeGranted
		}
		if r, _ := m.Apply(1, &c); r.Code != want {
			t.Fatalf("request %d: code %d", i, r.Code)
		}
	}
	return m
}

// cycleBeside acquires and releases a lock of another name.
func cycleBeside(t testing.TB, m *Machine, name string) {
	c := Command{
		Op: OpAcquire, Session: sid("crowd"), Requests: []Request{{Name: name, ID: id("beside"), Hierarchical: true}},
	}
	if r, _ := m.Apply(1, &c); r.Code != CodeGranted {
		t.Fatalf("code %d", r.Code)
	}
	if r, _ := m.Apply(1, &Command{Op: OpRelease, Name: name, RequestID: id("beside")}); r.Code != CodeOK {
		t.Fatalf("code %d", r.Code)
	}
}

// One operation is an acquire and a release of a/y, beside n waiters for a/x in the same tree.
func BenchmarkBesideACrowd(b *testing.B) {
	for _, n := range []int{0, 1000, 9990} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			m := crowd(b, n)
			for b.Loop() {
				cycleBeside(b, m, "a/y")
			}
		})
	}
}

// Waiters in a tree cost nothing to callers that take other locks of the tree: the machine examines no waiter for
// them.
func TestUnrelatedWaitersAreNotExamined(t *testing.T) {
	m := crowd(t, 5000)
	before := m.looked
	cycleBeside(t, m, "a/y")
	if n := m.looked - before; n > 0 {
		t.Errorf("%d waiters were looked at for a lock that none of them waits for", n)
	}
}

// A holdSet behaves like a sorted map, at any size.
func TestHoldSet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s holdSet
		want := map[uint64]*hold{}
		most := rapid.SampledFrom([]int{5, 200}).Draw(t, "most")
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			token := rapid.Uint64Range(1, uint64(most)).Draw(t, "token")
			h := &hold{token: fencing.Token(token)}
			if rapid.IntRange(0, 2).Draw(t, "remove") == 0 {
				if removed := s.remove(h); removed != (want[token] != nil) {
					t.Fatalf("token %d was there: %v", token, removed)
				}
				delete(want, token)
			} else {
				s.put(h)
				want[token] = h
			}
			all := sorted(want)
			i := 0
			for h := range s.all {
				if i >= len(all) || h != all[i] {
					t.Fatalf("number %d is %v", i, h.token)
				}
				i++
			}
			if i != len(all) || s.len() != len(all) || len(all) > 0 && s.first() != all[0] ||
				len(all) == 0 && s.first() != nil {
				t.Fatalf("%d holds are yielded of %d", i, len(all))
			}
		}
	})
}
