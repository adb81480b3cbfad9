package binding

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
)

// seen is an entry of a name as it was read, for people.
type seen struct {
	own
	since time.Time
}

// again repeats a step that changes nothing, over the next connection, until ctx ends.
func again[T any](ctx context.Context, e *service, step func(*session) (T, error)) (T, error) {
	for n := 1; ; n++ {
		s, err := e.any(ctx)
		var value T
		if err == nil {
			value, err = step(s)
		}
		switch {
		case isOneOf(err, errBroken, engine.ErrNoSession, codeSessionExpired):
		case isOneOf(err, codeThrottled) && n < maxTries:
		default:
			return value, err
		}
		timer := time.NewTimer(kit.RetryPause(spareTTL) / 4)
		_, how := engine.Await(ctx, timer.C, nil)
		timer.Stop()
		if how != engine.Answered {
			return value, err
		}
	}
}

// Look is engine.Inspector's. The queue and the entries are read one after the other; a hold that ends in between is
// left out.
func (e *service) Look(ctx context.Context, name string) (backend.State, error) {
	if err := backend.ValidateName(name); err != nil {
		return backend.State{}, err
	}
	return again(ctx, e, func(s *session) (backend.State, error) {
		replies, err := s.do(ctx, confirmed(), children(e.dir(name)))
		if err != nil {
			return backend.State{}, err
		}
		return s.state(ctx, name, replies[1], true)
	})
}

// state describes a name whose children were read, withQueue also its first waiters.
func (s *session) state(ctx context.Context, name string, a reply, withQueue bool) (backend.State, error) {
	info := backend.State{Name: name}
	names, _, err := a.names()
	if err != nil {
		return info, ignore(err, codeNoNode)
	}
	all, waiting, err := s.holders(ctx, entriesOf(s.e.dir(name), names))
	if err != nil || len(all) == 0 {
		return info, err
	}
	info.Held, info.Waiters = true, len(waiting)
	for _, h := range all {
		info.Holders = append(info.Holders, backend.Holder{
			Owner: h.Owner, HoldID: h.HoldID, Kind: h.Kind, Permits: h.Permits, Limit: h.Limit,
			Token: tokenOf(h.Use, h.Token), Nonce: h.nonce(), Since: h.since, Metadata: h.Metadata,
		})
	}
	if withQueue {
		queue, err := s.show(ctx, waiting[:min(len(waiting), backend.MaxQueue)])
		if err != nil {
			return info, err
		}
		for _, w := range queue {
			info.Queue = append(info.Queue, backend.Waiter{
				Owner: w.Owner, HoldID: w.HoldID, Kind: w.Kind, Permits: w.Permits, Limit: w.Limit, Since: w.since,
			})
		}
	}
	return info, nil
}

// show reads entries, and returns those that stand, in order.
func (s *session) show(ctx context.Context, all []entry) (found []seen, err error) {
	for part := range slices.Chunk(all, maxReads) {
		reqs := make([]request, len(part))
		for i, x := range part {
			reqs[i] = getData(x.path, false)
		}
		replies, err := s.do(ctx, reqs...)
		if err != nil {
			return nil, err
		}
		for i, a := range replies {
			n, err := a.node()
			if err != nil && !errors.Is(err, codeNoNode) {
				return nil, err
			}
			if x, ok := ownOf(n, part[i].path); err == nil && ok {
				found = append(found, seen{x, time.UnixMilli(n.stat.Ctime)})
			}
		}
	}
	return found, nil
}

// holders reads the entries that hold, the oldest first, and returns the waiters behind them. Entries that have gone,
// and foreign nodes, do not count; the entries behind them may then hold.
func (s *session) holders(ctx context.Context, queue []entry) (all []seen, waiting []entry, err error) {
	for {
		n := len(kit.Holders(queue, entry.use))
		fresh := queue[len(all):n]
		found, err := s.show(ctx, fresh)
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

// Names is engine.Inspector's. All names of the root are read for every page, with any prefix: a prefix cannot be read
// alone.
func (e *service) Names(ctx context.Context, prefix, after string) (page []backend.State, next string, err error) {
	if err := backend.ValidateName(prefix); err != nil && prefix != "" {
		return nil, "", err
	}
	page, err = again(ctx, e, func(s *session) ([]backend.State, error) {
		page, next = nil, ""
		replies, err := s.do(ctx, confirmed(), children(e.root))
		if err != nil {
			return nil, err
		}
		nodes, _, err := replies[1].names()
		if err != nil {
			return nil, ignore(err, codeNoNode)
		}
		slices.Sort(nodes)
		var names []string
		for _, node := range nodes {
			if name, ok := nameOf(node); ok && node > after && strings.HasPrefix(name, prefix) {
				if len(names) == pageSize {
					next = nameMark + escape(names[pageSize-1])
					break
				}
				names = append(names, name)
			}
		}
		if len(names) == 0 {
			return nil, nil
		}
		reqs := make([]request, len(names))
		for i, name := range names {
			reqs[i] = children(e.dir(name))
		}
		if replies, err = s.do(ctx, reqs...); err != nil {
			return nil, err
		}
		for i, name := range names {
			state, err := s.state(ctx, name, replies[i], false)
			if err != nil {
				return nil, err
			}
			page = append(page, state)
		}
		return page, nil
	})
	return page, next, err
}

// evictAtOnce bounds how many nodes one transaction deletes: servers refuse requests of more than 1 MB.
const evictAtOnce = 500

// Force is engine.Forcer's. The reason is written into the name's node in the transaction that deletes the entries, each
// in the version that was read. Without a condition it reads again if the holds have ended meanwhile.
func (e *service) Force(ctx context.Context, r backend.ForceRequest) (int, error) {
	dir, ended := e.dir(r.Name), 0
	for range maxWrites {
		all, err := again(ctx, e, func(s *session) ([]seen, error) {
			replies, err := s.do(ctx, confirmed(), children(dir))
			if err != nil {
				return nil, err
			}
			names, _, err := replies[1].names()
			if err != nil {
				return nil, ignore(err, codeNoNode)
			}
			all, _, err := s.holders(ctx, entriesOf(dir, names))
			return all, err
		})
		all = slices.DeleteFunc(all, func(h seen) bool { return !r.Matches(h.nonce(), tokenOf(h.Use, h.Token)) })
		if err != nil || len(all) == 0 {
			return ended, err
		}
		f := forced{Token: all[0].Token, Reason: r.Reason, By: r.By, Principal: r.Principal}
		for _, h := range all[1:] {
			f.Others = append(f.Others, h.Token)
		}
		trace, _ := json.Marshal(f) // of text and numbers only
		s, err := e.any(ctx)
		if err != nil {
			return ended, err
		}
		changed := false
		for part := range slices.Chunk(all, evictAtOnce) {
			ops := []request{setData(dir, trace, anyVersion)}
			for _, h := range part {
				ops = append(ops, remove(h.path, h.version))
			}
			replies, err := s.do(ctx, multi(ops...))
			if err == nil {
				_, _, err = replies[0].results()
			}
			switch {
			case err == nil:
				ended += len(part)
			case isOneOf(err, codeNoNode, codeBadVersion):
				changed = true
			default:
				return ended, err
			}
		}
		if !changed {
			return ended, nil
		}
	}
	return ended, cmp.Or(error(errChanged))
}
