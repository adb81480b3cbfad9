package etcd

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/fencelock/fencelock/backend"
)

func exclusively() claim              { return claim{kind: backend.KindExclusive} }
func sharing() claim                  { return claim{kind: backend.KindShared} }
func taking(permits, limit int) claim { return claim{backend.KindPermits, permits, limit} }

func TestClaimIsReadBackFromItsKey(t *testing.T) {
	t.Parallel()
	for _, c := range []claim{exclusively(), sharing(), taking(1, 1), taking(2, 8), taking(8, 8), taking(1, 1<<40)} {
		part, id := splitKey(c.part() + "4f2a")
		if got := claimOf(part); got != c || id != "4f2a" {
			t.Errorf("%+v became %+v with the id %q", c, got, id)
		}
	}
	// Whatever else stands there keeps everybody out.
	for _, part := range []string{
		"+permits/8/9/", "+permits/8/0/", "+permits/08/1/", "+permits/8/+1/", "+permits/8/", "+permits//1/", "+permits/8/1/2/",
		"+permits/99999999999999999999/1/", "+shared/x/", "+later/", "x/",
	} {
		if got := claimOf(part); got != exclusively() {
			t.Errorf("%q is read as %+v", part, got)
		}
	}
}

func TestHoldersDoNotExcludeEachOther(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	claims := []claim{exclusively(), sharing(), sharing(), taking(1, 3), taking(2, 3), taking(3, 3), taking(1, 2)}
	for range 20_000 {
		queue := make([]entry, random.IntN(9))
		for i := range queue {
			queue[i] = entry{revision: int64(i + 1), claim: claims[random.IntN(len(claims))]}
		}
		hold := holders(queue)
		for i, e := range queue {
			blockers := e.claim.blockers(slices.Clone(queue[:i]))
			if held := i < len(hold); held != (len(blockers) == 0) {
				t.Fatalf("number %d of %+v: among the holders %v, blocked by %+v", i, queue, held, blockers)
			}
		}
		if len(queue) > 0 && len(hold) == 0 {
			t.Fatalf("nobody holds in %+v", queue)
		}
		taken := 0
		for _, e := range hold {
			taken += e.claim.permits
			if len(hold) > 1 && (e.claim.kind == backend.KindExclusive || e.claim.limit != hold[0].claim.limit) {
				t.Fatalf("%+v hold together", hold)
			}
		}
		if len(hold) > 0 && taken > hold[0].claim.limit {
			t.Fatalf("%+v hold together", hold)
		}
	}
}

// As long as all of its blockers stand a waiter is kept out, and no fewer of the nearest entries do that.
func TestBlockersAreWhatHasToGo(t *testing.T) {
	t.Parallel()
	queue := func(claims ...claim) []entry {
		var entries []entry
		for i, c := range claims {
			entries = append(entries, entry{revision: int64(i + 1), claim: c})
		}
		return entries
	}
	for _, c := range []struct {
		claim  claim
		before []entry
		want   []int64
	}{
		{exclusively(), nil, nil},
		{exclusively(), queue(exclusively(), exclusively()), []int64{2}},
		{exclusively(), queue(sharing(), sharing()), []int64{2}},
		{sharing(), queue(sharing(), sharing()), nil},
		{sharing(), queue(exclusively(), exclusively(), sharing()), []int64{2}},
		{taking(1, 4), queue(taking(1, 4), taking(2, 4)), nil},
		{taking(2, 4), queue(taking(1, 4), taking(2, 4)), []int64{1, 2}},
		{taking(1, 4), queue(taking(1, 4), taking(4, 4)), []int64{2}}, // a small one does not pass a big one
		{taking(1, 3), queue(taking(1, 3), taking(2, 3), taking(1, 3), taking(1, 3)), []int64{2, 3, 4}},
		{taking(1, 1<<62), queue(taking(1<<62, 1<<62), taking(1<<62, 1<<62), taking(1<<62, 1<<62)), []int64{3}},
	} {
		var got []int64
		for _, e := range c.claim.blockers(c.before) {
			got = append(got, e.revision)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%+v behind %+v waits for %v, want %v", c.claim, c.before, got, c.want)
		}
	}
}
