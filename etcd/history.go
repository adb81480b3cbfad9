package etcd

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// history has the facts about the cluster in its answers: its id, the revision, the raft term of each member, and the
// token space, which the first driver plants. A cluster that contradicts them was wiped, restored from a backup, or is
// another one. The first contradiction is final.
//
// The id alone is not enough: a cluster that is created again with the same flags has the same id. Nor would the
// greatest term of all members: a follower that was brought up to date by a snapshot returns its old term until the
// next entry.
type history struct {
	mu       sync.Mutex // protects the following fields
	cluster  uint64
	revision int64
	term     uint64            // the greatest of all members
	terms    map[uint64]uint64 // of each; replaced when it changes, since marks share it
	space    space
	lost     *backend.HistoryError
}

// space is the name under which guards know the cluster's count of tokens.
type space struct {
	name string // "" until it is known
	text string // the whole value of its key
}

// layout is the version of all keys below the prefix, which the token space's key names. A later layout is refused:
// the key has to change with it, and ends the drivers that know the earlier value.
const layout = 1

// spaceValue is the value of its key. A backup that is restored as another cluster has another id, and the first driver
// there plants a new space.
type spaceValue struct {
	Format  int    `json:"fencelock"` // layout
	Space   string `json:"space"`
	Cluster string `json:"cluster"`
}

// mark is the known past when a request was sent: its answer must not be older.
type mark struct {
	revision int64
	terms    map[uint64]uint64
}

func (h *history) mark() *mark {
	h.mu.Lock()
	defer h.mu.Unlock()
	return &mark{h.revision, h.terms}
}

func (h *history) tokenSpace() space {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.space
}

// exhausted returns an error if the next revision is greater than every token that guards admit. No cluster gets there by
// its writes, but an operator can restore one with such a --bump-revision.
func (h *history) exhausted() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.revision < int64(fencing.MaxToken) {
		return nil
	}
	return &backend.ConfigError{
		Setting: "revision", Value: strconv.FormatInt(h.revision, 10), Want: "less than " + fencing.MaxToken.String(),
		Why: "guards admit no greater token",
	}
}

func (h *history) greatestTerm() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.term
}

// note takes in the header of an answer, and returns a contradiction. since is nil if the answer is not linearizable.
// An answer without a cluster id, a proxy's for example, is no evidence.
func (h *history) note(header *pb.ResponseHeader, since *mark) *backend.HistoryError {
	cluster, member := header.GetClusterId(), header.GetMemberId()
	revision, term := header.GetRevision(), header.GetRaftTerm()
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.lost != nil:
		return h.lost
	case cluster == 0:
		return nil
	case h.cluster != 0 && cluster != h.cluster:
		return &backend.HistoryError{
			What: "cluster id", Was: strconv.FormatUint(h.cluster, 16), Now: strconv.FormatUint(cluster, 16),
		}
	case since != nil && revision < since.revision:
		return &backend.HistoryError{
			What: "revision", Was: strconv.FormatInt(since.revision, 10), Now: strconv.FormatInt(revision, 10),
		}
	case since != nil && term < since.terms[member]:
		return &backend.HistoryError{
			What: "raft term of member " + strconv.FormatUint(member, 16),
			Was:  strconv.FormatUint(since.terms[member], 10), Now: strconv.FormatUint(term, 10),
		}
	}
	h.cluster, h.revision, h.term = cluster, max(h.revision, revision), max(h.term, term)
	if term > h.terms[member] {
		terms := map[uint64]uint64{}
		maps.Copy(terms, h.terms)
		terms[member] = term
		h.terms = terms
	}
	return nil
}

// hear must see the header of every answer before anything is concluded from it.
func (e *service) hear(ctx context.Context, header *pb.ResponseHeader, since *mark) error {
	if lost := e.history.note(header, since); lost != nil {
		return e.lose(ctx, lost)
	}
	return nil
}

// lose notes that the history is lost. The first time it plants a new token space in the place of the lost one,
// so that guards refuse the tokens that are issued from now on. What another driver has planted stays.
func (e *service) lose(ctx context.Context, why *backend.HistoryError) error {
	h := &e.history
	h.mu.Lock()
	first := h.lost == nil
	if first {
		h.lost = why
	}
	why, known, cluster := h.lost, h.space, h.cluster
	h.mu.Unlock()
	if first && known.name != "" {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		put := clientv3.OpPut(e.spaceKey(), newSpace(cluster))
		_, _ = e.client.Txn(ctx).If(vacant(e.spaceKey())).Then(put).Else(
			clientv3.OpTxn([]clientv3.Cmp{e.sameSpace()}, []clientv3.Op{put}, nil)).Commit()
	}
	return why
}

func (e *service) spaceKey() string { return e.prefix + "+space" }

// sameSpace is true if the store has the token space that the driver knows.
func (e *service) sameSpace() clientv3.Cmp {
	return clientv3.Compare(clientv3.Value(e.spaceKey()), "=", e.history.tokenSpace().text)
}

func newSpace(cluster uint64) string {
	text, _ := json.Marshal(spaceValue{layout, "etcd-" + rand.Text(), strconv.FormatUint(cluster, 16)})
	return string(text)
}

