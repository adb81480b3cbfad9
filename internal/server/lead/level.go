package lead

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/internal/machine"
)

// A feature level is what all members know. Members tell theirs, in answers outside of raft; the leader raises the
// cluster's, through the log, once all have told a higher one; and proposes nothing of a level that is not reached. So
// members of two versions run side by side while one after the other is replaced, in any order, whichever of them
// leads. A member whose version knows less than has been reached is not taken in, and one that comes back with an older
// version stops.

// raiseLevel raises the level to the highest one that all members know, and has this leadership use it.
func (r *Leadership) raiseLevel(ctx context.Context) error {
	c := &r.config
	present := c.Replica.State.Machine.Level()
	if present >= machine.MaxLevel {
		return nil
	}
	common, err := r.Term.CommonLevel(ctx)
	if err != nil {
		return err
	}
	if common <= present {
		return nil
	}
	landed := make(chan error, 1)
	raise := machine.Command{Op: machine.OpRaiseLevel, Level: common}
	if err := r.Propose(raise, func(err error) { landed <- err }); err != nil {
		return err
	}
	if err := <-landed; err != nil {
		return err
	}
	c.Log.Info("feature level raised", "level", common, "before", present)
	r.settleLimits(ctx)
	r.useLevel(ctx)
	return nil
}

// useLevel begins what the level permits.
func (r *Leadership) useLevel(ctx context.Context) {
	if r.config.Replica.State.Machine.Level() >= machine.LevelDeadlines {
		r.Time.keep(ctx)
	}
}

// settleLimits puts the limits of this member, which leads, into the state, unless they are there. They must be the
// same for all members, or these would drift apart: so they travel through the log, and the leader's count. It reports
// false if ctx ended before.
func (r *Leadership) settleLimits(ctx context.Context) bool {
	c := &r.config
	for ctx.Err() == nil {
		before := c.Replica.State.Machine.Limits()
		limits := c.Limits.At(c.Replica.State.Machine.Level())
		if before == limits {
			return true
		}
		landed := make(chan error, 1)
		err := r.Propose(machine.Command{Op: machine.OpSetLimits, Limits: &limits}, func(err error) { landed <- err })
		if err == nil {
			err = <-landed
		}
		if err == nil {
			c.Log.Info("limits changed", "limits", fmt.Sprintf("%+v", limits), "before", fmt.Sprintf("%+v", before))
			continue // to see that it is so
		}
		select {
		case <-time.After(retryAfter):
		case <-ctx.Done():
		}
	}
	return false
}
