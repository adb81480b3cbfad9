package etcd

import (
	"cmp"
	"encoding/json"
	"math"
	"math/rand/v2"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
)

// The keys in etcd. A name has a directory, and every request that holds it or waits has one key there:
//
//	fencelock/+space                       the token space: see history.go
//	fencelock/+locks/orders%2F7/c4         {"fencelock":3,"request":"4f2a…","owner":"host/42/…","hold":"…"}
//	fencelock/+locks/orders%2F7/forced     why holds were taken away, for a minute
//	fencelock/+locks/catalog/+shared/c4    a shared hold
//	fencelock/+locks/gpu/+permits/8/2/c4   two of eight permits
//	fencelock/+over/ATTEMPT                an attempt that has ended, of which an Enter may arrive late
//	fencelock/+sessions/LEASE              what its client is notified of: see watch.go
//
// What follows the prefix begins with "+", which no part of a prefix does: so no prefix reaches into another. The kind
// and the permits stand in the key because a comparison cannot look into a value.
//
// The last part of a key, its station, is a small number without a meaning. Keys are used again, since etcd remembers
// deleted keys until it is compacted: with a separate key for each request an acquire took 1.7 ms at first and 23.6 ms
// after 65,000. A driver has one station for all names. A request that meets another one there takes the station that
// follows from its attempt, so that all Enters of an attempt write the same two keys.

const stations = 256

// dir returns the directory of a name.
func (e *service) dir(name string) string { return e.locksDir() + url.PathEscape(name) + "/" }

func (e *service) locksDir() string { return e.prefix + "+locks/" }

// forcedKey is where a forced release leaves its reason. It is in the directory, so that a watch of the name shows it.
func (e *service) forcedKey(name string) string { return e.dir(name) + "forced" }

// overKey is the mark of an attempt that has ended. Every Enter compares that it does not exist.
func (e *service) overKey(attempt string) string { return e.prefix + "+over/" + attempt }

// sessionKey is on the lease that it names. Its client watches it.
func (e *service) sessionKey(lease clientv3.LeaseID) string {
	return e.prefix + "+sessions/" + strconv.FormatInt(int64(lease), 16)
}

// stationOf is the second station of an attempt. The engine counts attempts in base 36, so that those in a row, which
// may wait for one name, have different stations.
func (e *service) stationOf(attempt string) int64 {
	n, _ := strconv.ParseUint(attempt[max(0, len(attempt)-12):], 36, 64) // without a number they meet, and find others
	return (e.station + 1 + int64(n%(stations-1))) % stations
}

// use is the kind and the permits of a request, see kit.Use for the rule.
type use kit.Use

const (
	sharedDir  = "+shared/"
	permitsDir = "+permits/"
)

// part returns the path between a name's directory and the station. useOf is its inverse.
func (u use) part() string {
	switch u.Kind {
	case backend.KindShared:
		return sharedDir
	case backend.KindPermits:
		return u.limitDir() + strconv.Itoa(u.Permits) + "/"
	}
	return ""
}

func (u use) limitDir() string { return permitsDir + strconv.Itoa(u.Limit) + "/" }

// useOf reads what part wrote. An unknown part, a later version's kind for example, counts as exclusive: it then
// excludes all other holders.
func useOf(part string) use {
	if part == sharedDir {
		return use{Kind: backend.KindShared}
	}
	if rest, ok := strings.CutPrefix(part, permitsDir); ok {
		limit, permits, _ := strings.Cut(strings.TrimSuffix(rest, "/"), "/")
		u := use{Kind: backend.KindPermits}
		u.Limit, _ = strconv.Atoi(limit)
		u.Permits, _ = strconv.Atoi(permits)
		if 1 <= u.Permits && u.Permits <= u.Limit && u.part() == part {
			return u
		}
	}
	return use{}
}

func usedBy(g backend.Grant) use { return use{Kind: g.Kind, Permits: g.Permits, Limit: g.Limit} }

