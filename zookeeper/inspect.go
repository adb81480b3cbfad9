// This file has the calls of observers and operators. Every call here first proves a session, so that its server has
// the leader's state as of the beginning of the call: a lagging server, or an overtaken leader, would show former
// holders. The driver declares no Watch: a watch of ZooKeeper fires once, and changes before it is set again are not
// reported.

package zookeeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Look returns the holders of a name and the number of waiters, as of some instant during the call. The queue and the
// holders' nodes are read one after the other; a hold that ends in between is omitted. ExpiresIn is zero, since
// ZooKeeper does not return the timeouts of other sessions. Since is the time at which the holder entered the queue,
// by the leader's clock. A free name is no error. If the connection is lost before the session is proved, Look
// retries, three attempts in all.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	var info backend.State
	err := backend.ValidateName(name)
	if err == nil {
		err = d.onSession(ctx, func(ctx context.Context, s *session) (err error) {
			info, err = s.describe(ctx, name, true)
			return err
		})
	}
	if err != nil {
		return backend.State{}, d.callError("look", name, err)
	}
	return info, nil
}

// onSession calls f with a session on a server that has the leader's state as of the beginning of the call. It counts
// the call in, and ends its context with Close.
func (d *Driver) onSession(ctx context.Context, f func(context.Context, *session) error) error {
	ctx, end, err := d.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	s, err := d.proven(ctx, nil)
	if err != nil {
		return err
	}
	defer s.Leave(1)
	return f(ctx, s)
}

// proven returns a session that was proved after the call began, and counts one more user of it: the session of the
// leftover, if that is given. After a lost connection it retries, tries times in all, until ctx ends.
func (d *Driver) proven(ctx context.Context, left *leftover) (*session, error) {
	for n := 1; ; n++ {
		s, err := d.sessionOf(ctx, left)
		if err == nil {
			if err = s.prove(ctx, d.clock.Now()); err == nil {
				return s, nil
			}
			s.Leave(1)
		}
		if n == tries || ctx.Err() != nil || !transient(err) || errors.Is(err, errNoConnection) {
			return nil, err
		}
		if ended := kit.Sleep(ctx, kit.RetryPause(d.minTTL())); ended != nil {
			return nil, fmt.Errorf("%w: %w", ended, err)
		}
	}
}

// describe reads the state of a name, and the nodes of the waiters if withQueue is set.
func (s *session) describe(ctx context.Context, name string, withQueue bool) (backend.State, error) {
	info := backend.State{Name: name}
	all, waiting, err := s.holders(ctx, s.d.dir(name))
	if err != nil || len(all) == 0 {
		return info, err
	}
	info.Held, info.Waiters = true, len(waiting)
	if withQueue {
		if info.Queue, err = s.queue(ctx, waiting); err != nil {
			return info, err
		}
	}
	// Since is the creation of the holder's node, so that it includes the time in the queue.
	for _, h := range all {
		info.Holders = append(info.Holders, backend.Holder{
			Owner: h.Owner, HoldID: h.HoldID, Kind: h.Kind, Permits: h.Permits, Limit: h.Limit,
			Token: tokenOf(h.Use, h.Token), Nonce: h.nonce(),
			Since: time.UnixMilli(h.stat.Ctime), Metadata: h.Metadata,
		})
	}
	return info, nil
}

// queue reads the nodes of the first waiters. Nodes that end meanwhile are omitted.
func (s *session) queue(ctx context.Context, waiting []entry) ([]backend.Waiter, error) {
	waiting = waiting[:min(len(waiting), backend.MaxQueue)]
	nodes, errs := make([]found, len(waiting)), make([]error, len(waiting))
	sideBySide(len(waiting), func(i int) { nodes[i], errs[i] = s.get(ctx, waiting[i].path, false) })
	var all []backend.Waiter
	for i, e := range waiting {
		switch {
		case errors.Is(errs[i], zk.ErrNoNode) || errs[i] == nil && nodes[i].stat.EphemeralOwner == 0:
		case errs[i] != nil:
			return nil, errs[i]
		default:
			all = append(all, backend.Waiter{
				Owner: nodes[i].Owner, HoldID: nodes[i].HoldID, Kind: e.Kind, Permits: e.Permits, Limit: e.Limit,
				Since: time.UnixMilli(nodes[i].stat.Ctime),
			})
		}
	}
	return all, nil
}

// holders reads the entries that hold, the oldest first, and returns the waiters behind them. Entries that have ended
// since the queue was read, and foreign nodes, do not count; the entries behind them may then hold, so it evaluates
// the queue again without them, and reads only the new entries.
func (s *session) holders(ctx context.Context, dir string) (all []held, waiting []entry, err error) {
	// The session was proved, so that the queue is as new as the call. Its entries may end while their nodes are read.
	queue, err := s.children(ctx, dir)
	if err != nil {
		return nil, nil, err
	}
	for {
		// The nodes read in earlier turns are first in the queue, in the same order.
		n := len(kit.Holders(queue, entry.use))
		fresh := queue[len(all):n]
		nodes, errs := make([]found, len(fresh)), make([]error, len(fresh))
		sideBySide(len(fresh), func(i int) { nodes[i], errs[i] = s.get(ctx, fresh[i].path, false) })
		// Nodes in the queue that are no entries, or no longer are.
		none := map[string]bool{}
		for i, e := range fresh {
			switch {
			case errors.Is(errs[i], zk.ErrNoNode) || errs[i] == nil && nodes[i].stat.EphemeralOwner == 0:
				none[e.path] = true
			case errs[i] != nil:
				return nil, nil, errs[i]
			default:
				all = append(all, held{entry: e, found: nodes[i]})
			}
		}
		if len(none) == 0 {
			return all, queue[n:], nil
		}
		queue = slices.DeleteFunc(queue, func(e entry) bool { return none[e.path] })
	}
}

