package lead

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/principal"
)

// A feature level numbers the features that all members know. Members report their levels, in answers outside of
// raft; the leader raises the cluster's, through the log, once all have reported a higher one; and uses a level only
// when it is reached. So members of two versions run side by side while one after the other is replaced, in any
// order, whichever of them leads. A member whose version is below the cluster's level is not admitted, and stops if
// it is a member already.

// levelTime bounds how long a new leadership asks the members what they know: nobody is served meanwhile.
const levelTime = 300 * time.Millisecond

// levelUp raises the level before anybody is served: to the given one, or if that is zero to the highest that all
// members report in time.
func (r *Leadership) levelUp(ctx context.Context, level uint32) error {
	if level == 0 {
		asking, cancel := context.WithTimeout(ctx, levelTime)
		defer cancel()
		var err error
		if level, err = r.commonLevel(asking); err != nil {
			return err
		}
	}
	if err := r.raiseTo(ctx, level); err != nil {
		return err
	}
	if c := &r.config; c.Identified && c.Replica.State.Machine.Rules().Parsed() == nil {
		c.Log.Warn("the cluster has no rules: every client may acquire, read and force-release every lock; see \"fencelock rules\"")
	}
	return nil
}

// raiseLevel raises the level to the highest one known to all members, and uses it. From the level at which the
// state has no ids any more, a leadership has other names for the sessions: the next leadership begins with it, in
// the same term, after all commands under way have been answered. Clients then attach anew, as after an election.
func (r *Leadership) raiseLevel(ctx context.Context) error {
	level, err := r.commonLevel(ctx)
	if err != nil {
		return err
	}
	if level >= machine.LevelHiddenIDs && !r.HidesIDs {
		select {
		case r.rise <- level:
		default: // it is under way
		}
		return nil
	}
	if err := r.raiseTo(ctx, level); err != nil {
		return err
	}
	r.useLevel(ctx)
	return nil
}

// commonLevel returns the highest level that all members know.
func (r *Leadership) commonLevel(ctx context.Context) (uint32, error) {
	if r.config.Replica.State.Machine.Level() >= machine.MaxLevel {
		return machine.MaxLevel, nil
	}
	return r.Term.CommonLevel(ctx)
}

// raiseTo raises the level, through the log, unless it is that high already.
func (r *Leadership) raiseTo(ctx context.Context, level uint32) error {
	c := &r.config
	present := c.Replica.State.Machine.Level()
	if level <= present {
		return r.firstRules()
	}
	landed := make(chan error, 1)
	raise := machine.Command{Op: machine.OpRaiseLevel, Level: level}
	if err := r.Propose(raise, func(err error) { landed <- err }); err != nil {
		return err
	}
	if err := <-landed; err != nil {
		return err
	}
	c.Log.Info("feature level raised", "level", level, "before", present)
	r.settleLimits(ctx)
	return r.firstRules()
}

// firstRules gives a cluster its first rules, once all members know rules.
func (r *Leadership) firstRules() error {
	c := &r.config
	m := c.Replica.State.Machine
	if c.Rules == "" || m.Level() < machine.LevelRules || m.Rules().Version > 0 {
		return nil
	}
	landed := make(chan error, 1)
	set := machine.Command{Op: machine.OpSetRules, Rules: c.Rules}
	if err := r.Propose(set, func(err error) { landed <- err }); err != nil {
		return err
	}
	if err := <-landed; err != nil {
		return err
	}
	c.Log.Info("the cluster has its first rules")
	c.Audit.Write(audit.Event{
		Server: c.Replica.ID(), Event: EventSetRules, Outcome: audit.Done, Principal: string(principal.Process),
		Reason: "the first rules", Rules: m.Rules().Revision(),
	})
	return nil
}

// useLevel enables the features of the level.
func (r *Leadership) useLevel(ctx context.Context) {
	if r.config.Replica.State.Machine.Level() >= machine.LevelDeadlines {
		r.Time.keep(ctx)
	}
}

// settleLimits puts the limits of this leader into the state, unless they are there. They must be the same for all
// members, or these would drift apart: so they travel through the log, and the leader's apply. It reports false if
// ctx ended before.
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