// value is the value of a request's key, as JSON. It begins with valueBegin and the request id: see standsFor.
type value struct {
	Format   int               `json:"fencelock"` // 3
	Request  string            `json:"request"`
	Owner    string            `json:"owner,omitempty"`
	HoldID   string            `json:"hold,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	Nonce    string            `json:"nonce,omitempty"` // Grant.Nonce; missing from clients of before 2026-11-25
	Since    int64             `json:"since,omitempty"` // when the request came, in Unix milliseconds by its client's clock
}

// since is when the request came. It is zero if an earlier version wrote the key.
func (v value) since() time.Time {
	if v.Since == 0 {
		return time.Time{}
	}
	return time.UnixMilli(v.Since)
}

const valueBegin = `{"fencelock":3,"request":"`

func (v value) nonce() fencing.Nonce {
	n, _ := fencing.ParseNonce(v.Nonce) // zero if it is not one
	return n
}

// entry is a key of the queue.
type entry struct {
	key      string
	use      use
	revision int64 // at which it was created
	modified int64
	lease    clientv3.LeaseID
	value    value
}

func (x entry) kitUse() kit.Use { return kit.Use(x.use) }

func (x entry) incarnation() string {
	return strconv.FormatInt(x.revision, 10) + "@" + x.key[strings.LastIndexByte(x.key, '/')+1:]
}

func (x entry) token() fencing.Token { return tokenOf(x.use.Kind, x.revision) }

// tokenOf returns the token of a hold with a key that was created at revision. Tokens of shared holds and permits come
// from the same count, with the mark of tokens that do not fence.
func tokenOf(kind backend.Kind, revision int64) fencing.Token {
	token := fencing.Token(revision)
	if kind != backend.KindExclusive {
		token = token.NotExclusive()
	}
	return token
}

// placeOf names a key in one of its lives: what a waiter watches, and looks for.
func placeOf(key string, revision int64) string { return key + "\n" + strconv.FormatInt(revision, 10) }

// keyAt returns the key and the create revision that a place names; the revision is 0 if the place is empty.
func keyAt(place string) (key string, revision int64) {
	key, text, _ := strings.Cut(place, "\n")
	revision, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		revision = 0
	}
	return key, revision
}

// keyOf returns the key and the create revision that an incarnation names; the revision is 0 if the incarnation is
// empty.
func (e *service) keyOf(name string, u use, incarnation string) (key string, revision int64) {
	text, station, _ := strings.Cut(incarnation, "@")
	revision, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		revision = 0
	}
	return e.dir(name) + u.part() + station, revision
}

// entryOf reads a key, and reports whether it is one of ours. Foreign keys block no request, and the driver does not
// delete them: keys without a lease, values that are not JSON, other formats.
func (e *service) entryOf(kv *mvccpb.KeyValue) (entry, bool) {
	x := entry{
		key: string(kv.Key), revision: kv.CreateRevision, modified: kv.ModRevision, lease: clientv3.LeaseID(kv.Lease),
	}
	_, within, _ := strings.Cut(strings.TrimPrefix(x.key, e.locksDir()), "/")
	x.use = useOf(within[:strings.LastIndexByte(within, '/')+1])
	return x, kv.Lease != 0 && json.Unmarshal(kv.Value, &x.value) == nil && x.value.Format == 3
}

// queueOf returns the entries among kvs in the order of the queue.
func (e *service) queueOf(kvs []*mvccpb.KeyValue) []entry {
	queue := make([]entry, 0, len(kvs))
	for _, kv := range kvs {
		if x, ok := e.entryOf(kv); ok {
			queue = append(queue, x)
		}
	}
	slices.SortFunc(queue, func(a, b entry) int { return cmp.Compare(a.revision, b.revision) })
	return queue
}

// nameOf returns the name of the directory that has a key. ok is false for foreign keys.
func (e *service) nameOf(key string) (name string, ok bool) {
	rest, ours := strings.CutPrefix(key, e.locksDir())
	dir, _, within := strings.Cut(rest, "/")
	name, err := url.PathUnescape(dir)
	return name, ours && within && err == nil
}

func holders(queue []entry) []entry { return kit.Holders(queue, entry.kitUse) }

// blockers returns which of the entries before a request keep it out: the nearest ones, of which at least one must go.
func (u use) blockers(before []entry) []entry { return kit.Blockers(before, entry.kitUse, kit.Use(u)) }

// mismatch returns an error if the queue of a name has an entry that is incompatible with the request. Waiters count
// too.
func (u use) mismatch(name string, queue []entry) error {
	for _, x := range queue {
		if x.use.Limit != u.Limit {
			return &backend.LimitError{Name: name, Kind: x.use.Kind, Limit: x.use.Limit, Holder: x.value.Owner}
		}
	}
	return nil
}

