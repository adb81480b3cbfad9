package redis

// This file looks at many names and takes holds away: List, ForceRelease, and the question why a hold is gone. None of
// it is on the path of Acquire or Release, and none of it makes them dearer: there is no index of names, and the mark
// of a force-release is written by the one who forces it.

import (
	"context"
	"iter"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const (
	// scanCount is how many keys one SCAN looks at: the server does nothing else meanwhile.
	scanCount = 1000
	// markedTime is for asking why a hold is gone. The loss itself is told in any case; only its reason would be less
	// exact.
	markedTime = time.Second
)

// List yields the names that begin with prefix and are held, in no order. It reads through all keys of the database, of
// a cluster those of each master in turn, 1000 at a time, since an index would cost every acquire: on a server that is
// used for much else it is slow, and the server serves others meanwhile. Names that are held from its beginning to its
// end are yielded once, except those whose keys move to another node of a cluster meanwhile, which may be missing;
// others may be yielded or not. State.Revision is 0. After an error, which is yielded last, nothing more comes: ctx's,
// ErrUnavailable, ErrMisconfigured, or ErrClosed. It may run beside other calls.
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
	return question(ctx, func(ctx context.Context) ([]goredis.Cmdable, error) {
		return eachMaster(ctx, d.client, func(_ context.Context, c goredis.Cmdable) (goredis.Cmdable, error) {
			return c, nil
		})
	})
}

// question asks what changes nothing and returns within ctx. go-redis 9.23 ends a command with its context's deadline
// but not with its cancellation, so the question is asked on a goroutine of its own, which ends after answerTime at the
// latest. A step cannot be left behind like that: its outcome would matter.
func question[T any](ctx context.Context, ask func(context.Context) (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	got := make(chan answer, 1)
	go func() {
		ctx, cancel := context.WithTimeout(ctx, answerTime)
		defer cancel()
		value, err := ask(ctx)
		got <- answer{value, err}
	}()
	var none T
	select {
	case a := <-got:
		if a.err == nil {
			return a.value, nil
		}
		return none, redisconn.Unsent(a.err)
	case <-ctx.Done():
		return none, &redisconn.Failure{Cause: ctx.Err()}
	}
}

// page reads one page of keys, and what is held under them in one pipeline. Each page is a call of its own at the gate,
// so that a reader that takes its time between pages does not keep Close waiting.
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
	found, err := question(ctx, func(ctx context.Context) (s scanned, err error) {
		s.keys, s.next, err = node.Scan(ctx, cursor, redisscript.Pattern(d.o.KeyPrefix, prefix), scanCount).Result()
		return s, err
	})
	if err != nil {
		return nil, 0, err
	}
	var names []string
	var all []*step
	for _, key := range found.keys {
		name, ok := redisscript.NameOf(d.o.KeyPrefix, key)
		// A pattern of SCAN may match more than the prefix: queues, marks, and keys of others.
		if !ok || seen[name] || !strings.HasPrefix(name, prefix) {
			continue
		}
		seen[name] = true
		names = append(names, name)
		all = append(all, newStep(redisscript.Inform, redisscript.KeysOfLock(key)))
	}
	if len(all) == 0 {
		return nil, found.next, nil
	}
	d.lines.doAll(ctx, all, func(i int, s *step, failed error) {
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

// ForceRelease ends all holds of name that it finds, and offers the lock to the first waiter, in two round trips. A
// minimum hold ends with its hold; a name that only a minimum hold keeps closed is backend.ErrNotHeld. The victims
// learn backend.ReasonForceReleased with their next renewal, or ReasonEvicted if they were granted at that very moment,
// or if the mark that says so was lost; reason is not stored. Until that renewal they believe in their holds, for as
// long as the TTL at most.
func (d *Driver) ForceRelease(ctx context.Context, name, reason string) (err error) {
	defer redisconn.Tell(ctx, driverName, "force-release", name, &err)
	if err := backend.ValidateName(name); err != nil {
		return err
	}
	if err := d.probe.BeginKnown(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	keys := d.keys(name)
	// The holds are marked first and ended afterwards. The other order would leave a moment in which a victim renews,
	// finds its hold gone, and finds no mark. A mark without an end, when the second step fails, says nothing to
	// anybody: it is read only by those whose hold is gone.
	if _, _, err := d.lines.do(ctx, newStep(redisscript.Mark, keys.Marks())); err != nil {
		return err
	}
	ended, err := d.endHold(ctx, redisscript.Force, keys)
	if err == nil && !ended {
		err = &backend.NotHeldError{Name: name}
	}
	return err
}

// explain finds out why holds are gone that have not run out, and sets the reason of those that were force-released. It
// takes markedTime at most; if the service does not tell by then the reasons stay as they are, and the losses are told
// anyway. The mark is removed by reading it, so a reason is told once, to the one who lost the hold.
func (d *Driver) explain(ctx context.Context, grants []backend.Grant, lost []*backend.NotHeldError) {
	ctx, cancel := context.WithTimeout(ctx, markedTime)
	defer cancel()
	var all []*step
	var asked []*backend.NotHeldError
	for i, g := range grants {
		// What ran out needs no other reason, and a grant without an incarnation was never in the server.
		if lost[i] == nil || lost[i].Reason != backend.ReasonEvicted || g.Incarnation == "" {
			continue
		}
		marks := d.keys(g.Name).Marks()
		all = append(all, newStep(redisscript.Marked, marks, redisconn.StartOf(g)))
		asked = append(asked, lost[i])
	}
	if len(all) == 0 {
		return
	}
	d.lines.doAll(ctx, all, func(i int, s *step, err error) {
		if err != nil {
			return
		}
		if s.Answer == int64(1) {
			asked[i].Reason = backend.ReasonForceReleased
		}
	})
}
