package zookeeper

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
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

func (e entry) use() kit.Use { return e.Use }

// blockers are those of the entries before e that keep it waiting.
func blockers(front []entry, e entry) []entry { return kit.Blockers(front, entry.use, e.Use) }

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
func cutMark(name string) (requestID string, u kit.Use) {
	at := strings.LastIndexByte(name, '-')
	if at < 0 {
		return name, u
	}
	id, mark := name[:at], name[at:]
	n, limit, counts := strings.Cut(mark[1:], "of")
	switch {
	case mark != markExclusive && mark != markShared && !counts, backend.ValidateRequestID(id) != nil:
	case mark == markExclusive:
		return id, kit.Use{}
	case mark == markShared:
		return id, kit.Use{Kind: backend.KindShared}
	default:
		u.Permits, _ = strconv.Atoi(n)
		u.Limit, _ = strconv.Atoi(limit)
		u.Kind = backend.KindPermits
		if 1 <= u.Permits && u.Permits <= u.Limit && mark == fmt.Sprintf("-%dof%d", u.Permits, u.Limit) {
			return id, u
		}
	}
	return name, kit.Use{}
}
