package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
)

const statusHelp = `Usage: fencelock status [options]

Asks the members of a cluster of bundled servers what they know: those at the addresses of --backend, and the others of
which these know. Each has two seconds to answer. The log positions tell how far a member is behind.

Options:

` + lookOptions + `
ROLE is leader, follower, learner (no vote yet), leaderless (it knows no leader), or unreachable; "maintenance" beside
it is that of "fencelock maintenance". APPLIED is how far the
member has carried the log out, COMMITTED what it knows to be on most disks. DURABLE is no for a server with --dev.

A member that is unreachable is stopped, stands still, or cannot be reached from here, which does not say that the other
members cannot reach it either. The last line on standard error says what follows if they cannot.

Once a minute, if something was written, all members compare the hash of what they keep with that of the leader. One
that differs is told of here and in its log. Either it is wrong or the leader is: "fencelock verify" looks for damage on
a disk. If a single member differs, it is that one: give it an empty directory. If all but the leader do, it is the
leader: have another one lead ("fencelock transfer"), then give it an empty directory.

Exit codes:

    0  all members at the addresses of --backend answer, know a leader and agree with it, so that this can serve as a
       health check
   64  the command line makes no sense
   69  one of them does not answer, knows no leader, or differs from the leader
`

// member is what is printed of a member's status.
type member struct {
	Address      string `json:"address"`
	NodeID       string `json:"nodeId,omitempty"`
	ClusterID    string `json:"clusterId,omitempty"`
	Role         string `json:"role"`
	LeaderID     string `json:"leaderId,omitempty"`
	Term         uint64 `json:"term,string"`
	LastIndex    uint64 `json:"lastIndex,string"`
	CommitIndex  uint64 `json:"commitIndex,string"`
	AppliedIndex uint64 `json:"appliedIndex,string"`
	AgreedIndex  uint64 `json:"agreedIndex,string"`
	DiffersIndex uint64 `json:"differsIndex,string"`
	Maintenance  bool   `json:"maintenance,omitempty"`
	Durable      bool   `json:"durable"`
	Version      string `json:"version,omitempty"`
	Error        string `json:"error,omitempty"`
}

// statusMain is "fencelock status".
func statusMain(args []string) int {
	s, f := newLook("status")
	return s.runAdmin(s.parse(f, args), statusHelp, s.status)
}

func (s *lookSettings) status(ctx context.Context, admin *builtin.Admin) error {
	out := s.newPrinter("ADDRESS", "NODE", "CLUSTER", "ROLE", "TERM", "LAST", "COMMITTED", "APPLIED", "DURABLE",
		"VERSION")
	var wrong []error
	answers := admin.Status(ctx)
	if text := outlook(answers); text != "" {
		defer say("%s", text) // after the table
	}
	for _, answer := range answers {
		m := memberOf(&answer)
		if err := out.print(m, m.row()); err != nil {
			return err
		}
		var err error
		switch {
		case answer.Err != nil:
			err = fmt.Errorf("%s: %w", m.Address, answer.Err)
		case m.DiffersIndex != 0:
			err = fmt.Errorf("%s: %w: its state is another than the leader's, after log entry %d: "+
				"one of them is wrong, see fencelock help status", m.Address, backend.ErrUnavailable, m.DiffersIndex)
		case m.Role == roleLeaderless:
			err = fmt.Errorf("%s: %w: it knows no leader", m.Address, backend.ErrUnavailable)
		default:
			continue
		}
		if answer.Named {
			wrong = append(wrong, err)
		} else {
			defer say("%v", err) // after the table
		}
	}
	return errors.Join(append(wrong, out.flush())...)
}

// outlook says what it means that members are unreachable; nothing if none is.
func outlook(answers []builtin.MemberStatus) string {
	votes, there := map[string]bool{}, 0
	silent := false
	for _, a := range answers {
		silent = silent || a.Err != nil
		for _, m := range a.Members {
			if m.Voter {
				votes[m.NodeId] = true
			}
		}
	}
	for _, a := range answers {
		if a.Err == nil && votes[a.NodeId] {
			there++
		}
	}
	most := len(votes)/2 + 1
	switch {
	case !silent || len(votes) == 0:
		return ""
	case there < most:
		return fmt.Sprintf("%d of %d members with a vote answer here, too few for a majority: "+
			"if the others are lost, nobody is served before %d of them are back", there, len(votes), most-there)
	case there == most:
		return fmt.Sprintf("%d of %d members with a vote answer here: the cluster serves, "+
			"and does not survive the loss of another one",
			there, len(votes))
	}
	return fmt.Sprintf("%d of %d members with a vote answer here: the cluster serves, and survives the loss of %d more",
		there, len(votes), there-most)
}

// What a member does in its cluster.
const (
	roleLeader      = "leader"
	roleFollower    = "follower"
	roleLearner     = "learner"
	roleLeaderless  = "leaderless"
	roleUnreachable = "unreachable"
)

func memberOf(s *builtin.MemberStatus) member {
	m := member{
		Address: s.Address, NodeID: s.NodeId, ClusterID: s.ClusterId, LeaderID: s.LeaderId, Role: roleOf(s),
		Term: s.Term, LastIndex: s.LastIndex, CommitIndex: s.CommitIndex, AppliedIndex: s.AppliedIndex,
		AgreedIndex: s.AgreedIndex, DiffersIndex: s.DiffersIndex, Durable: s.Durable, Version: s.ServerVersion,
		Maintenance: s.Maintenance,
	}
	if s.Err != nil {
		m.Error = s.Err.Error()
	}
	return m
}

func roleOf(s *builtin.MemberStatus) string {
	switch {
	case s.Err != nil:
		return roleUnreachable
	case s.Leader:
		return roleLeader
	case s.LeaderId == "" || s.LeaderId == s.NodeId: // elected, and not yet or not any more able to serve
		return roleLeaderless
	}
	for _, m := range s.Members {
		if m.NodeId == s.NodeId && !m.Voter {
			return roleLearner
		}
	}
	return roleFollower
}

func (m *member) row() []string {
	if m.Role == roleUnreachable {
		return []string{m.Address, m.NodeID, "", m.Role}
	}
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	role := m.Role
	if m.Maintenance {
		role += ", maintenance"
	}
	return []string{
		m.Address, m.NodeID, m.ClusterID, role, number(m.Term), number(m.LastIndex), number(m.CommitIndex),
		number(m.AppliedIndex), yesNo(m.Durable), m.Version,
	}
}

func yesNo(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}
