package zookeeper

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/fencelock/fencelock/backend"
)

func permits(n, limit int) use { return use{backend.KindPermits, n, limit} }

// shared is what a reader asks for; a writer asks for the zero use.
var shared = use{kind: backend.KindShared}

func TestNodeNamesTellTheUse(t *testing.T) {
	t.Parallel()
	const id = "0123456789abcdef0123456789abcdef"
	seen := map[string]string{}
	for _, requestID := range []string{
		id, id + "-shared", id + "-exclusive", id + "-2of8", id + "-shared-shared", id + "-9of8", id + "-02of8", id + "-", id + "-of",
		"012345678-shared", "0123456789abcdef-shared", "-shared0123456789",
	} {
		for _, u := range []use{{}, shared, permits(2, 8), permits(1, 1)} {
			r := backend.Request{RequestID: requestID, Kind: u.kind, Permits: u.permits, Limit: u.limit}
			name, what := nodeName(r), fmt.Sprintf("%v of %q", u, requestID)
			if other, taken := seen[name]; taken {
				t.Errorf("%s and %s have the same node %q", what, other, name)
			}
			seen[name] = what
			e, ok := entryOf("/x", name+".0000000007")
			if !ok || e.requestID != requestID || e.use != u {
				t.Errorf("the node %q of %s is read as %v of %q, %v", name, what, e.use, e.requestID, ok)
			}
			if backend.ValidateRequestID(name) != nil {
				t.Errorf("the node %q of %s is no entry to those who know no kinds", name, what)
			}
		}
	}
}

func TestUseIsChecked(t *testing.T) {
	t.Parallel()
	for _, good := range []use{{}, shared, permits(1, 1), permits(8, 8)} {
		if err := good.valid(); err != nil {
			t.Errorf("%v: %v", good, err)
		}
	}
	for _, bad := range []use{
		{permits: 1}, {limit: 1}, {backend.KindShared, 1, 1}, permits(0, 1), permits(-1, 1), permits(2, 1), permits(1, 0), permits(0, 0),
	} {
		var invalid *backend.InvalidError
		if err := bad.valid(); !errors.Is(err, backend.ErrInvalidOption) || !errors.As(err, &invalid) {
			t.Errorf("%d of %d (%v) = %v, want an InvalidError", bad.permits, bad.limit, bad.kind, err)
		}
	}
}

// queueOf makes entries that ask for something, in order.
func queueOf(uses ...use) []entry {
	queue := make([]entry, len(uses))
	for i, u := range uses {
		queue[i] = entry{path: fmt.Sprint(i), use: u}
	}
	return queue
}

func TestWhoHoldsAndWhatTheOthersWatch(t *testing.T) {
	t.Parallel()
	writer := use{}
	for name, test := range map[string]struct {
		queue   []use
		granted int
		watched map[int][]int // who waits for whom, the nearest first
	}{
		"nobody":         {},
		"one writer":     {[]use{writer, writer, writer}, 1, map[int][]int{1: {0}, 2: {1}}},
		"readers":        {[]use{shared, shared, shared}, 3, nil},
		"waiting writer": {[]use{shared, shared, writer, shared, shared}, 2, map[int][]int{2: {1}, 3: {2}, 4: {2}}},
		"readers behind": {[]use{writer, shared, shared, writer}, 1, map[int][]int{1: {0}, 2: {0}, 3: {2}}},
		"all permits":    {[]use{permits(3, 4), permits(1, 4), permits(1, 4)}, 2, map[int][]int{2: {1, 0}}},
		"a big request":  {[]use{permits(3, 4), permits(4, 4), permits(1, 4)}, 1, map[int][]int{1: {0}, 2: {1}}},
		"far behind": {
			[]use{permits(1, 2), permits(1, 2), permits(1, 2), permits(1, 2), permits(1, 2)}, 2,
			map[int][]int{2: {1, 0}, 3: {2, 1}, 4: {3, 2}},
		},
		"another limit": {[]use{permits(1, 4), permits(1, 3), permits(1, 4)}, 1, map[int][]int{1: {0}, 2: {1}}},
		"other kinds":   {[]use{shared, permits(1, 4), shared, writer}, 1, map[int][]int{1: {0}, 2: {1}, 3: {2}}},
		"large limits":  {[]use{permits(1<<62, 1<<62), permits(1<<62, 1<<62)}, 1, map[int][]int{1: {0}}},
	} {
		queue := queueOf(test.queue...)
		if got := granted(queue); got != test.granted {
			t.Errorf("%s: %d hold, want %d", name, got, test.granted)
		}
		for i, e := range queue {
			var got []int
			for _, b := range blockers(queue[:i], e) {
				got = append(got, slices.IndexFunc(queue, func(e entry) bool { return e.path == b.path }))
			}
			if !slices.Equal(got, test.watched[i]) {
				t.Errorf("%s: entry %d waits for %v, want %v", name, i, got, test.watched[i])
			}
		}
	}
}

// TestBlockersBlock checks on random queues what whoever watches them relies on.
func TestBlockersBlock(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		var uses []use
		for range 1 + random.IntN(8) {
			kinds := []use{{}, shared, shared, permits(1+random.IntN(4), 4), permits(1+random.IntN(4), 4), permits(1, 3)}
			uses = append(uses, kinds[random.IntN(len(kinds))])
		}
		queue := queueOf(uses...)
		n := granted(queue)
		for i, e := range queue {
			some := blockers(queue[:i], e)
			if (len(some) == 0) != (i < n) {
				t.Fatalf("seed %d: %v: entry %d has the blockers %v, and %d hold", seed, uses, i, some, n)
			}
			if len(some) == 0 {
				continue
			}
			var rest []entry // of those before e, as they leave in some order
			for _, b := range queue[:i] {
				if random.IntN(2) == 0 || slices.Contains(some, b) {
					rest = append(rest, b)
				}
			}
			if len(blockers(rest, e)) == 0 {
				t.Fatalf("seed %d: %v: entry %d is granted behind %v, which have its blockers %v", seed, uses, i, rest, some)
			}
			if e.kind != backend.KindPermits || len(some) > e.limit {
				if len(some) != 1 {
					t.Fatalf("seed %d: %v: entry %d watches %v", seed, uses, i, some)
				}
			}
		}
	}
}
