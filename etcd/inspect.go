package etcd

import (
	"context"
	"encoding/json"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// Look is engine.Inspector's. It can be looked at a cluster that has lost its history, too.
func (e *service) Look(ctx context.Context, name string) (backend.State, error) {
	if err := backend.ValidateName(name); err != nil {
		return backend.State{}, err
	}
	resp, err := e.get(ctx, e.dir(name), clientv3.WithPrefix())
	if resp == nil {
		return backend.State{}, err
	}
	queue := e.queueOf(resp.Kvs)
	s := stateOf(name, queue, resp.Header.Revision)
	s.Queue = waitersOf(queue[len(s.Holders):])
	// The leader answers by its own time, without a majority: this is for people to read.
	left := map[clientv3.LeaseID]time.Duration{}
	for i := range s.Holders {
		lease := queue[i].lease
		if _, known := left[lease]; !known {
			ttl, err := e.client.TimeToLive(ctx, lease)
			if err != nil {
				return backend.State{}, err
			}
			_ = e.hear(ctx, ttl.ResponseHeader, nil)
			left[lease] = max(0, time.Duration(ttl.TTL)*time.Second)
		}
		s.Holders[i].ExpiresIn = left[lease]
	}
	return s, nil
}

// stateOf describes a name by its queue, as it was at a revision.
func stateOf(name string, queue []entry, revision int64) backend.State {
	s := backend.State{Name: name, Revision: uint64(revision)}
	for _, x := range holders(queue) {
		s.Held = true
		s.Holders = append(s.Holders, backend.Holder{
			Owner: x.value.Owner, HoldID: x.value.HoldID, Kind: x.use.Kind, Permits: x.use.Permits, Limit: x.use.Limit,
			Token: x.token(), Nonce: x.value.nonce(), Since: x.value.since(), Metadata: x.value.Metadata,
		})
	}
	s.Waiters = len(queue) - len(s.Holders)
	return s
}

// waitersOf describes the first waiters.
func waitersOf(queue []entry) (all []backend.Waiter) {
	for _, x := range queue[:min(len(queue), backend.MaxQueue)] {
		all = append(all, backend.Waiter{
			Owner: x.value.Owner, HoldID: x.value.HoldID, Kind: x.use.Kind, Permits: x.use.Permits, Limit: x.use.Limit,
			Since: x.value.since(),
		})
	}
	return all
}

// pageSize is the number of keys that Names reads in one request.
const pageSize = 500

// Names is engine.Inspector's. It reads all pages at the revision of the first. The keys of a name are next to each
// other: the last name of a page begins the next one, since the page may have a part of its queue only.
func (e *service) Names(ctx context.Context, prefix, after string) (page []backend.State, next string, err error) {
	if err := backend.ValidateName(prefix); err != nil && prefix != "" {
		return nil, "", err
	}
	first := e.locksDir() + url.PathEscape(prefix)
	from, revision := first, int64(0)
	if at, rest, ok := strings.Cut(after, " "); ok {
		if revision, err = strconv.ParseInt(at, 10, 64); err != nil {
			return nil, "", err
		}
		from = rest
	}
	for limit := int64(pageSize); ; limit *= 2 {
		resp, err := e.get(ctx, from, clientv3.WithRange(clientv3.GetPrefixRangeEnd(first)),
			clientv3.WithLimit(limit), clientv3.WithRev(revision))
		if resp == nil {
			return nil, "", err
		}
		if revision == 0 {
			revision = resp.Header.Revision
		}
		kvs := resp.Kvs
		for len(kvs) > 0 {
			name, ok := e.nameOf(string(kvs[0].Key))
			n := 1
			for ok && n < len(kvs) && strings.HasPrefix(string(kvs[n].Key), e.dir(name)) {
				n++
			}
			if n == len(kvs) && resp.More {
				if next = strconv.FormatInt(revision, 10) + " " + string(kvs[0].Key); !ok {
					next += "\x00" // a foreign key
				}
				break
			}
			if queue := e.queueOf(kvs[:n]); ok && len(queue) > 0 {
				page = append(page, stateOf(name, queue, revision))
			}
			kvs = kvs[n:]
		}
		if !resp.More || len(kvs) < len(resp.Kvs) || !strings.HasPrefix(next, strconv.FormatInt(revision, 10)+" "+from) {
			return page, next, nil
		}
		next = "" // a name that fills a page: read more of it
	}
}

// forced is the record of a forced release for its victims: those created from Revision to Through, which hold together
// and are the first of the queue.
type forced struct {
	Revision int64  `json:"revision"`
	Through  int64  `json:"through,omitempty"` // missing: one victim
	Reason   string `json:"reason"`
	// Who called ForceRelease.
	By        string `json:"by,omitempty"`
	Principal string `json:"principal,omitempty"`
}

func (f forced) loss() backend.Loss {
	return backend.Loss{
		Reason: backend.ReasonForceReleased, Text: f.Reason, By: f.By, Principal: f.Principal,
	}
}

// names reports whether a hold was among the victims.
func (f forced) names(revision int64) bool {
	return f.Revision <= revision && revision <= max(f.Revision, f.Through)
}

// forcedFor is the time, in seconds, for which the reason stays for the victims. Its lease removes it.
const forcedFor = 60

// Force is engine.Forcer's. The reason is written beside the deletions that it explains, and so are the notices for the
// sessions of the victims. Each deletion compares which life of the key it means.
func (e *service) Force(ctx context.Context, r backend.ForceRequest) (int, error) {
	resp, err := e.get(ctx, e.dir(r.Name), clientv3.WithPrefix())
	if resp == nil {
		return 0, err
	}
	victims := slices.DeleteFunc(slices.Clone(holders(e.queueOf(resp.Kvs))), func(x entry) bool {
		return !r.Matches(x.value.nonce(), x.token())
	})
	if len(victims) == 0 {
		return 0, nil
	}
	trace := forced{Revision: victims[0].revision, Reason: r.Reason, By: r.By, Principal: r.Principal}
	if last := victims[len(victims)-1].revision; last != trace.Revision {
		trace.Through = last
	}
	text, err := json.Marshal(trace)
	if err != nil {
		return 0, err
	}
	lease, err := e.client.Grant(ctx, forcedFor)
	if err != nil {
		return 0, err
	}
	ended := 0
	err = inParts(e, victims, maxOps/2, func(part []entry) error {
		ops := []clientv3.Op{clientv3.OpPut(e.forcedKey(r.Name), string(text), clientv3.WithLease(lease.ID))}
		for _, x := range part {
			ops = append(ops, clientv3.OpTxn(
				[]clientv3.Cmp{created(x.key, x.revision)}, []clientv3.Op{clientv3.OpDelete(x.key)}, nil))
		}
		resp, err := e.txn(ctx, nil, append(ops, e.notices(part, trace)...), nil)
		if resp == nil {
			return err
		}
		for _, one := range resp.Responses[1 : len(part)+1] {
			if one.GetResponseTxn().Succeeded {
				ended++
			}
		}
		return nil
	})
	if ended == 0 && err == nil { // there is no victim to notify
		_, err = e.client.Revoke(ctx, lease.ID)
	}
	return ended, err
}