// List yields the names that begin with prefix and are held, in the order of their escaped form. The names are read in
// one request, and the state of each after that, so that names whose holder changes meanwhile may be missing. All
// names of the root are read for every List, with any prefix; they must fit one answer of a server, 1 MB. The loop may
// stop at any time. An error ends it and is yielded last.
func (d *Driver) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		if err := d.list(ctx, prefix, yield); err != nil {
			yield(backend.State{}, d.callError("list", prefix, err))
		}
	}
}

// list is List without the name of the call. It ends without an error when yield is false.
func (d *Driver) list(ctx context.Context, prefix string, yield func(backend.State, error) bool) error {
	if prefix != "" {
		if err := backend.ValidateName(prefix); err != nil {
			return err
		}
	}
	return d.onSession(ctx, func(ctx context.Context, s *session) error {
		// One read for all names; a prefix cannot be read alone.
		nodes, err := s.names(ctx, d.root)
		if err != nil {
			return err
		}
		slices.Sort(nodes)
		for _, node := range nodes {
			name, ok := nameOf(node)
			if !ok || !strings.HasPrefix(name, prefix) {
				continue
			}
			// Each name costs two requests or more: List is for people and tools, and no acquire calls it.
			info, err := s.describe(ctx, name, false)
			if err != nil {
				return err
			}
			if info.Held && !yield(info, nil) {
				return nil
			}
		}
		return nil
	})
}

// ForceRelease ends the holds that r names, by deleting their nodes, and leaves the reason in the name's node in the
// same transaction; the victims are notified immediately, with ReasonForceReleased. The waiters move up. One
// transaction ends up to 500 holds; with more, an error may end the call after some of them. If no hold of the name
// matches, the error is backend.ErrNotHeld. The path of a hold's node is unique, so the deletion is the comparison. A
// call without an answer is ErrUnknown, and is not repeated by the driver: without a condition a second try could end
// the next holder's hold.
func (d *Driver) ForceRelease(ctx context.Context, r backend.ForceRequest) error {
	err := kit.ValidateForce(d.Describe(), &r)
	if err == nil {
		err = d.onSession(ctx, func(ctx context.Context, s *session) error { return s.force(ctx, d.dir(r.Name), &r) })
	}
	return d.callError("force-release", r.Name, err)
}

// force ends the holds that r names. Without a condition it retries if the holds found have ended meanwhile.
func (s *session) force(ctx context.Context, dir string, r *backend.ForceRequest) error {
	for {
		all, _, err := s.holders(ctx, dir)
		if err != nil {
			return err
		}
		all = slices.DeleteFunc(all, func(h held) bool { return !r.Matches(h.nonce(), tokenOf(h.Use, h.Token)) })
		if len(all) == 0 {
			return backend.ErrNotHeld
		}
		done, err := s.evict(ctx, dir, all, r)
		switch {
		case err != nil || done:
			return err
		case r.Conditional():
			return backend.ErrNotHeld
		}
	}
}

// evictAtOnce is the maximum number of nodes that one transaction deletes: servers refuse requests of more than 1 MB
// (jute.maxbuffer).
const evictAtOnce = 500

// evict deletes entries, and leaves the reason in the name's node in the same transaction. It returns false if there
// was no entry left to delete. If one of them has ended, the whole transaction fails, and is retried without it.
func (s *session) evict(ctx context.Context, dir string, all []held, r *backend.ForceRequest) (
	done bool, err error,
) {
	// One trace names all victims, so that each transaction writes the same trace.
	f := forced{Token: all[0].Token, Reason: r.Reason, By: r.By, Principal: r.Principal}
	for _, h := range all[1:] {
		f.Others = append(f.Others, h.Token)
	}
	trace, err := json.Marshal(f)
	if err != nil {
		return false, err
	}
	for len(all) > 0 {
		some := all[:min(len(all), evictAtOnce)]
		ops := []any{&zk.SetDataRequest{Path: dir, Data: trace, Version: -1}}
		for _, h := range some {
			ops = append(ops, &zk.DeleteRequest{Path: h.path, Version: -1})
		}
		switch err := s.multi(ctx, ops...); {
		case err == nil:
			done, all = true, all[len(some):]
		case !errors.Is(err, zk.ErrNoNode):
			return done, err
		default:
			// One of them has ended, and the transaction had no effect: retry without it.
			queue, err := s.children(ctx, dir)
			if err != nil {
				return done, err
			}
			all = slices.DeleteFunc(all, func(h held) bool { return place(queue, h.path) < 0 })
		}
	}
	return done, nil
}
