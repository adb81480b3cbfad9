package machine

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// policed returns a rig with policies and sessions.
func policed(t *testing.T, policies string, sessions ...string) *rig {
	t.Helper()
	r := newRig(t)
	r.want(Command{Op: OpRaiseLevel, Level: MaxLevel}, CodeOK)
	r.policies(policies)
	r.open(sessions...)
	return r
}

func (r *rig) policies(text string) {
	r.Helper()
	r.want(Command{Op: OpSetPolicies, Rules: text}, CodeOK)
}

func heeding(r *Request) { r.HeedsMaxHold = true }

// A hold has the maximum of the moment of its grant, ends when the leader says that it is over, and only then is the
// name granted.
func TestPolicyMaxHold(t *testing.T) {
	r := policed(t, "max-hold=1m a\n", "x", "y", "z")
	if got := r.want(ask("x", "a"), CodeInvalid); got.Field != "HeedsMaxHold" {
		t.Errorf("a client that does not heed it: %+v", got)
	}
	r.want(ask("x", "account"), CodeGranted)
	first := r.want(ask("x", "a/1").as(heeding), CodeGranted).Grants[0]
	if first.MaxHold != time.Minute {
		t.Fatalf("granted with %+v", first)
	}
	r.want(ask("y", "a/1").as(heeding), CodeQueued)
	r.policies("max-hold=2m a\n")
	if again := r.want(ask("x", "a/1").as(heeding), CodeGranted).Grants[0]; again.MaxHold != time.Minute {
		t.Errorf("asked again: %+v", again)
	}
	r.want(Command{Op: OpFree, Name: "a/1", Token: first.Token + 1}, CodeNotHeld)
	r.want(Command{Op: OpFree, Name: "a/1", Token: first.Token}, CodeOK)
	r.held("a/1", "y")
	lost, over, next := r.told[0], r.told[1], r.told[2]
	if lost.Type != NoticeLost || lost.Session != sid("x") || lost.Cause != CauseMaxHold || lost.Token != first.Token {
		t.Errorf("the holder hears %+v", lost)
	}
	if over.Type != NoticeUntimed || over.Token != first.Token || next.Grants[0].MaxHold != 2*time.Minute {
		t.Errorf("the leader hears %+v, %+v", over, next)
	}
	events, err := r.m.EventsSince(uint64(first.Token)+1, 10)
	if err != nil || events[0].Type != EventExpired || events[0].Reason != ReasonMaxHold || events[0].Owner != "x" {
		t.Errorf("%+v, %v", events, err)
	}

	// A minimum that is not over keeps the name closed, and the maximum then counts no more.
	short := ask("x", "a/2").as(heeding).as(func(r *Request) { r.MinHold = time.Hour })
	both := r.want(short, CodeGranted).Grants[0]
	r.want(Command{Op: OpFree, Name: "a/2", Token: both.Token, Linger: true}, CodeOK)
	r.held("a/2", "(x)")
	r.want(Command{Op: OpFree, Name: "a/2", Token: both.Token}, CodeOK)
	r.held("a/2", "")
	// So does a release that comes before the end at the maximum.
	both = r.want(short, CodeGranted).Grants[0]
	release := give("x", "a/2")
	release.Linger = true
	r.want(release, CodeOK)
	r.want(Command{Op: OpFree, Name: "a/2", Token: both.Token, Linger: true}, CodeNotHeld)
	r.held("a/2", "(x)")
	r.want(Command{Op: OpFree, Name: "a/2", Token: both.Token}, CodeOK)
	r.held("a/2", "")

	// A hold without a maximum is not ended so, and a TTL above the maximum is refused.
	free := r.want(ask("x", "b"), CodeGranted).Grants[0]
	r.want(Command{Op: OpFree, Name: "b", Token: free.Token}, CodeNotHeld)
	r.want(Command{Op: OpOpenSession, Session: sid("long"), TTL: time.Hour}, CodeOK)
	if got := r.want(ask("long", "a/3").as(heeding), CodeInvalid); got.Field != "TTL" {
		t.Errorf("a TTL above the maximum: %+v", got)
	}
}

// Who waited before the policy came is granted with it if its client heeds it, and for no less than its TTL.
func TestPolicyMaxHoldOfThoseWhoWaited(t *testing.T) {
	r := policed(t, "", "x")
	r.want(Command{Op: OpOpenSession, Session: sid("y"), TTL: time.Hour}, CodeOK)
	for _, name := range []string{"a/1", "a/2"} {
		r.want(ask("x", name), CodeGranted)
	}
	r.want(ask("y", "a/1").as(heeding), CodeQueued)
	r.want(ask("y", "a/2"), CodeQueued)
	r.policies("max-hold=1m a\n")
	for name, want := range map[string]time.Duration{"a/1": time.Hour, "a/2": 0} {
		r.want(give("x", name), CodeOK)
		if g := r.told[0].Grants[0]; g.MaxHold != want {
			t.Errorf("%s: granted with %+v, want %v", name, g, want)
		}
	}
}