// checkSpace compares the key of the token space with the known value. A deletion of the key, with all others for
// example, ends the history of drivers that knew it: they cannot distinguish this from a new cluster.
func (e *service) checkSpace(ctx context.Context, kvs []*mvccpb.KeyValue) error {
	known, now := e.history.tokenSpace(), "gone"
	if len(kvs) > 0 {
		if string(kvs[0].Value) == known.text {
			return nil
		}
		var v spaceValue
		switch err := json.Unmarshal(kvs[0].Value, &v); {
		case v.Format > layout:
			now = fmt.Sprintf("one of layout %d, this program knows %d", v.Format, layout)
		case err != nil:
			now = "unreadable"
		default:
			now = v.Space
		}
	}
	return e.lose(ctx, &backend.HistoryError{What: "token space", Was: known.name, Now: now})
}

// Ping is engine.Service's.
func (e *service) Ping(ctx context.Context) error { return e.Probe(ctx) }

// Probe is engine.Prober's: a linearizable read, which shows that a majority answers and that the user may read below
// the prefix. The first one also reads the members and the token space.
func (e *service) Probe(ctx context.Context) error {
	known := e.history.tokenSpace().name != "" // before the read: what another call plants meanwhile is not in it
	resp, err := e.get(ctx, e.spaceKey())
	if err != nil {
		return err
	}
	if known {
		return e.checkSpace(ctx, resp.Kvs)
	}
	// A proxy must be refused before anything is written through it.
	if err := e.askMembers(ctx); err != nil {
		return err
	}
	if err := e.learnSpace(ctx, resp); err != nil {
		return err
	}
	e.checked.Do(func() { e.checkVersions(ctx) })
	return nil
}

// learnSpace reads the token space, or plants it if the store has no token space of this cluster. Drivers that begin
// concurrently agree, because each plants only over the value that it has read.
func (e *service) learnSpace(ctx context.Context, resp *clientv3.GetResponse) error {
	kvs, cluster := resp.Kvs, resp.Header.ClusterId
	for {
		var stands int64
		if len(kvs) > 0 {
			var v spaceValue
			err := json.Unmarshal(kvs[0].Value, &v)
			if v.Format > layout {
				return &backend.ConfigError{
					Setting: "layout of " + e.spaceKey(), Value: strconv.Itoa(v.Format), Want: strconv.Itoa(layout),
					Why: "a later version of this package wrote it",
				}
			}
			if err != nil || v.Format != layout || v.Space == "" {
				return &backend.ConfigError{
					Setting: e.spaceKey(), Value: fmt.Sprintf("%.64s", kvs[0].Value),
					Want: "what a driver has written there", Why: "it names the token space",
				}
			}
			if v.Cluster == strconv.FormatUint(cluster, 16) {
				e.history.mu.Lock()
				defer e.history.mu.Unlock()
				if e.history.space.name == "" {
					e.history.space = space{v.Space, string(kvs[0].Value)}
				}
				return nil
			}
			stands = kvs[0].ModRevision
		}
		look := clientv3.OpGet(e.spaceKey())
		planted, err := e.txn(ctx, []clientv3.Cmp{asRead(e.spaceKey(), stands)},
			[]clientv3.Op{clientv3.OpPut(e.spaceKey(), newSpace(cluster)), look}, []clientv3.Op{look})
		if err != nil {
			return err
		}
		kvs = planted.Responses[len(planted.Responses)-1].GetResponseRange().Kvs
	}
}

// askMembers finds out whether the cluster has one server, and whether the server is etcd. Without an answer, or
// without the right to ask, the client assumes several servers.
func (e *service) askMembers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	resp, err := e.client.MemberList(ctx)
	if err != nil {
		e.members.again()
		return nil
	}
	if resp.Header.GetClusterId() == 0 { // a proxy names itself as the only member, and knows no cluster
		return &backend.ConfigError{
			Setting: "endpoint", Value: "an etcd gRPC proxy", Want: "etcd itself",
			Why: "the proxy itself sends keepalives, and its answers to this client do not prove when a lock ends",
		}
	}
	vote := voters(resp.Members)
	e.single.Store(len(vote) == 1)
	e.members.note(vote)
	return nil
}

// checkVersions asks each endpoint for its version, and warns of those with known lease defects.
func (e *service) checkVersions(ctx context.Context) {
	for _, endpoint := range e.client.Endpoints() {
		ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		resp, err := e.client.Status(ctx, endpoint)
		cancel()
		if err != nil {
			continue
		}
		if fixed, ok := leaseDefects(resp.Version); !ok {
			e.log.Warn("fencelock/etcd: this server version can lose keys of live leases; use a fixed one",
				"endpoint", endpoint, "version", resp.Version, "fixed", fixed)
		}
	}
}

// leaseDefects reports whether a version has the fix for keys that are lost while their lease is renewed (etcd issue
// 20590), and the version of its line that has it.
func leaseDefects(version string) (fixed string, ok bool) {
	var major, minor, patch int
	_, _ = fmt.Sscanf(version, "%d.%d.%d", &major, &minor, &patch) // unreadable numbers are 0
	first, known := map[int]int{4: 38, 5: 23, 6: 5}[minor]
	switch {
	case major > 3 || major == 3 && minor > 6:
		return "", true
	case major == 3 && known:
		return fmt.Sprintf("3.%d.%d", minor, first), patch >= first
	}
	return "3.6.5", false
}

// err returns the sign that the history is lost, or nil.
func (h *history) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lost == nil {
		return nil
	}
	return h.lost
}
