package etcd

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// What a request wants of a name, as etcd can compare it. Package kit has the rule that decides who holds (Use,
// Blockers, Holders); this file writes the same rule as comparisons and reads of key ranges, so that etcd applies it in
// the transaction that writes the key. To make that possible the kind and the permits stand in the key: exclusive
// requests directly below the name's directory, shared ones below +shared/, permits below +permits/<limit>/<permits>/.
// Leaving them in the value would not do: a comparison orders values as a whole and cannot look into them.
//
// Comparisons are on the safe side: where they fail for nothing (a foreign key, permits that would fit) the queue is
// read and sinceRead decides; where they hold, nothing excludes the request.

// use is what a request wants of a name, see kit.Use for the rule. Limit is 0 for exclusive and shared uses, which may
// share a queue; permits share one only with permits of their own limit.
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

// useOf reads what part wrote. What is not understood, a later version's kind for example, counts as exclusive: then
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

// kitUse is the entry as kit.Blockers and kit.Holders want it.
func (e entry) kitUse() kit.Use { return kit.Use(e.use) }

// blockers returns which of the entries before a request keep it out: the nearest ones, of which at least one must go.
// It is empty if the request holds.
func (u use) blockers(before []entry) []entry { return kit.Blockers(before, entry.kitUse, kit.Use(u)) }

// mismatch is an error that wraps ErrLimitMismatch, and names who is in the way, if the queue of a name has something
// that the request does not mix with. It is asked of the whole queue: also waiters decide what a name is used for.
func (u use) mismatch(name string, queue []entry) error {
	for _, e := range queue {
		switch {
		case e.use.Limit == u.Limit:
		case e.use.Limit == 0:
			return fmt.Errorf("%w: %q is in use without permits, by %s", backend.ErrLimitMismatch, name, e.value.Owner)
		default:
			return fmt.Errorf("%w: %q has %d permits, of which %s asked for %d",
				backend.ErrLimitMismatch, name, e.use.Limit, e.value.Owner, e.use.Permits)
		}
	}
	return nil
}

// holders returns the entries of a queue that hold, which are the first ones.
func holders(queue []entry) []entry { return kit.Holders(queue, entry.kitUse) }

// free returns comparisons that are true only if nothing in dir keeps the request out, and key is vacant. For a shared
// request these are three: nothing before the directory of shared keys, nothing behind it, and the key. Every other
// request asks for an empty directory: permits cannot be counted by comparisons, and what fits beside others takes a
// second request.
func (u use) free(dir, key string) []clientv3.Cmp {
	if u.Kind == backend.KindShared {
		return append(nothingBeside(dir, sharedDir), vacant(key))
	}
	return []clientv3.Cmp{nothingBelow(dir)}
}

// mixes returns comparisons that are true only if nothing in dir is of a kind or limit that the request does not mix
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

// nothingBeside is true if all keys below dir are below its directory part: nothing before that range, nothing behind
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
// That is one for an exclusive request, the last exclusive one for a shared request, and for permits as many as take
// too many if each takes one. So the answer is as small in a queue of a thousand as in one of two, though etcd sorts
// the range for it.
//
// revision is where its own key was created; 0 in the transaction that creates it, which reads that key too. Foreign
// keys may hide what is looked for: see attempt.before.
func (u use) ahead(dir string, revision int64) clientv3.Op {
	from, end, nearest := dir, clientv3.GetPrefixRangeEnd(dir), 1
	switch u.Kind {
	case backend.KindShared:
		// Behind the shared keys stand the exclusive requests: there are no permits beside a shared hold.
		from = clientv3.GetPrefixRangeEnd(dir + sharedDir)
	case backend.KindPermits:
		from, end = u.permitsRange(dir)
		// With one permit each, so many before it and its own are one more than the limit: the nearest blockers are
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

// watched returns the key, or the range of keys, where the deletion of any of these blockers shows.
//
// Where more than one keeps permits out, all who wait are told of the end of every hold, and those ask the server that
// it may let in. Watching each blocker by itself was rejected: beside eight it cost five times the messages.
func (u use) watched(dir string, blockers []entry) (key, end string) {
	if len(blockers) == 1 {
		return blockers[0].key, ""
	}
	return u.permitsRange(dir)
}
