package etcd

import (
	"context"
	"strconv"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// history is what answers have told of the cluster's past. What was told once must be there for ever: a cluster in
// which it is not has been wiped, restored from a backup, or is another one, and the driver is done with it.
//
// Every answer names the cluster. The revision never falls from an answer to another one that was asked for later, if
// that one is linearizable; nor does the term that one member has reached. (Two members may be of different terms: one
// that got the others' state as a snapshot learns of the term with the next entry.)
type history struct {
	mu       sync.Mutex // protects the following fields
	cluster  uint64
	revision int64
	term     uint64            // the greatest of all members
	terms    map[uint64]uint64 // the greatest of each member; replaced when it changes
	space    space
	lost     *backend.HistoryError // the first sign
}

// mark is what was known when a request was sent.
type mark struct {
	revision int64
	terms    map[uint64]uint64
}

// mark must be taken before the request is sent whose answer is compared with it.
func (h *history) mark() *mark {
	h.mu.Lock()
	defer h.mu.Unlock()
	return &mark{revision: h.revision, terms: h.terms}
}

// err returns the sign that the past is lost, or nil.
func (h *history) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lost != nil {
		return h.lost
	}
	return nil
}

// greatestTerm is that of all answers so far. The cluster's is not below it.
func (h *history) greatestTerm() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.term
}

// note takes in the header of an answer, and returns what it contradicts. since is nil if the answer is not
// linearizable.
func (h *history) note(header *pb.ResponseHeader, since *mark) *backend.HistoryError {
	cluster, member := header.GetClusterId(), header.GetMemberId()
	revision, term := header.GetRevision(), header.GetRaftTerm()
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.lost != nil || cluster == 0:
	case h.cluster != 0 && cluster != h.cluster:
		h.lost = &backend.HistoryError{
			What: "cluster id", Was: strconv.FormatUint(h.cluster, 16), Now: strconv.FormatUint(cluster, 16),
		}
	case since != nil && revision < since.revision:
		h.lost = &backend.HistoryError{
			What: "revision", Was: strconv.FormatInt(since.revision, 10), Now: strconv.FormatInt(revision, 10),
		}
	case since != nil && term < since.terms[member]:
		h.lost = &backend.HistoryError{
			What: "raft term of member " + strconv.FormatUint(member, 16),
			Was:  strconv.FormatUint(since.terms[member], 10), Now: strconv.FormatUint(term, 10),
		}
	default:
		h.cluster, h.revision, h.term = cluster, max(h.revision, revision), max(h.term, term)
		if term > h.terms[member] {
			terms := map[uint64]uint64{member: term}
			for other, its := range h.terms {
				terms[other] = max(its, terms[other])
			}
			h.terms = terms
		}
	}
	return h.lost
}

// hear takes in the header of an answer. If the cluster's past is lost, every hold of the driver is, and the error says
// why.
func (d *Driver) hear(header *pb.ResponseHeader, since *mark) error {
	if lost := d.history.note(header, since); lost != nil {
		d.loseHistory(lost)
		return lost
	}
	return nil
}

// loseHistory ends every session. New ones are not made: see sessionFor.
func (d *Driver) loseHistory(why *backend.HistoryError) {
	d.history.mu.Lock()
	if d.history.lost == nil {
		d.history.lost = why
	}
	d.history.mu.Unlock()
	for _, s := range d.sessions.Live() {
		s.end(backend.ReasonHistoryLost)
	}
}

// lossOf is the reason for which a session's holds are lost.
func (d *Driver) lossOf(otherwise backend.Reason) backend.Reason {
	if d.history.err() != nil {
		return backend.ReasonHistoryLost
	}
	return otherwise
}

// get, and commit of a transaction, ask a majority, and compare the answer with what was known before.

func (d *Driver) get(ctx context.Context, key string, options ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	since := d.history.mark()
	resp, err := d.client.Get(ctx, key, options...)
	if err != nil {
		return nil, err
	}
	return resp, d.hear(resp.Header, since)
}

func (d *Driver) commit(ctx context.Context, cmps []clientv3.Cmp, then, otherwise []clientv3.Op) (*clientv3.TxnResponse, error) {
	since := d.history.mark()
	resp, err := d.client.Txn(ctx).If(cmps...).Then(then...).Else(otherwise...).Commit()
	if err != nil {
		return nil, err
	}
	return resp, d.hear(resp.Header, since)
}
