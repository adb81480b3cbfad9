package server

import (
	"context"

	"github.com/fencelock/fencelock/internal/machine"
)

// A feature level is what all members know. Members tell theirs, in answers outside of raft; the leader raises that of
// the cluster, through the log, once all have told a higher one; and proposes nothing of a level that is not reached. So
// members of two versions run side by side while one after the other is replaced, in any order, whichever of them
// leads. A member whose version knows less than has been reached is not taken in, and one that comes back with an
// older version stops.

// raiseLevel raises the level to the highest one that all members know, and has this leadership use it.
func (r *leadership) raiseLevel(ctx context.Context) error {
	s := r.server
	present := s.replica.State.Machine.Level()
	if present >= machine.MaxLevel {
		return nil
	}
	common, err := r.log.CommonLevel(ctx)
	if err != nil {
		return err
	}
	if common <= present {
		return nil
	}
	landed := make(chan error, 1)
	c := machine.Command{Op: machine.OpRaiseLevel, Level: common}
	if err := r.propose(c, func(err error) { landed <- err }); err != nil {
		return err
	}
	if err := <-landed; err != nil {
		return err
	}
	s.log.Info("feature level raised", "level", common, "before", present)
	r.settleLimits(ctx)
	r.useLevel(ctx)
	return nil
}

// useLevel begins what the level permits.
func (r *leadership) useLevel(ctx context.Context) {
	if r.server.replica.State.Machine.Level() >= machine.LevelDeadlines {
		r.time.keep(ctx)
	}
}
