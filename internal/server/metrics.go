package server

import (
	"time"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/lead"
)

// Measurement is the state of a member at one instant, for operators.
type Measurement struct {
	Leader, KnowsLeader, Maintenance bool
	// Well: this member leads, and all members with a vote follow and are close to its log. VotersBehind counts the
	// voters that are not; zero on a member that does not lead.
	Well         bool
	VotersBehind int
	// ClosedFor is the time for which this member, the leader, does not serve yet because the cluster was restored.
	ClosedFor time.Duration

	Term, LastIndex, CommitIndex, AppliedIndex      uint64
	AgreedIndex, DiffersIndex                       uint64
	UnreadBytes, LogBytes, SnapshotBytes, Connected int
	// SnapshotAt is the time of the last snapshot, and BackupAt the time at which the last backup from this process was
	// complete. Zero: never.
	SnapshotAt, BackupAt time.Time
	// Standing counts the cluster's locks; nil on a member that does not lead.
	Standing *lead.Standing
}

// Used returns the usage of all clients of the cluster, and its limits, in the state that this member has applied.
func (s *Server) Used() (machine.Usage, machine.Limits) {
	m := s.replica.State.Machine
	return m.Total(), m.Limits()
}

// ID returns the ID of this member, which Status and the members call node_id.
func (s *Server) ID() string { return s.replica.ID() }

// Measure returns the state of this member.
func (s *Server) Measure() Measurement {
	leader, _ := s.replica.Leader()
	applied := s.replica.Applied() // before the last index, so that it is never greater
	is := s.replica.Status()
	m := Measurement{
		Leader: s.Leads(), KnowsLeader: leader != "", Maintenance: s.replica.InMaintenance(),
		Term: is.Term, LastIndex: is.LastIndex, CommitIndex: is.CommitIndex, AppliedIndex: applied,
		AgreedIndex: is.Agreed, DiffersIndex: is.Differs,
		UnreadBytes: int(max(0, s.unread.Load())), LogBytes: is.LogBytes,
	}
	if seen := s.replica.Health(); seen != nil {
		m.Well, m.VotersBehind = m.Leader && len(seen.Problems) == 0, len(seen.Problems)
	}
	m.ClosedFor = s.closedFor()
	m.SnapshotAt, m.SnapshotBytes = s.replica.LastSnapshot()
	if at := s.backedUp.Load(); at != 0 {
		m.BackupAt = time.Unix(at, 0)
	}
	s.mu.Lock()
	m.Connected = len(s.conns)
	s.mu.Unlock()
	if r := s.leadership.Load(); r != nil {
		standing := r.Standing()
		m.Standing = &standing
	}
	return m
}
