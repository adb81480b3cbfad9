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

// claim is what a request wants of a name, see kit.Use for the rule. It stands in the request's key, between the
// directory and the last part, so that comparisons of key ranges can tell the kinds apart without reading a value.
type claim kit.Use

// The directories below a name's own.
const (
	sharedDir  = "+shared/"
	permitsDir = "+permits/"
)

// part returns the path between a name's directory and the last part of a key.
func (c claim) part() string {
	switch c.Kind {
	case backend.KindShared:
		return sharedDir
	case backend.KindPermits:
		return c.limitDir() + strconv.Itoa(c.Permits) + "/"
	}
	return ""
}

// limitDir is the directory of all permits of one limit.
func (c claim) limitDir() string { return permitsDir + strconv.Itoa(c.Limit) + "/" }

// claimOf reads what part wrote. What is not understood, a later version's kind for example, counts as exclusive.
func claimOf(part string) claim {
	if part == sharedDir {
		return claim{Kind: backend.KindShared}
	}
	if rest, ok := strings.CutPrefix(part, permitsDir); ok {
		limit, permits, _ := strings.Cut(strings.TrimSuffix(rest, "/"), "/")
		c := claim{Kind: backend.KindPermits}
		c.Limit, _ = strconv.Atoi(limit)
		c.Permits, _ = strconv.Atoi(permits)
		if 1 <= c.Permits && c.Permits <= c.Limit && c.part() == part {
			return c
		}
	}
	return claim{}
}

func (e entry) use() kit.Use { return kit.Use(e.claim) }

// blockers are those of the entries before a claim that keep it out.
func (c claim) blockers(before []entry) []entry { return kit.Blockers(before, entry.use, kit.Use(c)) }

// mismatch is an ErrLimitMismatch if the queue of a name has something that the claim does not mix with.
func (c claim) mismatch(name string, queue []entry) error {
	for _, e := range queue {
		switch {
		case e.claim.Limit == c.Limit:
		case e.claim.Limit == 0:
			return fmt.Errorf("%w: %q is in use without permits, by %s", backend.ErrLimitMismatch, name, e.value.Owner)
		default:
			return fmt.Errorf("%w: %q has %d permits, of which %s asked for %d",
				backend.ErrLimitMismatch, name, e.claim.Limit, e.value.Owner, e.claim.Permits)
		}
	}
	return nil
}

// holders are the entries of a queue that hold.
func holders(queue []entry) []entry { return kit.Holders(queue, entry.use) }

// free is true only if nothing in dir keeps the claim out, and key is vacant. Permits cannot be counted by comparisons:
// it asks for an empty directory then, and what fits beside others takes a second request.
func (c claim) free(dir, key string) []clientv3.Cmp {
	if c.Kind == backend.KindShared {
		return append(nothingBeside(dir, sharedDir), vacant(key))
	}
	return []clientv3.Cmp{nothingBelow(dir)}
}

// mixes is true only if nothing in dir is of a kind or limit that the claim does not mix with.
func (c claim) mixes(dir string) []clientv3.Cmp {
	if c.Kind == backend.KindPermits {
		return nothingBeside(dir, c.limitDir())
	}
	return []clientv3.Cmp{nothingBelow(dir + permitsDir)}
}

func nothingBelow(dir string) clientv3.Cmp {
	return vacant(dir).WithPrefix()
}

// nothingBeside is true if all keys below dir are below its directory part.
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

// ahead reads what may keep the claim out of dir. revision is where its own key was created; 0 in the transaction that
// creates it, which reads that key too. Foreign keys may hide what is looked for: see attempt.before.
func (c claim) ahead(dir string, revision int64) clientv3.Op {
	from, end, nearest := dir, clientv3.GetPrefixRangeEnd(dir), 1
	switch c.Kind {
	case backend.KindShared:
		from = clientv3.GetPrefixRangeEnd(dir + sharedDir) // exclusive requests: there are no permits beside us
	case backend.KindPermits:
		from, end = c.permitsRange(dir)
		nearest = min(c.Limit-c.Permits, math.MaxInt32) + 1 // so many take too many, be it one permit each
	}
	options := append(clientv3.WithLastCreate(), clientv3.WithRange(end))
	switch {
	case revision != 0:
		options = append(options, clientv3.WithMaxCreateRev(revision-1))
	case c.Kind != backend.KindShared: // ours is the last one in the range
		nearest++
	}
	return clientv3.OpGet(from, append(options, clientv3.WithLimit(int64(nearest)))...)
}

// permitsRange holds all keys with permits of the claim's limit.
func (c claim) permitsRange(dir string) (from, end string) {
	return dir + c.limitDir(), clientv3.GetPrefixRangeEnd(dir + c.limitDir())
}

// watched returns the key, or the range of keys, where the deletion of any of these blockers shows.
//
// Where more than one keeps permits out, the end of every hold is told to all that wait, of whom those ask the server
// whom it may let in. Watching each blocker by itself was rejected: beside eight it cost five times the messages.
func (c claim) watched(dir string, blockers []entry) (key, end string) {
	if len(blockers) == 1 {
		return blockers[0].key, ""
	}
	return c.permitsRange(dir)
}
