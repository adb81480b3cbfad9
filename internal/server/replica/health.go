package replica

// The health of the cluster, as its leader sees it: each voter answers, and is close to the end of the leader's log. A
// problem in two consecutive readings is logged, and shown in metrics.

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// healthEvery is the interval of readings. A member that lacks more than maxBehind entries has a problem if it does
	// not reach the leader's index of one reading by the next reading.
	healthEvery = 5 * time.Second
	maxBehind   = 10_000
)

// Health is a leader's view of its voters.
type Health struct {
	Voters int
	// Problems has one sentence for each voter that does not answer or does not keep up.
	Problems []string
}

// Health returns the health of the cluster; nil if this member does not lead, or has not made enough readings.
func (r *Replica) Health() *Health { return r.health.Load() }

// glance is one reading.
type glance struct {
	commit   uint64
	problems map[raft.ServerID]string
}

// KeepHealth checks the members until ctx ends.
func (t *Term) KeepHealth(ctx context.Context) {
	r := t.replica
	defer r.health.Store(nil)
	tick := time.NewTicker(cmp.Or(r.config.HealthEvery, healthEvery))
	defer tick.Stop()
	var before *glance
	told := map[raft.ServerID]bool{}
	for {
		now, err := t.look(ctx, before)
		if err == nil {
			t.judge(before, now, told)
			before = now
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// look makes a reading. A voter that has reached the leader's index of the previous reading is not behind.
func (t *Term) look(ctx context.Context, before *glance) (*glance, error) {
	r := t.replica
	alive, err := t.alive(ctx)
	if err != nil {
		return nil, err
	}
	now := &glance{commit: r.raft.CommitIndex(), problems: map[raft.ServerID]string{}}
	for _, m := range r.servers() {
		index := r.proof.indexOf(m.ID)
		switch {
		case m.Suffrage != raft.Voter || m.ID == r.id:
		case !alive[m.ID]:
			now.problems[m.ID] = fmt.Sprintf("member %s at %s has a vote and does not follow", m.ID, m.Address)
		case index+maxBehind < now.commit && (before == nil || index < before.commit):
			now.problems[m.ID] = fmt.Sprintf("member %s at %s lacks %d log entries", m.ID, m.Address, now.commit-index)
		}
	}
	return now, nil
}

// judge reports and logs the problems that are in both readings.
func (t *Term) judge(before, now *glance, told map[raft.ServerID]bool) {
	r := t.replica
	h := &Health{Voters: r.Voters()}
	for id, problem := range now.problems {
		if before == nil {
			return // it may be temporary
		}
		if before.problems[id] == "" {
			continue
		}
		h.Problems = append(h.Problems, problem)
		if !told[id] {
			r.config.Log.Warn("the cluster is not healthy: " + problem)
		}
		told[id] = true
	}
	for id := range told {
		if now.problems[id] == "" {
			r.config.Log.Info("the member keeps up again", "id", id)
			delete(told, id)
		}
	}
	slices.Sort(h.Problems)
	r.health.Store(h)
}
