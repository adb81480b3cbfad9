package server

import (
	"context"
	"fmt"

	"github.com/fencelock/fencelock/internal/machine"
)

// A feature level is what all members know. Members tell theirs, in answers outside of raft; the leader raises that of
// the cluster, through the log, once all have told a higher one; and proposes nothing of a level that is not reached. So
// members of two versions run side by side while one after the other is replaced, in any order, whichever of them
// leads. A member whose version knows less than has been reached is not taken in, and one that comes back with an
// older version stops.

// levelOf is the level that a member has told. Versions that tell none know the first one.
func levelOf(told uint32) uint32 { return max(told, 1) }

// raiseLevel raises the level to the highest one that all members know, and has this leadership use it.
func (r *leadership) raiseLevel(ctx context.Context) error {
	s := r.server
	present := s.node.fsm.machine.Level()
	if present >= machine.MaxLevel {
		return nil
	}
	common := uint32(machine.MaxLevel)
	for _, member := range s.node.servers() {
		if member.ID == s.node.id || s.waits(member.ID) { // who is not approved has no say
			continue
		}
		a, err := s.peers.ask(ctx, string(member.Address), question{})
		switch {
		case err != nil:
			return fmt.Errorf("the level of %s: %w", member.ID, err)
		case a.ID != member.ID:
			return fmt.Errorf("the level of %s: %s answers in its place", member.ID, a.ID)
		}
		common = min(common, levelOf(a.Level))
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
	if r.server.node.fsm.machine.Level() >= machine.LevelDeadlines {
		r.time.keep(ctx)
	}
}

// checkLevel is why a member is not taken in whose version knows too little.
func (s *Server) checkLevel(told uint32) error {
	if level := s.node.fsm.machine.Level(); levelOf(told) < level {
		return fmt.Errorf("your version knows feature level %d, the cluster uses %d: take a newer one", levelOf(told), level)
	}
	return nil
}