// vacant is true if there is no such key: etcd takes its create revision for 0.
func vacant(key string) clientv3.Cmp { return created(key, 0) }

// created is true if a key was created at that revision. No two lives of a key share one.
func created(key string, revision int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(key), "=", revision)
}

// asRead is true if a key has not been written since it was read. Whatever writes a key that exists compares this: a
// late transaction must not take a key back that has moved to another lease since.
func asRead(key string, modified int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(key), "=", modified)
}

// standsFor is true if a key stands for a request. etcd compares whole values, by their order: the value lies between
// its known beginning with the quotation mark that ends the id, and the same with the next character.
func standsFor(key, requestID string) []clientv3.Cmp {
	begin := valueBegin + requestID
	return []clientv3.Cmp{
		clientv3.Compare(clientv3.Value(key), ">", begin+`"`), clientv3.Compare(clientv3.Value(key), "<", begin+"#"),
	}
}

// unchanged is true if no key below dir was created after revision. Keys that went since make room.
func unchanged(dir string, revision int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(dir), "<", revision+1).WithPrefix()
}

// nothingBeside is true if all keys below dir are below its directory part.
func nothingBeside(dir, part string) []clientv3.Cmp {
	end := clientv3.GetPrefixRangeEnd(dir + part)
	return []clientv3.Cmp{
		vacant(dir).WithRange(dir + part), vacant(end).WithRange(clientv3.GetPrefixRangeEnd(dir)),
	}
}

// free returns comparisons that are true only if no key in dir keeps the request out. Permits cannot be counted by
// comparisons: what fits beside others takes a second transaction.
func (u use) free(dir string) []clientv3.Cmp {
	if u.Kind == backend.KindShared {
		return nothingBeside(dir, sharedDir)
	}
	return []clientv3.Cmp{vacant(dir).WithPrefix()}
}

// mixes returns comparisons that are true only if no key in dir is of a limit that the request does not mix with.
func (u use) mixes(dir string) []clientv3.Cmp {
	if u.Kind == backend.KindPermits {
		return nothingBeside(dir, u.limitDir())
	}
	return []clientv3.Cmp{vacant(dir + permitsDir).WithPrefix()}
}

// ahead reads what may keep the request out of dir: the latest keys before its own, and only as many as can matter. So
// the answer is as small in a queue of a thousand as in one of two. revision is where its own key was created; 0 in the
// transaction that creates it, which reads that key too.
func (u use) ahead(dir string, revision int64) clientv3.Op {
	from, end, nearest := dir, clientv3.GetPrefixRangeEnd(dir), 1
	switch u.Kind {
	case backend.KindShared:
		from = clientv3.GetPrefixRangeEnd(dir + sharedDir) // the exclusive requests
	case backend.KindPermits:
		from = dir + u.limitDir()
		end = clientv3.GetPrefixRangeEnd(from)
		nearest = min(u.Limit-u.Permits, math.MaxInt32) + 1 // of one permit each
	}
	o := append(clientv3.WithLastCreate(), clientv3.WithRange(end))
	if revision != 0 {
		o = append(o, clientv3.WithMaxCreateRev(revision-1))
	} else if u.Kind != backend.KindShared {
		nearest++
	}
	return clientv3.OpGet(from, append(o, clientv3.WithLimit(int64(nearest)))...)
}

// behind returns the range that a waiter watches: the one key that keeps it out, or all permits where several do.
// Watching each of eight separately took five times the messages.
func (u use) behind(dir string, blockers []entry) string {
	if len(blockers) == 1 {
		return blockers[0].key
	}
	return dir + u.limitDir()
}

// put writes the value of a request on a lease.
func put(key string, v value, lease clientv3.LeaseID) clientv3.Op {
	text, _ := json.Marshal(v) // of text only, which can be encoded
	return clientv3.OpPut(key, string(text), clientv3.WithLease(lease))
}

// freeKey returns a key of a directory that is not among kvs: the given one if it is not.
func freeKey(within string, station int64, kvs []*mvccpb.KeyValue) string {
	for n := 0; ; n++ {
		key := within + strconv.FormatInt(station, 16)
		if !slices.ContainsFunc(kvs, func(kv *mvccpb.KeyValue) bool { return string(kv.Key) == key }) {
			return key
		}
		station = rand.Int64N(stations << min(2*n, 32))
	}
}
