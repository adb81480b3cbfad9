package kit

// The rule of holders in a queue. It is for services that keep entries in order of arrival, and leave the decision to
// the clients: every client must reach the same result from the same queue, so all drivers share this rule.
//
//	queue:     shared  shared  exclusive  shared
//	holds:       yes     yes      no        no     (two readers, a writer, a reader)
//	blockers:     -       -     2nd        3rd

import (
	"fmt"
	"slices"

	"github.com/fencelock/fencelock/backend"
)

// Use is the kind and the size of a request. Permits and Limit belong to backend.KindPermits and are 0 otherwise.
//
// One rule decides for all kinds, in a queue in order of arrival: a request holds as soon as no earlier entry
// excludes it. Earlier entries can only disappear, so a holder keeps its hold whatever comes later, and no request
// overtakes: waiters count like holders. A rule that counted holders only would let readers pass a waiting writer
// indefinitely.
type Use struct {
	Kind           backend.Kind
	Permits, Limit int
}

// UseOf returns the use of a request.
func UseOf(r backend.Request) Use { return Use{r.Kind, r.Permits, r.Limit} }

// Mixes reports whether two requests may stand in one queue: exclusive and shared ones, or permits of one limit. The
// limit is 0 for the former, so comparing limits is enough. A request that does not mix is refused with
// backend.ErrLimitMismatch if possible, and blocks like an exclusive one if it stands in the queue.
func (u Use) Mixes(other Use) bool { return u.Limit == other.Limit }

// String describes the use, such as "shared" or "permits, 2 of 8".
func (u Use) String() string {
	if u.Kind == backend.KindPermits {
		return fmt.Sprintf("permits, %d of %d", u.Permits, u.Limit)
	}
	return u.Kind.String()
}

// Blockers returns the entries before u that keep it waiting, in order of arrival: at least one of them must go
// before u can be granted. It is empty if u is granted.
//
// The set is minimal and has the nearest entries, so that an entry that goes wakes few later ones: a single entry,
// or, for permits, as many entries as together take too many. A waiter that watched the whole queue
// would be woken by every release, and a thousand waiters with it. The result is a part of before, and shares its
// memory.
//
// For permits of a limit of 8, behind entries that take 3, 3 and 2:
//
//	u takes 1: blocked by all three, since 1 + 2 + 3 + 3 > 8, and the least set from the near end is the whole queue
//	u takes 4: blocked by the two nearest, since 4 + 2 + 3 > 8
func Blockers[E any](before []E, useOf func(E) Use, u Use) []E {
	left := u.Limit - u.Permits
	for i, e := range slices.Backward(before) {
		switch b := useOf(e); {
		case !b.Mixes(u), b.Kind == backend.KindExclusive, u.Kind == backend.KindExclusive:
			return before[i : i+1]
		case u.Kind == backend.KindPermits:
			if left -= b.Permits; left < 0 {
				return before[i:]
			}
		}
	}
	return nil
}

// Holders returns the entries of a queue that hold: the entries without blockers, which are the first ones. The
// result is a part of queue, and shares its memory.
func Holders[E any](queue []E, useOf func(E) Use) []E {
	left := 0
	for i, e := range queue {
		first, u := useOf(queue[0]), useOf(e)
		switch {
		case i == 0:
			left = u.Limit
		case !u.Mixes(first), u.Kind == backend.KindExclusive, first.Kind == backend.KindExclusive:
			return queue[:i]
		}
		if left -= u.Permits; left < 0 {
			return queue[:i]
		}
	}
	return queue
}
