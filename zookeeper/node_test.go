package zookeeper

import (
	"testing"
	"time"
)

func TestNamesBecomeNodesAndComeBack(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for _, name := range []string{
		"a", "A", "a/b", "a%2Fb", ".", "..", "zookeeper", "a b", "a+b", "%", "%25", "é", "\uf8ff",
		"\ufff0", "\U0001f512", "a.b", "~", "*",
	} {
		node := escape(name)
		if other, taken := seen[node]; taken {
			t.Errorf("%q and %q have the same node %q", name, other, node)
		}
		seen[node] = name
		if back, ok := unescape(node); !ok || back != name {
			t.Errorf("unescape(%q) = %q, %v; want %q", node, back, ok, name)
		}
	}
	for _, foreign := range []string{"", "a.b", "%2f", "%zz", "%00", "a b"} {
		if name, ok := unescape(foreign); ok {
			t.Errorf("unescape(%q) = %q, want it refused", foreign, name)
		}
	}
}

func TestQueueOrder(t *testing.T) {
	t.Parallel()
	const a, b, c = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc"
	const d, e = "dddddddddddddddd", "eeeeeeeeeeeeeeee"
	queue := entriesOf("/x", []string{
		e + ".-2147483647", "lock-0000000000", d + ".-2147483648", b + ".2147483646", c + ".2147483647",
		a + ".0000000000",
		"short.0000000001", a + ".000000001", a + ".00000000010", "_c_" + a + "-0000000003", a + ".+000000001",
		a + ".-000000000", a + ".12345678901", a + ".-0000000001", a + "..000000001", a + ".",
	})
	want := []string{a, b, c, d, e}
	if len(queue) != len(want) {
		t.Fatalf("entries = %v, want those of %v", queue, want)
	}
	for i, e := range queue {
		if e.requestID != want[i] {
			t.Errorf("place %d has %q, want %q: a negative number follows the last positive one",
				i, e.requestID, want[i])
		}
	}
}

func TestDescriptionLeavesTimeToHold(t *testing.T) {
	t.Parallel()
	for _, tick := range []time.Duration{time.Millisecond, 500 * time.Millisecond, 2 * time.Second, time.Minute} {
		d := New([]string{"localhost:2181"}, &Options{Tick: tick}).Describe()
		if d.MaxTTL >= d.MinTTL && d.Validity(d.MinTTL) <= 0 {
			t.Errorf("tick %v: a hold of %v is valid for %v", tick, d.MinTTL, d.Validity(d.MinTTL))
		}
	}
}
