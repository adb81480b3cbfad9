package main

// Whether the answers of the members show a working cluster. A problem that may pass, such as an election, is checked
// a second time before it is reported.

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/builtin"
)

const (
	// maxBehind bounds how many log entries a voter may lack, and lagTime is the time within which a voter that lacks
	// more has to reach the leader's earlier index.
	maxBehind = 10_000
	lagTime   = 5 * time.Second
	// againAfter is the time between two readings where no voter is far behind.
	againAfter = time.Second
)

// problem is one reason why a cluster is not well.
type problem struct {
	key  string // identifies its subject
	text string
	lags bool // it is about a voter that lacks entries
}

// reading is one round of answers.
type reading []builtin.MemberStatus

// answering returns the members that have answered.
func (r reading) answering() (there []*builtin.MemberStatus) {
	for i := range r {
		if r[i].Err == nil {
			there = append(there, &r[i])
		}
	}
	return there
}

// leader returns the only leader; nil if there is no leader or several.
func (r reading) leader() (leader *builtin.MemberStatus) {
	for _, m := range r.answering() {
		if m.Leader {
			if leader != nil {
				return nil
			}
			leader = m
		}
	}
	return leader
}

// closed returns the elected member that serves no client yet, or nil.
func (r reading) closed() *builtin.MemberStatus {
	for _, m := range r.answering() {
		if m.ClosedNanos > 0 {
			return m
		}
	}
	return nil
}

func closedText(until string) string {
	return "the cluster was restored and is closed until " + until + ": see fencelock help open"
}

// differ reports who answers with which value, if there are several values; empty ones do not count.
func (r reading) differ(what string, value func(*builtin.MemberStatus) string) (found []problem) {
	at := map[string][]string{}
	var values []string
	for _, m := range r.answering() {
		v := value(m)
		if v == "" {
			continue
		}
		if at[v] == nil {
			values = append(values, v)
		}
		at[v] = append(at[v], m.Address)
	}
	if len(values) < 2 {
		return nil
	}
	var parts []string
	for _, v := range values {
		parts = append(parts, fmt.Sprintf("%s at %s", v, strings.Join(at[v], ", ")))
	}
	return []problem{{key: what, text: fmt.Sprintf("the members are of %d %s: %s", len(values), what,
		strings.Join(parts, "; "))}}
}

// problems returns the problems of one reading.
func (r reading) problems() []problem {
	found := r.differ("clusters", func(m *builtin.MemberStatus) string { return m.ClusterId })
	found = append(found, r.differ("generations", func(m *builtin.MemberStatus) string { return m.Generation })...)
	var leaders []string
	for _, m := range r.answering() {
		if m.Leader {
			leaders = append(leaders, fmt.Sprintf("%s in term %d", m.Address, m.Term))
		}
	}
	l := r.leader()
	switch {
	case len(leaders) > 1:
		return append(found, problem{key: "leaders", text: fmt.Sprintf("%d members lead: %s", len(leaders),
			strings.Join(leaders, ", "))})
	case l == nil && r.closed() != nil:
		return append(found, problem{key: "closed", text: closedText(closedUntil(r.closed().ClosedNanos))})
	case l == nil && len(r.answering()) > 0:
		return append(found, problem{key: "leaderless", text: "no member that answers leads"})
	case l == nil:
		return found
	}
	for _, m := range r.answering() {
		if m != l {
			found = append(found, follows(m, l)...)
		}
	}
	for _, v := range l.Members {
		there := slices.ContainsFunc(r.answering(), func(m *builtin.MemberStatus) bool { return m.NodeId == v.NodeId })
		if !v.Voter && !v.Waits {
			found = append(found, problem{key: "learner " + v.NodeId, text: fmt.Sprintf(
				"member %s at %s has no vote yet", v.NodeId, cmp.Or(v.ClientAddress, v.PeerAddress))})
		}
		if v.Voter && !there {
			found = append(found, problem{key: "silent " + v.NodeId, text: fmt.Sprintf(
				"member %s at %s has a vote and does not answer", v.NodeId, cmp.Or(v.ClientAddress, v.PeerAddress))})
		}
	}
	return found
}

// follows returns the reasons why m is no good follower of the leader.
func follows(m, leader *builtin.MemberStatus) []problem {
	one := func(kind, format string, args ...any) []problem {
		return []problem{{key: kind + " " + m.NodeId, text: fmt.Sprintf(format, args...)}}
	}
	voter, in := false, false
	for _, x := range leader.Members {
		if x.NodeId == m.NodeId {
			voter, in = x.Voter, true
		}
	}
	switch {
	case !in:
		return one("outside", "%s is not a member of the cluster that %s leads", m.Address, leader.Address)
	case m.LeaderId == "":
		return one("leaderless", "%s: it knows no leader", m.Address)
	case m.LeaderId != leader.NodeId:
		return one("follows", "%s follows %s, and %s leads", m.Address, m.LeaderId, leader.NodeId)
	case m.Term != leader.Term:
		return one("term", "%s is in term %d, and the leader in term %d", m.Address, m.Term, leader.Term)
	case voter && m.AppliedIndex+maxBehind < leader.CommitIndex:
		found := one("behind", "%s lacks %d log entries, and did not come in %v where the leader was",
			m.Address, leader.CommitIndex-m.AppliedIndex, lagTime)
		found[0].lags = true
		return found
	}
	return nil
}

// judge returns the problems of the second reading, if the first one has some too, even different ones: a passing
// problem leads to a reading without any. A voter that has reached the leader's index of the first reading is not far
// behind.
func judge(first, second reading) (texts []string) {
	if len(first.problems()) == 0 {
		return nil
	}
	for _, p := range second.problems() {
		if !p.lags || !caughtUp(first, second, p) {
			texts = append(texts, p.text)
		}
	}
	return texts
}

func caughtUp(first, second reading, p problem) bool {
	l := first.leader()
	return l != nil && slices.ContainsFunc(second.answering(), func(m *builtin.MemberStatus) bool {
		return p.key == "behind "+m.NodeId && m.AppliedIndex >= l.CommitIndex
	})
}

// read asks the members, and a second time after a while if there are problems. It returns the last answers, and the
// problems found both times.
func read(ctx context.Context, admin *builtin.Admin) (reading, []string) {
	first := reading(admin.Status(ctx))
	found := first.problems()
	if len(found) == 0 {
		return first, nil
	}
	pause := againAfter
	if slices.ContainsFunc(found, func(p problem) bool { return p.lags }) {
		pause = lagTime
	}
	select {
	case <-time.After(pause):
	case <-ctx.Done():
		return first, judge(first, first)
	}
	second := reading(admin.Status(ctx))
	return second, judge(first, second)
}
