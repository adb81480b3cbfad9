package etcd

import (
	"context"
	"strconv"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// This file detects a cluster that lost its past. A service that has forgotten acknowledged writes would repeat
// tokens that guards have seen, and grant names that are held. etcd gives three signs of that in the header of every
// answer (cluster id, revision, raft term), and the driver plants a fourth, the token space (space.go). Every answer
// goes through hear. The first contradiction is final: all sessions end with backend.ReasonHistoryLost, and acquires
// return backend.ErrHistoryLost until a new driver is made, since a person has to decide which tokens the guards
// accept.
//
// The cluster id alone is not enough: a cluster that is made anew with the same flags has the same one.

// history is the cluster's past as its answers show it. The past only grows: a cluster that contradicts it has been
// wiped, restored from a backup, or is another one, and the driver stops using it.
//
// Every answer names the cluster. The revision of a linearizable answer is not below that of any answer before the
// request; nor does the term that one member has reached fall. The term of the cluster is no such sign: a follower
// that was brought up to date by a snapshot reports its old term until the next entry, even in a linearizable answer,
// and would end all holds of a healthy cluster.
type history struct {
	mu       sync.Mutex // protects the following fields
	cluster  uint64
	revision int64
	// The greatest of all members, and the greatest of each.
	term  uint64
	terms map[uint64]uint64 // replaced when it changes: marks share it
	space space
	lost  *backend.HistoryError // the first sign
}

// mark is the known past at the instant a request was sent: the answer must not be older. What became known later
// is no proof, since answers overtake each other.
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

// greatestTerm is the greatest term of all answers so far. The cluster's is not below it.
func (h *history) greatestTerm() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.term
}

// note records the header of an answer, and returns the contradiction that it or an earlier answer shows. since is
// nil if the answer is not linearizable (a keepalive, a watch, the list of members): then note raises the member's
// known term, and compares only the cluster id. An answer without a cluster id, a proxy's for example, is ignored.
//
// terms is replaced and never written to, because marks share it. That costs a copy of a few entries at each
// election, and makes a mark cheap.
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
	// A store that is behind an acknowledged write. Answers that overtake each other do not show here, since the mark
	// is as old as the request.
	case since != nil && revision < since.revision:
		h.lost = &backend.HistoryError{
			What: "revision", Was: strconv.FormatInt(since.revision, 10), Now: strconv.FormatInt(revision, 10),
		}
	// A member that has forgotten its term has lost its data, whatever the revisions are by now.
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

// hear checks the header of an answer, and must see every one before the caller uses the answer. If the cluster's
// past is lost, so is every hold of the driver, and the error says why.
func (d *Driver) hear(header *pb.ResponseHeader, since *mark) error {
	if lost := d.history.note(header, since); lost != nil {
		d.loseHistory(lost)
		return lost
	}
	return nil
}

// loseHistory ends every session, which notifies every holder. New ones are not made: see sessionFor. The first
// reason stays.
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

// get reads linearizably, and compares the answer with the known past. With ErrHistoryLost it also returns the
// answer, for callers that read regardless of the past.
func (d *Driver) get(ctx context.Context, key string, options ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	since := d.history.mark()
	resp, err := d.client.Get(ctx, key, options...)
	if err != nil {
		d.trouble()
		return nil, err
	}
	return resp, d.hear(resp.Header, since)
}

// commit is a transaction, with the same comparison and the same two results. The server carries out a write before
// that comparison; transactions that grant compare the token space themselves.
func (d *Driver) commit(
	ctx context.Context, cmps []clientv3.Cmp, then, otherwise []clientv3.Op,
) (*clientv3.TxnResponse, error) {
	since := d.history.mark()
	resp, err := d.client.Txn(ctx).If(cmps...).Then(then...).Else(otherwise...).Commit()
	if err != nil {
		d.trouble()
		return nil, err
	}
	return resp, d.hear(resp.Header, since)
}
