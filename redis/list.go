package redis

// This file looks at many names and ends holds: List, ForceRelease, and the question why a hold is gone. It adds no
// cost to Acquire or Release: there is no index of names, and ForceRelease itself writes its marks.

import (
	"context"
	"iter"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

const (
	// scanCount is the number of keys per SCAN, which blocks the server.
	scanCount = 1000
	// markedTime bounds the question why a hold is gone. The loss itself is reported in any case, with a less exact
	// reason.
	markedTime = time.Second
)

// List yields the held names that begin with prefix, in no order. It reads all keys of the database, on a cluster of
// each master in turn, 1000 at a time, since an index would cost every acquire: it is slow on a server with many
// other keys, but does not block the server. Names that are held from its beginning to its end are yielded once,
// except names with keys that move to another node of a cluster meanwhile, which may be missing; other names may be
// yielded or not. State.Revision is 0. An error comes last: ctx's, ErrUnavailable, ErrMisconfigured, or ErrClosed. It
// may run beside other calls.
func (d *Driver) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		if err := d.list(ctx, prefix, func(s backend.State) bool { return yield(s, nil) }); err != nil {
			yield(backend.State{}, redisconn.CallError(ctx, driverName, "list", prefix, err))
		}
	}
}

// list is List without the words of its error. The names that were seen are remembered, because SCAN may show a key
// twice while the server rearranges its table.
func (d *Driver) list(ctx context.Context, prefix string, yield func(backend.State) bool) error {
	nodes, err := d.nodes(ctx)
	if err != nil {
		return err
	}
	seen := map[string]bool{} // SCAN may show a key twice
	for _, node := range nodes {
		for cursor := uint64(0); ; {
			var states []backend.State
			if states, cursor, err = d.page(ctx, node, prefix, cursor, seen); err != nil {
				return err
			}
			for _, s := range states {
				if !yield(s) {
					return nil
				}
			}
			if cursor == 0 {
				break
			}
		}
	}
	return nil
}

// nodes returns a client of each server that has locks: every master of a cluster, otherwise the one client.
func (d *Driver) nodes(ctx context.Context) ([]goredis.Cmdable, error) {
	if err := d.probe.BeginKnown(ctx); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	return lines.Question(ctx, func(ctx context.Context) ([]goredis.Cmdable, error) {
		return lines.EachMaster(ctx, d.client, func(_ context.Context, c goredis.Cmdable) (goredis.Cmdable, error) {
			return c, nil
		})
	})
}

// page reads one page of keys, and their holds in one pipeline. Each page is its own call at the gate, so that a slow
// reader between pages does not keep Close waiting.
//
// SCAN shows lock keys, queues and other people's keys that happen to match: NameOf tells which are ours, since the
// pattern cannot.
func (d *Driver) page(ctx context.Context, node goredis.Cmdable, prefix string, cursor uint64, seen map[string]bool) (
	held []backend.State, next uint64, err error,
) {
	if err := d.probe.BeginKnown(ctx); err != nil {
		return nil, 0, err
	}
	defer d.gate.Leave()
	type scanned struct {
		keys []string
		next uint64
	}
	// SCAN goes by the client and not by a line: it may take long, and everybody's steps would stand behind it.
	found, err := lines.Question(ctx, func(ctx context.Context) (s scanned, err error) {
		s.keys, s.next, err = node.Scan(ctx, cursor, redisscript.Pattern(d.o.KeyPrefix, prefix), scanCount).Result()
		return s, err
	})
	if err != nil {
		return nil, 0, err
	}
	var names []string
	var all []*lines.Step
	for _, key := range found.keys {
		name, ok := redisscript.NameOf(d.o.KeyPrefix, key)
		// A pattern of SCAN may match more than the prefix: queues, marks, and keys of others.
		if !ok || seen[name] || !strings.HasPrefix(name, prefix) {
			continue
		}
		seen[name] = true
		names = append(names, name)
		all = append(all, lines.NewStep(redisscript.Inform, redisscript.KeysOfLock(key)))
	}
	if len(all) == 0 {
		return nil, found.next, nil
	}
	d.lines.DoAll(ctx, all, func(i int, s *lines.Step, failed error) {
		switch {
		// After the first failure the other answers are passed over: each step must still be seen to end.
		case err != nil:
		case failed != nil:
			err = failed
		default:
			var state backend.State
			if state, err = stateOf(names[i], s.Answer); err == nil && state.Held {
				held = append(held, state)
			}
		}
	})
	return held, found.next, err
}