func TestPolicyMaxQueue(t *testing.T) {
	r := policed(t, "max-queue=1 a\n", "x", "y", "z")
	r.want(ask("x", "a/1", "b"), CodeGranted)
	r.want(ask("y", "a/1"), CodeQueued)
	got := r.want(ask("z", "a/1"), CodeLimit)
	if got.Field != "WaitersPerName" || got.Detail != `the policy of "a/1" lets 1 wait` {
		t.Errorf("refused with %+v", got)
	}
	r.want(ask("z", "a/1").try(), CodeHeld)
	r.want(ask("z", "b"), CodeQueued)
	r.policies("")
	r.want(ask("z", "a/1"), CodeQueued)
	r.policies("max-queue=1 a\n") // the two who wait stay
	r.want(give("x", "a/1"), CodeOK)
	r.held("a/1", "y")
	r.want(give("y", "a/1"), CodeOK)
	r.held("a/1", "z")
}

// The limit of permits changes under holders: more are let in at once, and with fewer nobody is until enough are free.
func TestPolicyPermits(t *testing.T) {
	r := policed(t, "permits=2 p\n", "a", "b", "c", "d", "e")
	r.want(ask("a", "p").as(asPermits(1, 100)), CodeGranted)
	r.want(ask("b", "p").as(asPermits(1, 7)), CodeGranted)
	r.want(ask("c", "p").as(asPermits(1, 7)), CodeQueued)
	r.want(ask("d", "p").as(asPermits(3, 7)), CodeInvalid)
	r.policies("permits=3 p\n")
	r.held("p", "a b c")

	r.want(ask("d", "p").as(asPermits(2, 3)), CodeQueued)
	r.want(ask("e", "p").as(asPermits(1, 3)), CodeQueued)
	r.policies("permits=1 p\n")
	r.held("p", "a b c")
	if len(r.told) != 1 || r.told[0].Type != NoticeLost || r.told[0].Session != sid("d") || r.told[0].Ticket == 0 ||
		r.told[0].RequestID != id("d-request") {
		t.Errorf("who can never be granted hears %+v", r.told)
	}
	r.want(ask("d", "p").as(asPermits(2, 3)), CodeInvalid)
	restored := New(10)
	if err := restored.Restore(bytes.NewReader(snapshot(t, r.m))); err != nil || restored.Hash() != r.m.Hash() {
		t.Errorf("restored to another state: %v", err)
	}
	for _, x := range []struct{ gives, held string }{{"a", "b c"}, {"b", "c"}, {"c", "e"}} {
		r.want(give(x.gives, "p"), CodeOK)
		r.held("p", x.held)
	}
	if got := r.m.Holder("p").Holders[0].Limit; got != 1 {
		t.Errorf("the limit in force is shown as %d", got)
	}
	r.policies("") // the limit in use stays until nobody uses it
	r.want(ask("a", "p").as(asPermits(1, 3)), CodeMismatch)
	r.want(give("e", "p"), CodeOK)
	r.want(ask("a", "p").as(asPermits(1, 3)), CodeGranted)
	r.want(ask("a", "q"), CodeGranted)
	r.policies("permits=5 \"\"\n")
	r.held("q", "a")
}

func TestPoliciesThatTheMachineRefuses(t *testing.T) {
	r := newRig(t)
	r.want(Command{Op: OpRaiseLevel, Level: LevelRules - 1}, CodeOK)
	r.open("a")
	before := r.m.Hash()
	r.want(Command{Op: OpSetPolicies, Rules: "permits=1 a\n"}, CodeInvalid)
	r.want(ask("a", "a").as(heeding), CodeInvalid)
	if r.m.Hash() != before {
		t.Error("a level without policies has some")
	}
	r.want(Command{Op: OpRaiseLevel, Level: LevelRules}, CodeOK)
	before = r.m.Hash()
	for text, want := range map[string]string{
		"permits=1 a\npermits": `line 2: "permits"`, strings.Repeat("#", MaxRulesBytes+1): "too long",
	} {
		if got := r.want(Command{Op: OpSetPolicies, Rules: text}, CodeInvalid); !strings.Contains(got.Detail, want) {
			t.Errorf("refused with %+v, want %s", got, want)
		}
	}
	if r.m.Hash() != before {
		t.Error("policies that are refused change the state")
	}
}

// Policies and maximums are part of snapshots, and policies of clusters that are made of backups.
func TestPoliciesAreRestored(t *testing.T) {
	const text = "max-hold=1m a\n"
	r := policed(t, text, "x")
	r.want(ask("x", "a").as(heeding), CodeGranted)
	data := snapshot(t, r.m)
	copied := New(8)
	if err := copied.Restore(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	if timed := copied.Timed(); len(timed) != 1 || timed[0].MaxHold != time.Minute || copied.Policies().Text != text {
		t.Errorf("restored: %+v, %q", timed, copied.Policies().Text)
	}
	if _, err := copied.RestoreBackup(bytes.NewReader(data), 0); err != nil || copied.Policies().Text != text {
		t.Errorf("of a backup: %q, %v", copied.Policies().Text, err)
	}
}
