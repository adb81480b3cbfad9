package zookeeper

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock/backend"
)

// Kinds. What an entry asks for stands at the end of its request id in the node's name, so that one read of the queue
// shows who holds and who waits:
//
//	4f2a….0000000003            exclusive
//	4f2a…-shared.0000000004     shared
//	4f2a…-2of8.0000000005       2 of 8 permits
//
// A client that knows no kinds reads all of these as exclusive entries with longer ids, as long as those have 128 bytes
// at most, and waits behind them.

// use is what an entry asks for. That of an exclusive one is the zero value.
type use struct {
	kind           backend.Kind
	permits, limit int // of permits; 0 otherwise
}

func useOf(r backend.Request) use { return use{r.Kind, r.Permits, r.Limit} }

// mixes reports whether two entries may stand in one queue: exclusive and shared ones, or permits of one limit.
func (u use) mixes(other use) bool { return u.limit == other.limit }

// valid checks the numbers. The error wraps backend.ErrInvalidOption.
func (u use) valid() error {
	bad := func(what string, value int, why string) error {
		return &backend.InvalidError{Kind: backend.ErrInvalidOption, What: what, Value: strconv.Itoa(value), Why: why}
	}
	switch {
	case u.kind != backend.KindPermits && u.permits != 0:
		return bad("permits", u.permits, "only permits have them")
	case u.kind != backend.KindPermits && u.limit != 0:
		return bad("limit of permits", u.limit, "only permits have them")
	case u.kind == backend.KindPermits && u.permits < 1:
		return bad("permits", u.permits, "it is less than 1")
	case u.permits > u.limit:
		return bad("permits", u.permits, fmt.Sprintf("it is more than the limit of %d", u.limit))
	}
	return nil
}

func (u use) String() string {
	if u.kind == backend.KindPermits {
		return fmt.Sprintf("permits, %d of %d", u.permits, u.limit)
	}
	return u.kind.String()
}

// The marks in names. An exclusive entry is marked only if its request id ends like a mark.
const (
	markShared    = "-shared"
	markExclusive = "-exclusive"
)

// nodeName returns what the node of a request is called, without the number that the server adds.
func nodeName(r backend.Request) string {
	switch r.Kind {
	case backend.KindShared:
		return r.RequestID + markShared
	case backend.KindPermits:
		return fmt.Sprintf("%s-%dof%d", r.RequestID, r.Permits, r.Limit)
	}
	if id, _ := cutMark(r.RequestID); id != r.RequestID {
		return r.RequestID + markExclusive
	}
	return r.RequestID
}

// cutMark is the reverse of nodeName. What is no mark, or has no request id before it, belongs to the id.
func cutMark(name string) (requestID string, u use) {
	at := max(strings.LastIndexByte(name, '-'), 0)
	id, mark := name[:at], name[at:]
	switch {
	case backend.ValidateRequestID(id) != nil:
	case mark == markExclusive:
		return id, use{}
	case mark == markShared:
		return id, use{kind: backend.KindShared}
	default:
		n, limit, _ := strings.Cut(mark[1:], "of")
		u.permits, _ = strconv.Atoi(n)
		u.limit, _ = strconv.Atoi(limit)
		u.kind = backend.KindPermits
		if 1 <= u.permits && u.permits <= u.limit && mark == fmt.Sprintf("-%dof%d", u.permits, u.limit) {
			return id, u
		}
	}
	return name, use{}
}

// blockers returns what keeps e waiting among the entries before it, oldest first: a set of which at least one must go
// before e can be granted. It is empty if e is granted. Nobody overtakes: entries that wait count like those that hold.
//
// The set is as small as it can be and made of the nearest entries, so that one who goes wakes few of those behind. For
// one permit of n it has as many entries as are needed to have n permits between them; what is farther away may come
// and go.
func blockers(front []entry, e entry) []entry {
	var some []entry
	left := e.limit - e.permits
	for _, b := range slices.Backward(front) {
		switch {
		case !b.mixes(e.use), b.kind == backend.KindExclusive, e.kind == backend.KindExclusive:
			return []entry{b}
		case e.kind == backend.KindPermits:
			some = append(some, b)
			if left -= b.permits; left < 0 {
				return some
			}
		}
	}
	return nil
}

// granted returns how many entries at the head of a queue hold: those without blockers. Whatever stands behind the
// first that waits waits, too.
func granted(queue []entry) int {
	left := 0
	for i, e := range queue {
		switch first := queue[0]; {
		case i == 0:
			left = e.limit
		case !e.mixes(first.use), e.kind == backend.KindExclusive, first.kind == backend.KindExclusive:
			return i
		}
		if left -= e.permits; left < 0 {
			return i
		}
	}
	return len(queue)
}
