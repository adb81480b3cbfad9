package kit

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/fencelock/fencelock/backend"
)

var writer, shared = Use{}, Use{Kind: backend.KindShared}

func permits(n, limit int) Use { return Use{Kind: backend.KindPermits, Permits: n, Limit: limit} }

// entry is a use and its place in the queue.
type entry struct {
	at  int
	use Use
}

func queueOf(uses ...Use) []entry {
	queue := make([]entry, len(uses))
	for i, u := range uses {
		queue[i] = entry{i, u}
	}
	return queue
}

func (e entry) useOf() Use { return e.use }

func TestHoldersAndBlockers(t *testing.T) {
	for name, test := range map[string]struct {
		queue []Use
		hold  int
		waits map[int][]int // who waits for whom
	}{
		"nobody":         {},
		"one writer":     {[]Use{writer, writer, writer}, 1, map[int][]int{1: {0}, 2: {1}}},
		"readers":        {[]Use{shared, shared, shared}, 3, nil},
		"waiting writer": {[]Use{shared, shared, writer, shared, shared}, 2, map[int][]int{2: {1}, 3: {2}, 4: {2}}},
		"readers behind": {[]Use{writer, shared, shared, writer}, 1, map[int][]int{1: {0}, 2: {0}, 3: {2}}},
		"all permits":    {[]Use{permits(3, 4), permits(1, 4), permits(1, 4)}, 2, map[int][]int{2: {0, 1}}},
		"a big request":  {[]Use{permits(3, 4), permits(4, 4), permits(1, 4)}, 1, map[int][]int{1: {0}, 2: {1}}},
		"far behind": {
			[]Use{permits(1, 2), permits(1, 2), permits(1, 2), permits(1, 2), permits(1, 2)}, 2,
			map[int][]int{2: {0, 1}, 3: {1, 2}, 4: {2, 3}},
		},
		"another limit": {[]Use{permits(1, 4), permits(1, 3), permits(1, 4)}, 1, map[int][]int{1: {0}, 2: {1}}},
		"other kinds":   {[]Use{shared, permits(1, 4), shared, writer}, 1, map[int][]int{1: {0}, 2: {1}, 3: {2}}},
		"large limits":  {[]Use{permits(1<<62, 1<<62), permits(1<<62, 1<<62)}, 1, map[int][]int{1: {0}}},
	} {
		queue := queueOf(test.queue...)
		if got := len(Holders(queue, entry.useOf)); got != test.hold {
			t.Errorf("%s: %d hold, want %d", name, got, test.hold)
		}
		for i, e := range queue {
			var got []int
			for _, b := range Blockers(queue[:i], entry.useOf, e.use) {
				got = append(got, b.at)
			}
			if !slices.Equal(got, test.waits[i]) {
				t.Errorf("%s: entry %d waits for %v, want %v", name, i, got, test.waits[i])
			}
		}
	}
}

// In random queues, a holder has no blockers and excludes no other holder. While all blockers of a waiter stay in the
// queue, the waiter cannot hold, whatever other entries leave.
func TestBlockersBlock(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	for range 5000 {
		var uses []Use
		for range 1 + random.IntN(8) {
			kinds := []Use{
				writer, shared, shared, permits(1+random.IntN(4), 4), permits(1+random.IntN(4), 4), permits(1, 3),
			}
			uses = append(uses, kinds[random.IntN(len(kinds))])
		}
		queue := queueOf(uses...)
		hold := Holders(queue, entry.useOf)
		taken := 0
		for _, e := range hold {
			taken += e.use.Permits
			if len(hold) > 1 && (e.use.Kind == backend.KindExclusive || !e.use.Mixes(hold[0].use)) {
				t.Fatalf("seed %d: %v: %v hold together", seed, uses, hold)
			}
		}
		if taken > hold[0].use.Limit {
			t.Fatalf("seed %d: %v: %v hold together", seed, uses, hold)
		}
		for i, e := range queue {
			some := Blockers(queue[:i], entry.useOf, e.use)
			if (len(some) == 0) != (i < len(hold)) {
				t.Fatalf("seed %d: %v: entry %d has the blockers %v, and %d hold", seed, uses, i, some, len(hold))
			}
			if len(some) == 0 {
				continue
			}
			var rest []entry // of the entries before e, as they leave in some order
			for _, b := range queue[:i] {
				if random.IntN(2) == 0 || slices.Contains(some, b) {
					rest = append(rest, b)
				}
			}
			if len(Blockers(rest, entry.useOf, e.use)) == 0 {
				t.Fatalf("seed %d: %v: entry %d is granted behind %v, which have its blockers %v",
					seed, uses, i, rest, some)
			}
			if len(some) != 1 && (e.use.Kind != backend.KindPermits || len(some) > e.use.Limit) {
				t.Fatalf("seed %d: %v: entry %d waits for %v", seed, uses, i, some)
			}
		}
	}
}
