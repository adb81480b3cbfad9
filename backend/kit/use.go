package kit

// The rule of who holds in a queue. It is needed by drivers whose service keeps entries in order of arrival and leaves
// it to the clients to read them: every client has to come to the same conclusion from the same queue, so the rule is
// here and in no driver.
//
//	queue:     shared  shared  exclusive  shared
//	holds:       yes     yes      no        no     (two readers, a writer, a reader)
//	blockers:     -       -     2nd        3rd

import (
	"fmt"
	"slices"

	"github.com/fencelock/fencelock/backend"
)

// Use is what a request wants of a name. Permits and Limit belong to backend.KindPermits and are 0 otherwise.
//
// One rule decides for all kinds, in a queue in order of arrival: a request holds as soon as nothing that stands before
// it excludes it. Entries before it can only disappear, so a holder keeps what it has whatever comes later, and nobody
// overtakes: those that wait count like those that hold. A rule that counted holders only would let readers pass a
// waiting writer for ever.
type Use struct {
	Kind           backend.Kind
	Permits, Limit int
}

// UseOf returns what a request wants.
func UseOf(r backend.Request) Use { return Use{r.Kind, r.Permits, r.Limit} }

// Mixes reports whether two requests may stand in one queue: exclusive and shared ones, or permits of one limit. The
// limit is 0 for the former, so comparing limits is enough. A request that does not mix is refused with
// backend.ErrLimitMismatch where it can be, and blocks like an exclusive one where it is found in the queue.
func (u Use) Mixes(other Use) bool { return u.Limit == other.Limit }

// String says what is asked for, such as "shared" or "permits, 2 of 8".
func (u Use) String() string {
	if u.Kind == backend.KindPermits {
		return fmt.Sprintf("permits, %d of %d", u.Permits, u.Limit)
	}
	return u.Kind.String()
}

// Blockers returns what keeps u waiting among the entries before it, in order of arrival: a set of which at least one
// must go before u can be granted. It is empty if u is granted.
//
// The set is as small as it can be and made of the nearest entries, so that an entry that goes wakes few of those
// behind: a single entry, or, for permits, as many as take too many between them. A waiter that watched the whole queue
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

// Holders returns the entries of a queue that hold: those without blockers, which are the first ones. The result is a
// part of queue, and shares its memory.
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
