package lead

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/principal"
)

// A feature level is the version of the features that all members support. Members report their levels outside of raft.
// Once all members have reported a higher level, the leader raises the level of the cluster through the log. It uses a
// level only once the cluster has reached it. So members of two versions can run together while operators upgrade them
// one after the other, in any order, whichever member leads. A member that does not support the cluster's level is not
// admitted, and stops if it is already a member.

// levelTime is the maximum time for which a new leadership asks the members for their levels. It does not serve clients
// during that time.
const levelTime = 300 * time.Millisecond

// levelUp raises the level before the leadership serves clients: to the given level or, if that is zero, to the highest
// level that all members report within levelTime.
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

// raiseLevel raises the level to the highest level that all members support, and uses it. From LevelHiddenIDs on, the
// state has hashes instead of ids, so a leadership has other names for the sessions. A new leadership in the same term
// then begins with the level, after all pending commands are answered. Clients attach their sessions again, as after an
// election.
func (r *Leadership) raiseLevel(ctx context.Context) error {
	level, err := r.commonLevel(ctx)
	if err != nil {
		return err
	}
	if level >= machine.LevelHiddenIDs && !r.HidesIDs {
		select {
		case r.rise <- level:
		default: // already requested
		}
		return nil
	}
	if err := r.raiseTo(ctx, level); err != nil {
		return err
	}
	r.useLevel(ctx)
	return nil
}

// commonLevel returns the highest level that all members support.
func (r *Leadership) commonLevel(ctx context.Context) (uint32, error) {
	if r.config.Replica.State.Machine.Level() >= machine.MaxLevel {
		return machine.MaxLevel, nil
	}
	return r.Term.CommonLevel(ctx)
}

// raiseTo raises the level through the log, unless the level is already that high. Then it sets the first rules.
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

// firstRules sets the first rules of a cluster, once all members support rules.
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

// settleLimits writes the limits of this leader to the log, unless the state already has them. All members must apply
// the same limits, or their states would diverge: so the limits of the leader apply. It returns false if ctx ends
// earlier.
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
			continue // check the state again
		}
		select {
		case <-time.After(retryAfter):
		case <-ctx.Done():
		}
	}
	return false
}
