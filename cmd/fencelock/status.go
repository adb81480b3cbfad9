package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
)

const statusHelp = `Usage: fencelock status [options]

Shows the state of a cluster of bundled servers, as each member reports it. It asks the members at the addresses of
--backend, and the other members that these name. Each has two seconds to answer. The log positions show how far a
member is behind.

Options:

{options}

GENERATION counts the restores and recoveries of the cluster. ROLE is leader, follower, learner (no vote yet),
leaderless (it knows no leader), unreachable, or "closed until TIME": elected, but refusing clients because the cluster
was restored, see "fencelock help open". "maintenance" after the role was set by "fencelock maintenance". APPLIED is the
last log entry that the member has applied, COMMITTED the last log entry that it knows to be on a
majority of the disks. DURABLE is no for a server with --dev.

An unreachable member is stopped or paused, or cannot be reached from this machine; the other members may still reach
it. The last line on standard error says what follows if they cannot.

Once a minute, after a write, all members compare the hash of their state with the leader's. A member whose state
differs is reported here and in its log: either that member or the leader is corrupt. "fencelock verify" checks a disk
for damage. If a single member differs, that member is corrupt: restart it with an empty directory. If all members
differ from the leader, the leader is corrupt: run "fencelock transfer", then restart it with an empty directory.

A cluster is healthy if all members at the addresses of --backend answer; all members that answer belong to the same
cluster and generation; one of them leads, and all others follow it in its term; all approved members have a vote; and
each voting member answers, and is at most 10,000 log entries behind or reaches the leader's former position within 5 s.
If a condition fails, status checks everything again after 1 s, or after 5 s if a member is behind, and reports the
conditions that still fail. With --own, it checks only the members at --backend: each must answer, know a leader and
agree with it. Use this as a health check of one member, since the loss of another member does not affect it.

Exit codes:

    0  the cluster is healthy
   64  the command line is invalid
   69  the cluster is not healthy; standard error has one line for each reason
`

// member is the printed form of a member's status.
type member struct {
	Address      string `json:"address"`
	NodeID       string `json:"nodeId,omitempty"`
	ClusterID    string `json:"clusterId,omitempty"`
	Generation   string `json:"generation,omitempty"`
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
	ClosedUntil  string `json:"closedUntil,omitempty"`
	Error        string `json:"error,omitempty"`
}

func defineStatus(o *options) func([]string) error {
	s := o.look("status")
	own := o.Bool("own", false, "check only the members at --backend")
	return func(args []string) error {
		return s.runAdmin(s.parse(args), func(ctx context.Context, admin *builtin.Admin) error {
			return s.status(ctx, admin, *own)
		})
	}
}

// status prints the state of the members. The error names the problems of the cluster, or, with own, of the named
// members alone.
func (s *lookSettings) status(ctx context.Context, admin *builtin.Admin, own bool) error {
	out := s.newPrinter("ADDRESS", "NODE", "CLUSTER", "GENERATION", "ROLE", "TERM", "LAST", "COMMITTED", "APPLIED", "DURABLE",
		"VERSION")
	var wrong []error
	var answers reading
	var problems []string
	if own {
		answers = admin.Status(ctx)
	} else {
		answers, problems = read(ctx, admin)
	}
	for _, text := range problems {
		wrong = append(wrong, fmt.Errorf("%w: %s", backend.ErrUnavailable, text))
	}
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
			err = fmt.Errorf("%s: %w: its state differs from the leader's at log entry %d: "+
				"one of them is wrong, see fencelock help status", m.Address, backend.ErrUnavailable, m.DiffersIndex)
		case m.Role == roleClosed && own:
			err = fmt.Errorf("%s: %w: %s", m.Address, backend.ErrUnavailable, closedText(m.ClosedUntil))
		case m.Role == roleLeaderless && (own || answers.leader() == nil): // otherwise the problems have it
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

// outlook explains the consequence of unreachable members; empty if all answer.
func outlook(answers reading) string {
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
	leader := answers.leader()
	for _, a := range answers { // a member that answers but follows no leader is no help
		if a.Err == nil && votes[a.NodeId] && (leader == nil || a.LeaderId == leader.NodeId && a.Term == leader.Term) {
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
		return fmt.Sprintf("%d of %d members with a vote answer here: the cluster is available "+
			"but cannot tolerate another failure",
			there, len(votes))
	}
	return fmt.Sprintf("%d of %d members with a vote answer here: the cluster serves, and survives the loss of %d more",
		there, len(votes), there-most)
}

// The roles of a member in its cluster.
const (
	roleLeader      = "leader"
	roleFollower    = "follower"
	roleLearner     = "learner"
	roleLeaderless  = "leaderless"
	roleUnreachable = "unreachable"
	roleClosed      = "closed"
)

func memberOf(s *builtin.MemberStatus) member {
	m := member{
		Address: s.Address, NodeID: s.NodeId, ClusterID: s.ClusterId, Generation: s.Generation, LeaderID: s.LeaderId, Role: roleOf(s),
		Term: s.Term, LastIndex: s.LastIndex, CommitIndex: s.CommitIndex, AppliedIndex: s.AppliedIndex,
		AgreedIndex: s.AgreedIndex, DiffersIndex: s.DiffersIndex, Durable: s.Durable, Version: s.ServerVersion,
		Maintenance: s.Maintenance,
	}
	if s.ClosedNanos > 0 {
		m.ClosedUntil = closedUntil(s.ClosedNanos)
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
	case s.ClosedNanos > 0:
		return roleClosed
	case s.LeaderId == "" || s.LeaderId == s.NodeId: // elected, and not able to serve yet, or no longer
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
		return []string{m.Address, m.NodeID, "", "", m.Role}
	}
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	role := m.Role
	if m.ClosedUntil != "" {
		role += " until " + m.ClosedUntil
	}
	if m.Maintenance {
		role += ", maintenance"
	}
	return []string{
		m.Address, m.NodeID, m.ClusterID, shortGeneration(m.Generation), role, number(m.Term), number(m.LastIndex), number(m.CommitIndex),
		number(m.AppliedIndex), yesNo(m.Durable), m.Version,
	}
}

// shortGeneration shortens the id of a generation, for people.
func shortGeneration(g string) string {
	const enough = 8
	number, id, found := strings.Cut(g, ".")
	if !found || len(id) <= enough {
		return g
	}
	return number + "." + id[:enough]
}

func yesNo(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}
