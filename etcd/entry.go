package etcd

import (
	"cmp"
	"encoding/json"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// The keys in etcd. A name has a directory, and every request that holds it or waits has one key there, at a place of
// its driver (place.go):
//
//	fencelock/+space                       the token space, see space
//	fencelock/+locks/orders%2F7/c4         {"fencelock":3,"request":"4f2a…","owner":"host/42/…","hold":"…"}
//	fencelock/+locks/orders%2F7/forced     why holds were taken away, for a minute
//	fencelock/+locks/catalog/+shared/c4    a shared hold
//	fencelock/+locks/gpu/+permits/8/2/c4   two of eight permits
//
// The part after the prefix begins with "+", which no part of a prefix does: so no prefix reaches into another. The
// keys of one directory, by create revision, are the queue: the first ones hold the lock (use.go), and the create
// revision is the fencing token. It is the revision of the whole store, and so greater than that of every earlier
// key, deleted or not. Names are escaped as in a URL path, so that no name's directory lies in another's, and a name
// may have any bytes that ValidateName accepts.
//
// The last part of a key, its station, is a small number in hexadecimal without a meaning. The request id stands in
// the value and not in the key, because keys are reused. A key that a driver cannot read is foreign: it blocks no
// request, and nobody deletes it.

// dir returns the directory of a name, with its slash.
func (d *Driver) dir(name string) string { return d.locksDir() + url.PathEscape(name) + "/" }

// locksDir is the directory of all names.
func (d *Driver) locksDir() string { return d.prefix + "+locks/" }

// forcedKey is the key of a ForceRelease's reason. It lies in the name's directory so that a watch of the name shows
// it, and it is no entry, since it has another format.
func (d *Driver) forcedKey(name string) string { return d.dir(name) + "forced" }

// nameOf returns the name in whose directory a key is. ok is false for keys of other prefixes and for foreign ones.
func (d *Driver) nameOf(key string) (name string, ok bool) {
	rest, ours := strings.CutPrefix(key, d.locksDir())
	dir, _, within := strings.Cut(rest, "/")
	name, err := url.PathUnescape(dir)
	return name, ours && within && err == nil
}

// value is the content of a request's key, as JSON. It begins with valueBegin and the request id, in this order,
// because standsFor compares that beginning as text. Whoever knows the request id can move the hold, so
// backend.State, backend.Change and backend.HeldError do not show it.
type value struct {
	Format   int               `json:"fencelock"` // 3
	Request  string            `json:"request"`
	Owner    string            `json:"owner,omitempty"`
	HoldID   string            `json:"hold,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	Nonce    string            `json:"nonce,omitempty"` // Grant.Nonce; absent from clients before 2026-11-25
	Since    int64             `json:"since,omitempty"` // when the request came, in Unix milliseconds by its client's clock
}

// since is when the request came. It is zero if an earlier version wrote the key.
func (v value) since() time.Time {
	if v.Since == 0 {
		return time.Time{}
	}
	return time.UnixMilli(v.Since)
}

// nonce returns Grant.Nonce of the hold. It is zero if an earlier version wrote the key.
func (v value) nonce() fencing.Nonce {
	n, _ := fencing.ParseNonce(v.Nonce) // zero if it is not one
	return n
}

// valueBegin is the beginning of every value: see standsFor.
const valueBegin = `{"fencelock":3,"request":"`

// entry is a key of the queue, as it was read. It is never changed afterwards.
type entry struct {
	key string
	use use
	// The create revision, which orders the queue, and the revision of the last write, which asRead compares.
	revision int64
	modified int64
	lease    clientv3.LeaseID
	value    value
}

// entryOf reads a key, and reports whether it is one of ours. Foreign keys in our directories are no entries and
// block no request: keys without a lease, values that are not JSON, other formats. key and the revisions are set even
// for them.
func (d *Driver) entryOf(kv *mvccpb.KeyValue) (entry, bool) {
	e := entry{
		key: string(kv.Key), revision: kv.CreateRevision, modified: kv.ModRevision, lease: clientv3.LeaseID(kv.Lease),
	}
	_, within, _ := strings.Cut(strings.TrimPrefix(e.key, d.locksDir()), "/")
	part, _ := splitKey(within)
	e.use = useOf(part)
	return e, kv.Lease != 0 && json.Unmarshal(kv.Value, &e.value) == nil && e.value.Format == 3
}

// splitKey splits the part of a key below its name's directory into the directories of its use, and its station.
func splitKey(within string) (part, station string) {
	at := strings.LastIndexByte(within, '/') + 1
	return within[:at], within[at:]
}

// entriesOf returns the entries among kvs in the order of the queue, whatever order they were read in.
func (d *Driver) entriesOf(kvs []*mvccpb.KeyValue) []entry {
	entries := make([]entry, 0, len(kvs))
	for _, kv := range kvs {
		if e, ok := d.entryOf(kv); ok {
			entries = append(entries, e)
		}
	}
	slices.SortFunc(entries, func(a, b entry) int { return cmp.Compare(a.revision, b.revision) })
	return entries
}

// indexOfKey returns where in the queue a key stands, and -1 if it does not.
func indexOfKey(queue []entry, key string) int {
	return slices.IndexFunc(queue, func(e entry) bool { return e.key == key })
}

// indexOfRequest returns where in the queue a request stands, and -1 if it does not.
func indexOfRequest(queue []entry, requestID string) int {
	return slices.IndexFunc(queue, func(e entry) bool { return e.value.Request == requestID })
}

// asRead is true if a key has not been written since it was read at the revision modified; 0 if it did not stand.
// Every write of a standing key compares this. Otherwise a late transaction, on the lease of an earlier leader
// perhaps, could move a key back that has moved to another lease since, on which its holder relies. Two elections in
// a row did that in a soak; TestLateMoveTakesNothingBack shows it. Comparing the lease is not enough: after a move
// without an answer nobody knows on which of two leases the key stands.
func asRead(key string, modified int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(key), "=", modified)
}

// put returns the operation that writes the key of a wish on a lease. On a key that exists it keeps the create
// revision, and with it the place and the token, and moves the key to the lease: this makes an acquire idempotent.
func (w *wish) put(lease clientv3.LeaseID) clientv3.Op {
	text, _ := json.Marshal(value{ // of text only, which can be encoded
		Format: 3, Request: w.r.RequestID, Owner: w.r.Owner, HoldID: w.r.HoldID, Metadata: w.r.Metadata,
		Nonce: w.nonce.String(), Since: w.since,
	})
	return clientv3.OpPut(w.key, string(text), clientv3.WithLease(lease))
}

// grantOf returns the grant of a wish that holds on s. Its incarnation is the create revision of the key, an "@", and
// the station: with the other fields of the grant this is enough for another driver to renew or release the hold.
func grantOf(w *wish, s *session) backend.Grant {
	g := w.r.Grant()
	g.Token, g.Nonce = tokenOf(w.r.Kind, w.revision), w.nonce
	_, station := splitKey(w.key)
	g.Incarnation = strconv.FormatInt(w.revision, 10) + "@" + station
	g.TTL = s.ttl
	g.SentAt = s.provedAt()
	return g
}

// tokenOf returns the token of a hold whose key was created at revision. Tokens of shared holds and permits come from
// the same count and carry the mark of tokens that do not fence, so that they can be ordered against exclusive ones
// and no guard accepts them.
func tokenOf(kind backend.Kind, revision int64) fencing.Token {
	token := fencing.Token(revision)
	if kind != backend.KindExclusive {
		token = token.NotExclusive()
	}
	return token
}
