package fencelock

// Elections. An election is a lock that its candidates acquire repeatedly, so all rules of leases
// apply to leadership; this file adds the loop and its pauses.

import (
	"context"
	"errors"
	"iter"
	"math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/cleanup"
)

// ErrResign is returned by the function of Lead to resign and stand again, behind the candidates that wait. It may be
// wrapped.
var ErrResign = errors.New("resigned")

// Lead stands for election under name and runs fn while it leads: of all callers of Lead with the name, one leads at a
// time. fn gets a context that ends when ctx ends or, with a *LostError as its cause, before another candidate can
// lead; Lead waits for fn to return. After a loss it stands again, as it does when the lock service cannot be reached
// for a while, always after a short pause.
//
//	err := locks.Lead(ctx, "scheduler", func(ctx context.Context, lease *fencelock.Lease) error {
//		return schedule(ctx, lease.Claim("jobs")) // until ctx ends
//	})
//
// Lead returns when ctx has ended, with an error of the call "lead" that wraps ctx's error and cause, whether it led or
// waited; when fn returns while it leads, with fn's result, unless that is ErrResign or just ctx's error; and when an
// acquire fails for a permanent reason, such as an invalid name or a closed client. After the leadership is lost, fn's
// return value is ignored. The loss of another lock is returned like any error.
//
// In the correctness tier the lease's token is the term, and writes that carry it are refused once there is a later
// leader. In the efficiency tier two leaders can overlap after a failover of the service. Candidates use the same
// options; WaitAtMost applies to each campaign. Reentrant and RequestID are ErrInvalidOption: a leader that resigns
// has to release the leadership, and a second call with the same id would take the hold from the leader.
//
//	candidate 1   acquire ─► fn leads ─► loss ─► fn returns ─► pause ─► acquire: waits behind the others
//	candidate 2   acquire: waits ─────────────► fn leads …
func (c *Client) Lead(
	ctx context.Context, name string, fn func(ctx context.Context, lease *Lease) error, opts ...AcquireOption,
) error {
	if fn == nil {
		return callError("lead", name, invalidOption("function", "nil", "it is nil"))
	}
	switch o, err := collect(opts); {
	case err == nil && o.reentrant:
		return callError("lead", name, invalidOption("Reentrant", "with Lead", "a leader that resigns releases the hold"))
	case err == nil && o.requestID != "":
		return callError("lead", name, invalidOption("RequestID", o.requestID, "it cannot identify several terms"))
	}
	for faults := 0; ; {
		lease, err := c.Acquire(ctx, name, opts...)
		if err == nil {
			var again bool
			if again, err = c.rule(ctx, lease, fn); !again {
				if err != nil && err == ctx.Err() { //nolint:errorlint // an error of fn that wraps it says more
					return callError("lead", name, endOf(ctx))
				}
				return err
			}
			faults = 3 // on a driver without a queue, the former leader would be the first to retry
		} else if ended := ctx.Err(); ended != nil && errors.Is(err, ended) {
			return callError("lead", name, endOf(ctx))
		} else if !passes(err) {
			return err
		}
		faults++
		if sleep(ctx, c.electionPause(faults)) != nil {
			return callError("lead", name, endOf(ctx))
		}
	}
}

// rule runs fn once, and reports whether to stand again: after a loss of this very leadership, and after ErrResign,
// unless ctx has ended. It checks for a loss when fn returns, before the release.
func (c *Client) rule(
	ctx context.Context, lease *Lease, fn func(ctx context.Context, lease *Lease) error,
) (again bool, err error) {
	began := c.observedNow()
	lease.of.tell(&Event{Type: EventElected})
	lost, ended := false, errAborted
	defer func() { // also on a panic or runtime.Goexit in fn
		lease.of.tell(&Event{Type: EventDeposed, Held: c.observedNow().Sub(began), Err: ended})
	}()
	err = c.run(ctx, Leases{lease}, func(ctx context.Context) error {
		err := fn(ctx, lease)
		lost = errors.Is(lease.Err(), ErrLost)
		return err
	})
	ended = err
	switch {
	case ctx.Err() != nil, !lost && !errors.Is(err, ErrResign):
		return false, err
	}
	return true, nil
}

// passes reports whether a failed acquire may succeed later. Unclassified errors count as temporary: a candidate that
// retries every second is better than a candidate that stops.
func passes(err error) bool {
	return !cleanup.Final(err) && !errors.Is(err, ErrTier) && !errors.Is(err, ErrDeadlock)
}

// electionPause returns the pause before the n-th repetition: 50 ms, doubling to 1.6 s, and of that a random part
// between a half and all, so that candidates do not all return at the same time after an outage.
func (c *Client) electionPause(n int) time.Duration {
	d := 50 * time.Millisecond << min(n-1, 5)
	return time.Duration(float64(d) * (1 + c.chance()) / 2)
}

// sleep waits for d, and returns ctx.Err() if ctx ends first.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Leader returns the current leader: the holder of the election's lock. Without a leader the error is ErrNotHeld. The
// result may be out of date when it arrives; a leader proves itself by its token alone. Needs a driver with
// CapInspect, ErrUnsupported otherwise.
//
//	leader, err := locks.Leader(ctx, "scheduler")
//	if errors.Is(err, fencelock.ErrNotHeld) {
//		return "nobody leads"
//	}
func (c *Client) Leader(ctx context.Context, name string) (Holder, error) {
	info, err := c.Look(ctx, name)
	switch {
	case err != nil:
		return Holder{}, err
	case len(info.Holders) == 0:
		return Holder{}, callError("leader", name, ErrNotHeld)
	}
	return info.Holders[0], nil
}

// leaderPoll is the interval in which Leaders polls a driver without CapWatchReplay.
const leaderPoll = time.Second

// Leaders yields the current leader, and then each change, until ctx ends or the service fails; the error comes last.
// The zero Holder means that there is no leader. Leaders that follow each other quickly may be skipped; the last one
// never is.
//
//	for leader, err := range locks.Leaders(ctx, "scheduler") {
//		if err != nil {
//			return err
//		}
//		route(leader.Owner)
//	}
//
// It looks, and then waits for a change after the revision that it saw, so that it misses no change. With
// CapWatchReplay the service reports changes; otherwise Leaders polls about every second. Needs a driver with
// CapInspect, ErrUnsupported otherwise.
func (c *Client) Leaders(ctx context.Context, name string) iter.Seq2[Holder, error] {
	return func(yield func(Holder, error) bool) {
		var last Holder
		for first := true; ; first = false {
			info, err := c.Look(ctx, name)
			if err != nil {
				yield(Holder{}, err)
				return
			}
			var now Holder
			if len(info.Holders) > 0 {
				now = info.Holders[0]
			}
			if first || now.HoldID != last.HoldID || now.Token != last.Token {
				if !yield(now, nil) {
					return
				}
			}
			last = now
			if err := c.change(ctx, name, info.Revision); err != nil {
				yield(Holder{}, callError("leaders", name, err))
				return
			}
		}
	}
}

// change waits until name may have changed since a revision. It may return without a change: its caller then looks.
// A revision that is too old for the service counts as a change.
func (c *Client) change(ctx context.Context, name string, since uint64) error {
	if since == 0 || !c.driver.Describe().Capabilities.Has(backend.CapWatch|backend.CapWatchReplay) {
		return sleep(ctx, leaderPoll*3/4+rand.N(leaderPoll/2))
	}
	for _, err := range c.Watch(ctx, name, Since(since)) {
		if err != nil && !errors.Is(err, backend.ErrCompacted) {
			return err
		}
		return nil
	}
	return ctx.Err()
}
