package replica

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// A member in maintenance leads only if no other member does. It does not ask for votes while it has contact with a
// leader, or had contact recently. If it leads anyway, it transfers the leadership as soon as another member can take
// it. It follows and votes as before. It must not stop taking part in elections completely: it may be the only
// remaining member with all acknowledged entries, and then no other member can be elected.

// errMaintenance is the error of a vote request that is not sent.
var errMaintenance = errors.New("this member is in maintenance: it leads only if no other member does")

// refrainTimes is the number of election times for which a member in maintenance waits without a leader before it asks
// for votes.
const refrainTimes = 3

// maintain begins or ends maintenance.
func (r *Replica) maintain(on bool) {
	if !on {
		r.proof.refrains.Store(nil)
		return
	}
	t := r.config.Timing.WithDefaults()
	refrains := func() bool {
		heard := r.raft.LastContact()
		return !heard.IsZero() && time.Since(heard) < refrainTimes*(t.Heartbeat+t.Election)
	}
	r.proof.refrains.Store(&refrains)
}

// InMaintenance reports whether this member is in maintenance: it leads only if no other member does.
func (r *Replica) InMaintenance() bool { return r.proof.refrains.Load() != nil }

// Maintain begins or ends maintenance. When maintenance begins, a leader transfers the leadership; if no other member
// can lead, the error is a *RefusedError and nothing changes.
func (r *Replica) Maintain(ctx context.Context, on bool) error {
	leads := on && r.serving.Load() != nil
	if leads {
		if _, err := r.successor(ctx, ""); err != nil {
			return err
		}
	}
	r.maintain(on)
	r.config.Log.Info("maintenance", "on", on)
	if leads {
		if err := r.HandOver(ctx); err != nil { // lead.Leadership retries it
			r.config.Log.Info("in maintenance, and still leading", "error", err)
		}
	}
	return nil
}

// StepDown begins maintenance, and transfers the leadership if this member serves. The error is the reason why no
// member took it.
func (r *Replica) StepDown(ctx context.Context) error {
	r.maintain(true)
	if r.serving.Load() == nil || r.Voters() < 2 {
		return nil
	}
	return r.HandOver(ctx)
}

// successor returns the member to which this leader can transfer the leadership: id or, if that is empty, the member
// that has the most entries. The member must have a vote, answer, and not be in maintenance.
func (r *Replica) successor(ctx context.Context, id raft.ServerID) (raft.Server, error) {
	refuse := func(format string, args ...any) (raft.Server, error) {
		return raft.Server{}, refusal(format, args...)
	}
	servers := slices.DeleteFunc(slices.Clone(r.servers()), func(m raft.Server) bool {
		return m.ID == r.id || id != "" && m.ID != id || id == "" && m.Suffrage != raft.Voter
	})
	switch {
	case id != "" && len(servers) == 0:
		return raft.Server{}, noMember(id)
	case id != "" && servers[0].Suffrage != raft.Voter:
		return refuse("%s has no vote yet", id)
	}
	answers := r.askEach(ctx, servers)
	best, away, has := -1, 0, uint64(0)
	for i, m := range servers {
		switch index := r.proof.indexOf(m.ID); {
		case answers[i].ID != m.ID: // no answer, or the answer of another member
		case answers[i].Maintenance:
			away++
		case best < 0 || index > has:
			best, has = i, index
		}
	}
	switch {
	case best >= 0:
		return servers[best], nil
	case id != "" && away > 0:
		return refuse("%s is in maintenance", id)
	case id != "":
		return refuse("%s does not answer the leader", id)
	case away > 0:
		return refuse("no other member with a vote answers the leader, except %d in maintenance", away)
	}
	return refuse("no other member with a vote answers the leader")
}

// askEach asks all servers concurrently, with Timing.Heartbeat as the timeout. The answer of a member that does not
// answer has no id.
func (r *Replica) askEach(ctx context.Context, servers []raft.Server) []answer {
	ctx, cancel := context.WithTimeout(ctx, r.config.Timing.WithDefaults().Heartbeat)
	defer cancel()
	answers := make([]answer, len(servers))
	var asking sync.WaitGroup
	for i, m := range servers {
		asking.Go(func() { answers[i], _ = r.peers.ask(ctx, string(m.Address), question{}) })
	}
	asking.Wait()
	return answers
}

// HandOver transfers the leadership to the member that has the most entries.
func (r *Replica) HandOver(ctx context.Context) error {
	to, err := r.successor(ctx, "")
	if err != nil {
		return err
	}
	return r.transfer(ctx, to)
}

// Transfer transfers the leadership to the member id. The error is a *RefusedError if that member cannot lead.
func (r *Replica) Transfer(ctx context.Context, id string) error {
	to, err := r.successor(ctx, raft.ServerID(id))
	if err != nil {
		return err
	}
	return r.transfer(ctx, to)
}

// transfer starts a transfer and waits for it. If ctx ends earlier, the transfer continues.
func (r *Replica) transfer(ctx context.Context, to raft.Server) error {
	var err error
	select {
	case err = <-landing(r.raft.LeadershipTransferToServer(to.ID, to.Address)):
	case <-r.dead:
		err = raft.ErrRaftShutdown
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("no other member takes over the leadership: %w", err)
	}
	return nil
}
