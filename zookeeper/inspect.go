// This file looks at locks from outside, and takes them away. Every call here first proves a session, so that its
// server knows whatever the leader knew when the call began: a server that lags, or a leader that was overtaken, would
// show holders that have gone. The driver declares no Watch: a watch of ZooKeeper fires once, and what happens before
// it is set again is not told.

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

// Look tells who holds a name and how many wait for it, as the ensemble had it at some instant during the call. The
// queue and the holders' nodes are read one after the other; a holder who goes in between is left out. ExpiresIn is
// zero, since ZooKeeper does not tell how long others' sessions last. Since is the time at which the holder entered
// the queue, by the leader's clock. A name that nobody holds is no error. A connection that is lost before the session
// is proved is tried again, three times in all.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	var info backend.State
	err := backend.ValidateName(name)
	if err == nil {
		err = d.onSession(ctx, func(ctx context.Context, s *session) (err error) {
			info, err = s.describe(ctx, name)
			return err
		})
	}
	if err != nil {
		return backend.State{}, d.callError("look", name, err)
	}
	return info, nil
}

// onSession calls f with a session whose server knows all that the leader knew when the call began. It counts the call
// in, and ends its context with Close.
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

// proven returns a session that was proved after the call began, and counts one more user of it: the session on which
// the leftover may stand, if that is given. A connection that is lost meanwhile is no answer: it tries again, tries
// times in all, until ctx ends.
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

// describe reads the state of a name.
func (s *session) describe(ctx context.Context, name string) (backend.State, error) {
	info := backend.State{Name: name}
	all, waiters, err := s.holders(ctx, s.d.dir(name))
	if err != nil || len(all) == 0 {
		return info, err
	}
	info.Held, info.Waiters = true, waiters
	// Since is the creation of the holder's node, so that the time in the queue counts in it.
	for _, h := range all {
		info.Holders = append(info.Holders, backend.Holder{
			Owner: h.Owner, HoldID: h.HoldID, Kind: h.Kind, Permits: h.Permits, Token: tokenOf(h.Use, h.Token),
			Since: time.UnixMilli(h.stat.Ctime), Metadata: h.Metadata,
		})
	}
	return info, nil
}

// holders reads the entries that hold, the oldest first, and tells how many wait behind them. Entries that have gone
// since the queue was read, and foreign nodes, do not count; those behind them may then hold, so that it looks at the
// queue once more without them, and reads only what it has not read yet.
func (s *session) holders(ctx context.Context, dir string) (all []held, waiters int, err error) {
	// The session was proved, so that the queue is as new as the call. What it shows may go while its nodes are read.
	queue, err := s.children(ctx, dir)
	if err != nil {
		return nil, 0, err
	}
	for {
		// The nodes that were read in earlier turns stand first in the queue, in the same order.
		n := len(kit.Holders(queue, entry.use))
		fresh := queue[len(all):n]
		nodes, errs := make([]found, len(fresh)), make([]error, len(fresh))
		sideBySide(len(fresh), func(i int) { nodes[i], errs[i] = s.get(ctx, fresh[i].path, false) })
		// Those that the queue shows and that are no entries, or not any more.
		none := map[string]bool{}
		for i, e := range fresh {
			switch {
			case errors.Is(errs[i], zk.ErrNoNode) || errs[i] == nil && nodes[i].stat.EphemeralOwner == 0:
				none[e.path] = true
			case errs[i] != nil:
				return nil, 0, errs[i]
			default:
				all = append(all, held{entry: e, found: nodes[i]})
			}
		}
		if len(none) == 0 {
			return all, len(queue) - n, nil
		}
		queue = slices.DeleteFunc(queue, func(e entry) bool { return none[e.path] })
	}
}

// List yields the names that begin with prefix and are held, in the order of their escaped form. The names are read at
// once, and the state of each after that, so that names which are taken and given back meanwhile may be missing. All
// names of the root are read for every List, whatever the prefix; they must fit one answer of a server, 1 MB. The loop
// may stop at any time. An error ends it and is yielded last.
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
		// One read for all names; there is none for a prefix.
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
			// Two requests or more for each name: List is for people and tools, and not for the way of an acquire.
			info, err := s.describe(ctx, name)
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

// ForceRelease ends all holds of name that it finds, by deleting their nodes, and leaves reason in the name's node in
// the same transaction; the victims are told at once, with ReasonForceReleased. Those who wait move up. It takes 500
// holders in one transaction; of more, some may be taken away when an error ends the call. A name that nobody holds is
// backend.ErrNotHeld. A call without an answer is ErrUnknown, and is not repeated by the driver: a second try could
// end the next holder's hold.
func (d *Driver) ForceRelease(ctx context.Context, name, reason string) error {
	err := backend.ValidateName(name)
	if err == nil {
		err = d.onSession(ctx, func(ctx context.Context, s *session) error { return s.force(ctx, d.dir(name), reason) })
	}
	return d.callError("force-release", name, err)
}

// force ends all holds that it finds, and looks again if those that it found ended by themselves meanwhile.
func (s *session) force(ctx context.Context, dir, reason string) error {
	for {
		all, _, err := s.holders(ctx, dir)
		if err != nil {
			return err
		}
		if len(all) == 0 {
			return backend.ErrNotHeld
		}
		done, err := s.evict(ctx, dir, all, reason)
		if err != nil || done {
			return err
		}
		// They ended by themselves meanwhile; look again.
	}
}

// evictAtOnce bounds how many nodes one transaction deletes: servers refuse requests of more than 1 MB
// (jute.maxbuffer).
const evictAtOnce = 500

// evict deletes entries, and leaves the reason in the name's node in the same transaction. It is false if none was
// left to delete. Where one of them has gone, the whole transaction fails; the rest is tried again.
func (s *session) evict(ctx context.Context, dir string, all []held, reason string) (done bool, err error) {
	// One trace names all victims, so that each transaction may write the same.
	f := forced{Token: all[0].Token, Reason: reason}
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
			// One of them has ended by itself, and the transaction did nothing. The rest is tried without it.
			queue, err := s.children(ctx, dir)
			if err != nil {
				return done, err
			}
			all = slices.DeleteFunc(all, func(h held) bool { return place(queue, h.path) < 0 })
		}
	}
	return done, nil
}
