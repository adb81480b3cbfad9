package kit

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

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

// testdata/queue.txt has queues and their holders. go test -run TestQueues ./backend/kit -rewrite records it again.
func TestQueues(t *testing.T) {
	datadriven.RunTest(t, "testdata/queue.txt", func(t *testing.T, d *datadriven.TestData) string {
		answers := []string{rule(t, d.CmdArgs)}
		for line := range strings.Lines(d.Input) {
			_, args, err := datadriven.ParseLine(line)
			if err != nil {
				t.Fatal(err)
			}
			answers = append(answers, rule(t, args))
		}
		return strings.Join(answers, "\n")
	})
}

// rule writes the holders of a queue, and the blockers of the others, by their places from 1.
func rule(t *testing.T, uses []datadriven.CmdArg) string {
	var queue []entry
	for i, a := range uses {
		u := Use{}
		switch a.Key {
		case "exclusive":
		case "shared":
			u = shared
		default:
			if _, err := fmt.Sscanf(a.Key, "%d/%d", &u.Permits, &u.Limit); err != nil {
				t.Fatalf("%q: %v", a.Key, err)
			}
			u.Kind = backend.KindPermits
		}
		queue = append(queue, entry{i + 1, u})
	}
	places := func(entries []entry) (text string) {
		for _, e := range entries {
			text += fmt.Sprint(" ", e.at)
		}
		return text
	}
	text := places(Holders(queue, entry.useOf)) + " hold"
	for i, e := range queue {
		if blockers := Blockers(queue[:i], entry.useOf, e.use); len(blockers) > 0 {
			text += fmt.Sprintf("; %d waits for%s", e.at, places(blockers))
		}
	}
	return strings.TrimSpace(text)
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
