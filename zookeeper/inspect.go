package zookeeper

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
)

// names returns the names of the nodes below a node, and the session that has read them: another one if the first ended
// meanwhile.
func (e *service) names(ctx context.Context, node string) (s *session, names []string, err error) {
	for range maxTries {
		if s, err = e.any(ctx); err != nil {
			return nil, nil, err
		}
		if names, _, err = s.names(ctx, node); !isOneOf(err, engine.ErrNoSession) {
			break
		}
	}
	return s, names, err
}

// Look is engine.Inspector's. The queue and the entries are read one after the other; a hold that ends in between is
// omitted. ExpiresIn is zero, since ZooKeeper does not return the timeouts of other sessions. Since is the time at
// which the holder entered the queue, by the leader's clock.
func (e *service) Look(ctx context.Context, name string) (backend.State, error) {
	if err := backend.ValidateName(name); err != nil {
		return backend.State{}, err
	}
	s, names, err := e.names(ctx, e.dir(name))
	if err != nil {
		return backend.State{}, err
	}
	return s.state(ctx, name, names, true)
}

// state describes a name with nodes, withQueue also its first waiters.
func (s *session) state(ctx context.Context, name string, nodes []string, withQueue bool) (backend.State, error) {
	info := backend.State{Name: name}
	all, waiting, err := s.holders(ctx, s.e.dir(name), nodes)
	if err != nil || len(all) == 0 {
		return info, err
	}
	info.Held, info.Waiters = true, len(waiting)
	for _, h := range all {
		info.Holders = append(info.Holders, backend.Holder{
			Owner: h.Owner, HoldID: h.HoldID, Kind: h.Kind, Permits: h.Permits, Limit: h.Limit,
			Token: tokenOf(h.Use, h.Token), Nonce: h.nonce(), Since: time.UnixMilli(h.ctime), Metadata: h.Metadata,
		})
	}
	if !withQueue {
		return info, nil
	}
	queue, err := s.read(ctx, waiting[:min(len(waiting), backend.MaxQueue)], false)
	for _, w := range queue {
		info.Queue = append(info.Queue, backend.Waiter{
			Owner: w.Owner, HoldID: w.HoldID, Kind: w.Kind, Permits: w.Permits, Limit: w.Limit,
			Since: time.UnixMilli(w.ctime),
		})
	}
	return info, err
}

// holders reads the entries that hold among the nodes of a name, the oldest first, and returns the waiters behind
// them. Entries that have ended since, and foreign nodes, do not count; the entries behind them may then hold.
func (s *session) holders(ctx context.Context, dir string, nodes []string) (all []own, waiting []entry, err error) {
	queue := entriesOf(dir, nodes)
	for {
		n := len(kit.Holders(queue, entry.use))
		fresh := queue[len(all):n]
		found, err := s.read(ctx, fresh, false)
		if err != nil {
			return nil, nil, err
		}
		all = append(all, found...)
		if len(found) == len(fresh) {
			return all, queue[n:], nil
		}
		real := make([]entry, len(all), len(queue))
		for i, x := range all {
			real[i] = x.entry
		}
		queue = append(real, queue[n:]...)
	}
}

// pageSize is how many names Names reads at once.
const pageSize = 200

// Names is engine.Inspector's, in the order of the names' nodes. All names of the root are read for every page, with
// any prefix; they must fit one answer of a server, 1 MB.
func (e *service) Names(ctx context.Context, prefix, after string) (page []backend.State, next string, err error) {
	if err := backend.ValidateName(prefix); err != nil && prefix != "" {
		return nil, "", err
	}
	s, nodes, err := e.names(ctx, e.root)
	if err != nil {
		return nil, "", err
	}
	slices.Sort(nodes)
	var names []string
	var reqs []request
	for _, node := range nodes {
		if name, ok := nameOf(node); ok && node > after && strings.HasPrefix(name, prefix) {
			if len(names) == pageSize {
				next = nameMark + escape(names[pageSize-1])
				break
			}
			names, reqs = append(names, name), append(reqs, children(e.dir(name)))
		}
	}
	if len(names) == 0 {
		return nil, "", nil
	}
	replies, err := s.ask(ctx, reqs...)
	if err != nil {
		return nil, "", err
	}
	for i, name := range names {
		nodes, _, err := replies[i].names()
		state := backend.State{}
		if err == nil {
			state, err = s.state(ctx, name, nodes, false)
		}
		if err != nil {
			return nil, "", err
		}
		page = append(page, state)
	}
	return page, next, nil
}

// evictAtOnce is the maximum number of nodes that one transaction deletes: servers refuse requests of more than 1 MB
// (jute.maxbuffer).
const evictAtOnce = 500

// Force is engine.Forcer's: it deletes the holders' nodes, and leaves the reason in the name's node in the same
// transaction. The path of a hold's node is unique, so the deletion is the comparison. If holds have ended meanwhile,
// it reads again. One transaction ends up to 500 holds; with more, an error may end the call after some of them.
func (e *service) Force(ctx context.Context, r backend.ForceRequest) (ended int, err error) {
	dir := e.dir(r.Name)
	for range maxWrites {
		s, nodes, err := e.names(ctx, dir)
		if err != nil {
			return ended, err
		}
		all, _, err := s.holders(ctx, dir, nodes)
		all = slices.DeleteFunc(all, func(h own) bool { return !r.Matches(h.nonce(), tokenOf(h.Use, h.Token)) })
		if err != nil || len(all) == 0 {
			return ended, err
		}
		f := forced{Token: all[0].Token, Reason: r.Reason, By: r.By, Principal: r.Principal}
		for _, h := range all[1:] {
			f.Others = append(f.Others, h.Token)
		}
		trace, _ := json.Marshal(f) // of text and numbers only
		changed := false
		for part := range slices.Chunk(all, evictAtOnce) {
			ops := []request{setData(dir, trace, anyVersion)}
			for _, h := range part {
				ops = append(ops, remove(h.path, anyVersion))
			}
			replies, err := s.do(ctx, multi(ops...))
			if err == nil {
				err = replies[0].failed()
			}
			switch {
			case err == nil:
				ended += len(part)
			case isOneOf(err, codeNoNode):
				changed = true
			default:
				return ended, err
			}
		}
		if !changed {
			return ended, nil
		}
	}
	return ended, errChanged
}
