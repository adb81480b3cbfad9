package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// well is the reading of a cluster of three that works; a leads.
func well() reading {
	var all []*lockpb.Member
	for _, id := range []string{"a", "b", "c"} {
		all = append(all, &lockpb.Member{NodeId: id, ClientAddress: id + ":7480", Voter: true})
	}
	var r reading
	for _, m := range all {
		r = append(r, builtin.MemberStatus{Address: m.ClientAddress, Named: true, MemberStatus: &lockpb.MemberStatus{
			NodeId: m.NodeId, ClusterId: "cluster", Generation: "0", Leader: m.NodeId == "a", LeaderId: "a", Term: 7,
			CommitIndex: 50_000, AppliedIndex: 50_000, Members: all,
		}})
	}
	return r
}

// status reports each reason why a cluster is unhealthy in one sentence, if two readings show it.
func TestStatusProvesHealth(t *testing.T) {
	t.Parallel()
	for want, spoil := range map[string]func(b *builtin.MemberStatus){
		"the members are of 2 clusters: cluster at a:7480, c:7480; other at b:7480": func(b *builtin.MemberStatus) {
			b.ClusterId = "other"
		},
		"the members are of 2 generations: 0 at a:7480, c:7480; 1.00ff at b:7480": func(b *builtin.MemberStatus) {
			b.Generation = "1.00ff"
		},
		"2 members lead: a:7480 in term 7, b:7480 in term 8": func(b *builtin.MemberStatus) {
			b.Leader, b.LeaderId, b.Term = true, "b", 8
		},
		"b:7480: it knows no leader":                    func(b *builtin.MemberStatus) { b.LeaderId = "" },
		"b:7480 follows c, and a leads":                 func(b *builtin.MemberStatus) { b.LeaderId = "c" },
		"b:7480 is in term 6, and the leader in term 7": func(b *builtin.MemberStatus) { b.Term = 6 },
		"b:7480 lacks 10001 log entries, and did not come in 5s where the leader was": func(b *builtin.MemberStatus) {
			b.AppliedIndex = 39_999
		},
		"member b at b:7480 has no vote yet": func(b *builtin.MemberStatus) { b.Members[1].Voter = false },
		"x:7480 is not a member of the cluster that a:7480 leads": func(b *builtin.MemberStatus) {
			b.NodeId, b.Address = "x", "x:7480"
		},
		"member b at b:7480 has a vote and does not answer": func(b *builtin.MemberStatus) {
			b.Err = errors.New("connection refused")
		},
	} {
		bad := well()
		spoil(&bad[1])
		if got := judge(bad, bad); len(got) == 0 || got[0] != want {
			t.Errorf("printed %q, want %q", got, want)
		}
		for what, pair := range map[string][2]reading{"before": {bad, well()}, "since": {well(), bad}} {
			if got := judge(pair[0], pair[1]); len(got) > 0 {
				t.Errorf("%s, only %s: printed %q", want, what, got)
			}
		}
	}
	nobody := well()
	nobody[0].Leader = false
	if got := judge(nobody, nobody); len(got) != 1 || got[0] != "no member that answers leads" {
		t.Errorf("without a leader: %q", got)
	}
	if got := judge(well(), well()); len(got) > 0 {
		t.Errorf("a cluster that is well: %q", got)
	}
}

// A voter far behind is well if it comes in time where the leader was, however far that one is by then. A learner
// is well while it waits for approval, and while it lacks no more entries than permitted. Members of earlier versions
// report no generation.
func TestStatusToleratesWhatPasses(t *testing.T) {
	t.Parallel()
	first, second := well(), well()
	first[1].AppliedIndex = 10_000
	second[0].CommitIndex, second[1].AppliedIndex = 90_000, 50_000
	second[2].AppliedIndex = 90_000
	if got := judge(first, second); len(got) > 0 {
		t.Errorf("a member that catches up: %q", got)
	}
	second[1].AppliedIndex = 49_999
	if got := judge(first, second); len(got) != 1 || !strings.Contains(got[0], "lacks 40001") {
		t.Errorf("a member that does not catch up: %q", got)
	}
	few := well()
	few[1].AppliedIndex = 40_000
	few[2].Generation = ""
	if got := judge(few, few); len(got) > 0 {
		t.Errorf("a member that lacks 10,000 entries, and a member without a generation: %q", got)
	}
	learner := well()
	learner[0].Members[1].Voter, learner[0].Members[1].Waits = false, true // of all, they share the list
	learner[1].AppliedIndex = 0
	if got := judge(learner, learner); len(got) > 0 {
		t.Errorf("a learner that waits for approval: %q", got)
	}
	replaced, joined := well(), well() // a member with a new disk is no member first, and then has no vote
	replaced[1].NodeId = "new"
	joined[0].Members[1].Voter = false
	if got := judge(replaced, joined); len(got) != 1 || got[0] != "member b at b:7480 has no vote yet" {
		t.Errorf("a member that is being replaced: %q", got)
	}
	for long, short := range map[string]string{"": "", "0": "0", "12.0123456789abcdef0123456789abcdef": "12.01234567"} {
		if got := shortGeneration(long); got != short {
			t.Errorf("generation %q is shown as %q, want %q", long, got, short)
		}
	}
}
