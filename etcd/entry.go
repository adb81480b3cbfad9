package etcd

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Keys. A name has a directory, and every acquire of it one key there, named for its request:
//
//	fencelock/+space                           the token space, see space
//	fencelock/+locks/orders%2F7/4f2a…          {"fencelock":2,"owner":"host/42/…","hold":"…"}
//	fencelock/+locks/orders%2F7/forced         why holds were taken away, for a minute
//	fencelock/+locks/catalog/+shared/4f2a…     a shared hold
//	fencelock/+locks/gpu/+permits/8/2/4f2a…    two of eight permits
//
// What follows the prefix begins with "+", which no part of a prefix does: so no prefix reaches into another. The keys
// of one directory, by create revision, are the queue: the first ones hold the lock, see claim, and the create revision
// is the fencing token. Names are escaped as in a URL path, so that no name's directory lies in another's.

// dir returns the directory of a name, with its slash.
func (d *Driver) dir(name string) string { return d.locksDir() + url.PathEscape(name) + "/" }

// locksDir is the directory of all names.
func (d *Driver) locksDir() string { return d.prefix + "+locks/" }

// keyIn returns the key of one request in its name's directory.
func (c claim) keyIn(dir, requestID string) string { return dir + c.part() + requestID }

// forcedKey is where ForceRelease leaves its reason. It is too short for a request id.
func (d *Driver) forcedKey(name string) string { return d.dir(name) + "forced" }

// nameOf returns the name and the last part of a key.
func (d *Driver) nameOf(key string) (name, last string, ok bool) {
	rest, ok := strings.CutPrefix(key, d.locksDir())
	if !ok {
		return "", "", false
	}
	dir, last, ok := strings.Cut(rest, "/")
	if !ok {
		return "", "", false
	}
	name, err := url.PathUnescape(dir)
	return name, last, err == nil
}

// value is what stands in a request's key.
type value struct {
	Format   int               `json:"fencelock"` // 2
	Owner    string            `json:"owner,omitempty"`
	HoldID   string            `json:"hold,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// entry is a key of the queue.
type entry struct {
	key       string
	requestID string
	claim     claim
	revision  int64 // create revision
	lease     clientv3.LeaseID
	value     value
}

// entryOf reads a key of ours. Foreign keys in our directories are no entries: they hold nothing up.
func (d *Driver) entryOf(kv *mvccpb.KeyValue) (entry, bool) {
	e := entry{key: string(kv.Key), revision: kv.CreateRevision, lease: clientv3.LeaseID(kv.Lease)}
	_, within, _ := strings.Cut(strings.TrimPrefix(e.key, d.locksDir()), "/")
	part, requestID := splitKey(within)
	if kv.Lease == 0 || backend.ValidateRequestID(requestID) != nil {
		return e, false
	}
	e.requestID, e.claim = requestID, claimOf(part)
	return e, json.Unmarshal(kv.Value, &e.value) == nil && e.value.Format == 2
}

// splitKey splits the part of a key that is below its name's directory.
func splitKey(within string) (part, requestID string) {
	at := strings.LastIndexByte(within, '/') + 1
	return within[:at], within[at:]
}

// entriesOf returns the entries among kvs in the order of the queue.
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

// place returns where in the queue a key stands, and -1 if it does not.
func place(queue []entry, key string) int {
	return slices.IndexFunc(queue, func(e entry) bool { return e.key == key })
}

// put returns the operation that writes a request's key. On a key that exists it keeps the create revision, and with it
// the place and the token, and moves the key to lease: this is what makes an acquire idempotent.
func (d *Driver) put(r backend.Request, lease clientv3.LeaseID, options ...clientv3.OpOption) (clientv3.Op, error) {
	text, err := json.Marshal(value{Format: 2, Owner: r.Owner, HoldID: r.HoldID, Metadata: r.Metadata})
	if err != nil {
		return clientv3.Op{}, fmt.Errorf("encode the entry: %w", err)
	}
	return clientv3.OpPut(d.Key(r.Grant()), string(text), append(options, clientv3.WithLease(lease))...), nil
}

// grantOf returns the grant of a hold on s.
func grantOf(r backend.Request, s *session, revision int64) backend.Grant {
	g := r.Grant()
	g.Token = tokenOf(r.Kind, revision)
	g.Incarnation = strconv.FormatInt(revision, 10)
	g.TTL = s.ttl
	g.SentAt = s.provedAt()
	return g
}

// tokenOf returns the token of a hold whose key was created at revision.
func tokenOf(kind backend.Kind, revision int64) fencing.Token {
	token := fencing.Token(revision)
	if kind != backend.KindExclusive {
		token = token.NotExclusive()
	}
	return token
}
