package etcd

import (
	"math"
	"strconv"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// The use that a request makes of a name, as etcd can compare it. Package kit has the rule that decides who holds
// (Use, Blockers, Holders); this file writes the same rule as comparisons and reads of key ranges, so that etcd
// applies it in the transaction that writes the key. To make that possible the kind and the permits stand in the key:
// exclusive requests directly below the name's directory, shared ones below +shared/, permits below
// +permits/<limit>/<permits>/.
// The value cannot hold them: a comparison orders values as a whole and cannot look into them.
//
// Comparisons err on the safe side: where they fail without cause (a foreign key, permits that would fit) the queue
// is read and sinceRead decides; where they hold, no key excludes the request.

// use is a request's kind, limit and permits; see kit.Use for the rule. Limit is 0 for exclusive and shared uses,
// which may share a queue; permits share one only with permits of their own limit.
type use kit.Use

// The directories below a name's own.
const (
	sharedDir  = "+shared/"
	permitsDir = "+permits/"
)

// part returns the path between a name's directory and the last part of a key. useOf is its inverse.
func (u use) part() string {
	switch u.Kind {
	case backend.KindShared:
		return sharedDir
	case backend.KindPermits:
		return u.limitDir() + strconv.Itoa(u.Permits) + "/"
	}
	return ""
}

// limitDir is the directory of all permits of one limit.
func (u use) limitDir() string { return permitsDir + strconv.Itoa(u.Limit) + "/" }

// useOf parses the result of part. An unknown part, a later version's kind for example, counts as exclusive: then
// nobody holds beside it, which is safe whatever it means.
func useOf(part string) use {
	if part == sharedDir {
		return use{Kind: backend.KindShared}
	}
	if rest, ok := strings.CutPrefix(part, permitsDir); ok {
		limit, permits, _ := strings.Cut(strings.TrimSuffix(rest, "/"), "/")
		c := use{Kind: backend.KindPermits}
		c.Limit, _ = strconv.Atoi(limit)
		c.Permits, _ = strconv.Atoi(permits)
		if 1 <= c.Permits && c.Permits <= c.Limit && c.part() == part {
			return c
		}
	}
	return use{}
}

// kitUse converts the entry for kit.Blockers and kit.Holders.
func (e entry) kitUse() kit.Use { return kit.Use(e.use) }

// blockers returns the entries that block a request: the nearest ones, of which at least one must go. It is empty if
// the request holds.
func (u use) blockers(before []entry) []entry { return kit.Blockers(before, entry.kitUse, kit.Use(u)) }

// mismatch returns an error that wraps ErrLimitMismatch, and names the entry, if the queue of a name has an entry
// that the request does not mix with. It takes the whole queue: waiters, too, fix the use of a name.
func (u use) mismatch(name string, queue []entry) error {
	for _, e := range queue {
		if e.use.Limit != u.Limit {
			return &backend.LimitError{Name: name, Kind: e.use.Kind, Limit: e.use.Limit, Holder: e.value.Owner}
		}
	}
	return nil
}

// holders returns the entries of a queue that hold, which are the first ones.
func holders(queue []entry) []entry { return kit.Holders(queue, entry.kitUse) }

// free returns comparisons that are true only if no key in dir blocks the request, and key is vacant. For a shared
// request these are three: no key before the directory of shared keys, no key behind it, and the key. Every other
// request asks for an empty directory: comparisons cannot count permits, so permits beside others take a second
// request.
func (u use) free(dir, key string) []clientv3.Cmp {
	if u.Kind == backend.KindShared {
		return append(nothingBeside(dir, sharedDir), vacant(key))
	}
	return []clientv3.Cmp{nothingBelow(dir)}
}

// mixes returns comparisons that are true only if no key in dir is of a kind or limit that the request does not mix
// with.
func (u use) mixes(dir string) []clientv3.Cmp {
	if u.Kind == backend.KindPermits {
		return nothingBeside(dir, u.limitDir())
	}
	return []clientv3.Cmp{nothingBelow(dir + permitsDir)}
}

// nothingBelow is true if no key begins with dir. It compares the create revision of every key in the range with 0,
// which no key that exists has; on an empty range etcd finds it true.
func nothingBelow(dir string) clientv3.Cmp {
	return vacant(dir).WithPrefix()
}

// nothingBeside is true if all keys below dir are below its directory part: no key before that range, no key behind
// it.
func nothingBeside(dir, part string) []clientv3.Cmp {
	return []clientv3.Cmp{
		vacant(dir).WithRange(dir + part),
		vacant(clientv3.GetPrefixRangeEnd(dir + part)).WithRange(clientv3.GetPrefixRangeEnd(dir)),
	}
}

// unchanged is true if no key below dir was created after revision. Keys that went since do not matter: they make room.
func unchanged(dir string, revision int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(dir), "<", revision+1).WithPrefix()
}

// ahead reads what may keep the request out of dir: the latest keys before its own, and only as many as can matter.
// That is one for an exclusive request, the last exclusive one for a shared request, and for permits as many keys as
// exceed the limit if each takes one permit. So the answer is as small in a queue of a thousand as in one of two,
// though etcd sorts the range for it.
//
// revision is where its own key was created; 0 in the transaction that creates it, which reads that key too. Foreign
// keys may hide a blocker: see attempt.before.
func (u use) ahead(dir string, revision int64) clientv3.Op {
	from, end, nearest := dir, clientv3.GetPrefixRangeEnd(dir), 1
	switch u.Kind {
	case backend.KindShared:
		// Behind the shared keys stand the exclusive requests: there are no permits beside a shared hold.
		from = clientv3.GetPrefixRangeEnd(dir + sharedDir)
	case backend.KindPermits:
		from, end = u.permitsRange(dir)
		// With one permit each, that many before it and its own are one more than the limit: the nearest blockers are
		// among them.
		nearest = min(u.Limit-u.Permits, math.MaxInt32) + 1
	}
	options := append(clientv3.WithLastCreate(), clientv3.WithRange(end))
	switch {
	case revision != 0:
		options = append(options, clientv3.WithMaxCreateRev(revision-1))
	// Ours is the last one in the range, and counts.
	case u.Kind != backend.KindShared:
		nearest++
	}
	return clientv3.OpGet(from, append(options, clientv3.WithLimit(int64(nearest)))...)
}

// permitsRange is the range of all keys with permits of the use's limit.
func (u use) permitsRange(dir string) (from, end string) {
	return dir + u.limitDir(), clientv3.GetPrefixRangeEnd(dir + u.limitDir())
}

// watched returns the key, or the range of keys, to watch for the deletion of any of these blockers.
//
// Where several requests block permits, the end of every hold wakes all waiters, and the waiters that may now hold
// read the queue. Watching each blocker separately costs five times the messages beside eight.
func (u use) watched(dir string, blockers []entry) (key, end string) {
	if len(blockers) == 1 {
		return blockers[0].key, ""
	}
	return u.permitsRange(dir)
}