// ForceRelease ends the holds that r names, marks them with the reason, and offers the lock to the first waiter, in one
// step of the script. With a condition it looks first which value has the nonce or token, and the step compares that
// value. A minimum hold ends with its hold; a name that only a minimum hold keeps closed is backend.ErrNotHeld. The
// victims learn backend.ReasonForceReleased with their next renewal, or ReasonEvicted if the mark was lost. Until that
// renewal they believe in their holds, for as long as the TTL at most.
func (d *Driver) ForceRelease(ctx context.Context, r backend.ForceRequest) (err error) {
	defer redisconn.Tell(ctx, driverName, "force-release", r.Name, &err)
	if err := kit.ValidateForce(d.Describe(), &r); err != nil {
		return err
	}
	if err := d.probe.BeginKnown(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	keys := d.keys(r.Name)
	var start string
	if r.Conditional() {
		if start, err = d.startOf(ctx, keys, &r); err != nil {
			return err
		}
	}
	s := lines.NewStep(redisscript.Force, keys, start, redisscript.MarkOf(r.Reason, r.By, r.Principal))
	s.Others = append(s.Others, keys.Marks())
	ended, err := d.endHold(ctx, s)
	if err == nil && !ended {
		err = &backend.NotHeldError{Name: r.Name}
	}
	return err
}

// startOf returns the start of the value of the hold that r names.
func (d *Driver) startOf(ctx context.Context, keys redisscript.Keys, r *backend.ForceRequest) (string, error) {
	answer, _, err := d.lines.Do(ctx, lines.NewStep(redisscript.Inform, keys))
	if err != nil {
		return "", err
	}
	state, ok := redisscript.ParseState(answer)
	if !ok {
		return "", &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
	}
	for _, s := range append(state.Shares, state) {
		if start := s.Hold.Start(); s.Held && r.Matches(redisscript.NonceOf(start), 0) {
			return start, nil
		}
	}
	return "", &backend.NotHeldError{Name: r.Name}
}

// explain finds out why holds are gone that have not expired, and sets the reason of those that were force-released. It
// takes markedTime at most; without an answer by then the reasons stay as they are, and the losses are reported anyway.
// Reading a mark removes it, so a reason is reported once, to the one who lost the hold.
func (d *Driver) explain(ctx context.Context, grants []backend.Grant, lost []*backend.NotHeldError) {
	ctx, cancel := context.WithTimeout(ctx, markedTime)
	defer cancel()
	var all []*lines.Step
	var asked []*backend.NotHeldError
	for i, g := range grants {
		// An expired hold needs no other reason, and a grant without an incarnation was never in the server.
		if lost[i] == nil || lost[i].Reason != backend.ReasonEvicted || g.Incarnation == "" {
			continue
		}
		marks := d.keys(g.Name).Marks()
		all = append(all, lines.NewStep(redisscript.Marked, marks, redisconn.StartOf(g)))
		asked = append(asked, lost[i])
	}
	if len(all) == 0 {
		return
	}
	d.lines.DoAll(ctx, all, func(i int, s *lines.Step, err error) {
		if err != nil {
			return
		}
		if text, by, principal, marked := redisscript.ParseMarked(s.Answer); marked {
			*asked[i] = *backend.Loss{
				Reason: backend.ReasonForceReleased, Text: text, By: by, Principal: principal,
			}.NotHeld(asked[i].Name)
		}
	})
}
