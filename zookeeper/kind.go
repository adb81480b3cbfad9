// This file writes the kind of a request into the name of its node, and reads it back.
//
// ZooKeeper returns the names of a node's children in one request and the content of each only in another. So all
// facts that decide the holders have to be part of the name: with the use in the content, a waiter behind n entries
// would send n more requests before it knew whether it holds.

package zookeeper

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// The end of the request id in a node's name is the kind of the entry:
//
//	4f2a….0000000003            exclusive
//	4f2a…-shared.0000000004     shared
//	4f2a…-2of8.0000000005       2 of 8 permits
//
// A client that knows no kinds reads all of these as exclusive entries with longer ids, if the ids have 128 bytes at
// most, and waits behind them. It is refused more often than necessary and never holds beside another holder.

// use is the accessor for kit's queue rules.
func (e entry) use() kit.Use { return e.Use }

// blockers returns the entries before e for which it waits, as few and as near as possible; see kit.Blockers.
func blockers(front []entry, e entry) []entry { return kit.Blockers(front, entry.use, e.Use) }

// The marks in names. An exclusive entry is marked only if its request id itself ends like a mark, because cutMark
// would otherwise return a shorter id.
const (
	markShared    = "-shared"
	markExclusive = "-exclusive"
)

// nodeName returns the name of a request's node, without the number that the server adds. Different requests
// have different names, and cutMark reads each back as it was.
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

// cutMark is the reverse of nodeName. Permits count as a mark only in the one spelling that nodeName writes, without
// leading zeros: with two names for one use, foreign nodes could pass for entries. A suffix that is no mark, or has no
// valid request id before it, belongs to the id. It is called for every entry of every queue read, and so has no
// regular expression.
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
