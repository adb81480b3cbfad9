package zookeeper

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
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

// TestProof checks what may be reported after requests that were answered, with a tick of 100.
func TestProof(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		sent []backend.Instant
		want backend.Instant
	}{
		"the connection alone":            {nil, 1000},
		"soon after the connection":       {[]backend.Instant{1030}, 1030},
		"at a steady pace":                {[]backend.Instant{1040, 1080, 1120, 1160, 1200}, 1200},
		"after a gap":                     {[]backend.Instant{1040, 1500}, 1140},
		"twice quickly after a gap":       {[]backend.Instant{1040, 1500, 1510}, 1140},
		"half a tick after the first one": {[]backend.Instant{1040, 1500, 1550}, 1550},
	} {
		p := proof{tick: 100}
		p.made(1000)
		for _, sent := range test.sent {
			p.answered(sent)
		}
		if p.proved != test.want {
			t.Errorf("%s: proved %d, want %d", name, p.proved, test.want)
		}
	}
	p := proof{tick: 100}
	p.made(1000)
	p.answered(1090)
	p.reconnected(1300)
	p.answered(1200) // sent over the connection before, and late
	if p.proved != 1090 {
		t.Errorf("after a reconnect: proved %d, want 1090: the leader may have been overtaken", p.proved)
	}
	p.answered(1310)
	if p.proved != 1310 {
		t.Errorf("a request after a reconnect: proved %d, want 1310", p.proved)
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

// TestKeepDoing lets work come while the goroutine that does it is at work, and after it has ended.
func TestKeepDoing(t *testing.T) {
	t.Parallel()
	d := New([]string{"localhost:2181"}, nil)
	left, running := 0, false // protected by d.mu
	var atWork atomic.Int32
	take := func() (work func()) {
		if left == 0 {
			return nil
		}
		left--
		return func() {
			if atWork.Add(1) > 1 {
				t.Error("two goroutines are at work")
			}
			time.Sleep(time.Millisecond) // others come meanwhile
			atWork.Add(-1)
		}
	}
	for range 20 {
		for range 3 {
			d.mu.Lock()
			left++
			d.keepDoingLocked(&running, time.Microsecond, take)
			d.mu.Unlock()
		}
		for done := false; !done; time.Sleep(100 * time.Microsecond) { // nobody tells
			d.mu.Lock()
			done = !running
			if done && left > 0 {
				t.Errorf("nobody does what is left: %d", left)
			}
			d.mu.Unlock()
		}
	}
	if err := d.Close(t.Context()); err != nil {
		t.Errorf("Close = %v", err)
	}
}
