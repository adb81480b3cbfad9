package machine

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/principal"
)

const someRules = "allow cert:a acquire a\nallow cert:* acquire,read b\ndeny cert:a acquire a/secret\n" +
	"allow cert:ops force \"\"\n"

// ruled returns a rig with rules, and with a session for each principal of the same name.
func ruled(t *testing.T, names ...string) *rig {
	r := newRig(t)
	r.want(Command{Op: OpRaiseLevel, Level: MaxLevel}, CodeOK)
	for _, name := range names {
		r.want(Command{
			Op: OpOpenSession, Session: sid(name), TTL: time.Second, Principal: principal.Principal("cert:" + name),
		}, CodeOK)
	}
	return r
}

// givenBy is give by the principal of the session.
func givenBy(session, name string) Command {
	c := give(session, name)
	c.Principal = principal.Principal("cert:" + session)
	return c
}

// Rules count from their place in the log on: what was granted stays, and what is asked for again is answered as before.
func TestRulesCountFromTheirPlaceInTheLog(t *testing.T) {
	r := ruled(t, "a", "b")
	before := r.want(ask("b", "a"), CodeGranted).Grants[0]
	r.want(ask("a", "b"), CodeGranted)
	r.want(ask("b", "b"), CodeQueued)
	r.want(Command{Op: OpSetRules, Rules: someRules}, CodeOK)

	if again := r.want(ask("b", "a"), CodeGranted).Grants[0]; again.Token != before.Token {
		t.Errorf("asked again: token %d, want %d", again.Token, before.Token)
	}
	other := ask("b", "a").as(func(r *Request) { r.ID = id("b-other") })
	if got := r.want(other, CodeDenied); got.Field != "Name" || !strings.Contains(got.Detail, `cert:b may not acquire "a"`) {
		t.Errorf("refused with %+v", got)
	}
	r.want(givenBy("b", "a"), CodeOK)
	r.want(ask("b", "a"), CodeDenied)
	r.want(ask("a", "a"), CodeGranted)
	r.want(ask("a", "a/secret"), CodeDenied)
	r.want(ask("a", "account"), CodeDenied)
	r.want(ask("a", "a/x", "account"), CodeDenied) // a set takes the right to all
	r.held("a/x", "")
	r.want(givenBy("a", "b"), CodeOK)
	r.held("b", "b") // it waited before

	r.want(Command{Op: OpSetRules}, CodeOK)
	if all := r.m.Rules(); all.Text != "" || all.Version != 2 || all.Parsed() != nil {
		t.Errorf("without rules: %+v", all)
	}
	r.want(ask("b", "account"), CodeGranted)
}

// New rules end the waits that they do not allow, also those for several names of which one is denied, and what stood
// behind them is granted.
func TestNewRulesEndWaits(t *testing.T) {
	r := ruled(t, "a", "b", "c")
	r.want(ask("c", "a").as(asShared), CodeGranted)
	r.want(ask("b", "a"), CodeQueued)
	r.want(ask("a", "a").as(asShared), CodeQueued) // behind b
	r.want(ask("c", "b"), CodeGranted)
	r.want(ask("a", "b", "account"), CodeQueued)
	r.want(ask("b", "b"), CodeQueued)
	set := Command{Op: OpSetRules, Rules: someRules}
	result, notices := r.m.Apply(0, &set)
	if result.Code != CodeOK || len(notices) != 3 {
		t.Fatalf("%+v, %+v", result, notices)
	}
	for i, want := range []struct{ session, name string }{{"b", "a"}, {"a", "b"}} {
		n := notices[i]
		if n.Type != NoticeLost || n.Session != sid(want.session) || n.Name != want.name || n.Token != 0 || n.Ticket == 0 ||
			n.Cause != CauseDenied || !strings.Contains(n.Detail, "may not acquire") {
			t.Errorf("notice %d: %+v", i, n)
		}
	}
	if n := notices[2]; n.Type != NoticeGranted || n.Session != sid("a") || n.Grants[0].Name != "a" {
		t.Errorf("behind them: %+v", n)
	}
	r.held("b", "c")
	r.want(givenBy("c", "b"), CodeOK)
	r.held("b", "b")
}

// throughTheLevel is a log that begins without rules and raises the level to theirs: each entry as members write it.
func throughTheLevel(t *testing.T) (entries [][]byte) {
	t.Helper()
	var all []Command
	add := func(c ...Command) { all = append(all, c...) }
	add(Command{Op: OpRaiseLevel, Level: LevelRules - 1})
	for _, name := range []string{"a", "b"} {
		add(Command{Op: OpOpenSession, Session: sid(name), TTL: time.Second, Principal: principal.Principal("cert:" + name)})
	}
	add(ask("a", "a"), ask("b", "a"), Command{Op: OpSetRules, Rules: someRules}, ask("b", "b"), ask("a", "b"),
		Command{Op: OpRaiseLevel, Level: LevelRules}, ask("b", "c"), Command{Op: OpSetRules, Rules: someRules},
		ask("b", "d"), givenBy("a", "a"), givenBy("b", "b"), Command{Op: OpSetRules}, ask("b", "d"))
	for i := range all {
		entries = append(entries, AppendBatch(nil, &Batch{At: int64(i), Commands: all[i : i+1]}))
	}
	return entries
}

// A member that applies the whole log, and one that begins with a snapshot of any place in it, come to the same state.
func TestLogThroughTheLevelOfRules(t *testing.T) {
	entries := throughTheLevel(t)
	apply := func(m *Machine, entries [][]byte) (codes []Code) {
		for _, entry := range entries {
			b, err := DecodeBatch(entry)
			if err != nil {
				t.Fatal(err)
			}
			for i := range b.Commands {
				r, _ := m.Apply(b.At, &b.Commands[i])
				codes = append(codes, r.Code)
			}
		}
		return codes
	}
	whole := New(8)
	codes := apply(whole, entries)
	want := []Code{
		CodeOK, CodeOK, CodeOK, CodeGranted, CodeQueued, CodeInvalid, CodeGranted, CodeQueued, CodeOK, CodeGranted, CodeOK,
		CodeDenied, CodeOK, CodeOK, CodeOK, CodeGranted,
	}
	if !slices.Equal(codes, want) {
		t.Errorf("%v, want %v", codes, want)
	}
	if held := whole.Look("a").Holders; len(held) != 0 {
		t.Errorf("a wait that the rules deny was granted: %+v", held)
	}
	if held := whole.Look("b").Holders; len(held) != 1 || held[0].Session != sid("a") {
		t.Errorf("a wait that the rules allow: %+v", held)
	}
	for n := range entries {
		m := New(8)
		apply(m, entries[:n])
		rest := New(8)
		if err := rest.Restore(bytes.NewReader(snapshot(t, m))); err != nil {
			t.Fatal(err)
		}
		if apply(rest, entries[n:]); rest.Hash() != whole.Hash() {
			t.Errorf("a snapshot after %d entries leads to another state", n)
		}
	}
}

func TestRulesOfSubtreesAndForcedReleases(t *testing.T) {
	r := ruled(t, "a")
	r.want(Command{Op: OpSetRules, Rules: someRules}, CodeOK)
	r.want(ask("a", "a").as(tree), CodeDenied)
	r.want(ask("a", "a/x").as(tree), CodeGranted)
	force := Command{Op: OpForceRelease, Name: "a/x", Principal: "cert:a"}
	r.want(force, CodeDenied)
	force.Principal = "address:10.0.0.1"
	r.want(force, CodeDenied)
	force.Principal, force.Nonce = "cert:ops", fencing.Nonce{}
	r.want(force, CodeOK)
	r.held("a/x", "")
	force.Principal = principal.Process
	r.want(force, CodeNotHeld)
}

func TestRulesThatTheMachineRefuses(t *testing.T) {
	r := newRig(t)
	r.want(Command{Op: OpRaiseLevel, Level: LevelRules - 1}, CodeOK)
	before := r.m.Hash()
	r.want(Command{Op: OpSetRules, Rules: someRules}, CodeInvalid)
	if r.m.Hash() != before {
		t.Error("a level without rules has some")
	}
	r.want(Command{Op: OpRaiseLevel, Level: LevelRules}, CodeOK)
	r.want(Command{Op: OpSetRules, Rules: someRules}, CodeOK)
	before = r.m.Hash()
	for text, want := range map[string]string{
		"allow cert:a acquire a\npermit": `line 2: "permit"`, strings.Repeat("#", MaxRulesBytes+1): "too long",
	} {
		if got := r.want(Command{Op: OpSetRules, Rules: text}, CodeInvalid); !strings.Contains(got.Detail, want) {
			t.Errorf("refused with %+v, want %s", got, want)
		}
	}
	if r.m.Hash() != before {
		t.Error("rules that are refused change the state")
	}
}

// Rules are part of snapshots, and of clusters that are made of backups.
func TestRulesAreRestored(t *testing.T) {
	r := ruled(t, "a")
	r.want(Command{Op: OpSetRules, Rules: someRules}, CodeOK)
	data := snapshot(t, r.m)
	for what, restore := range map[string]func(*Machine) error{
		"a snapshot": func(m *Machine) error { return m.Restore(bytes.NewReader(data)) },
		"a backup":   func(m *Machine) error { _, err := m.RestoreBackup(bytes.NewReader(data), 0); return err },
	} {
		m := New(8)
		if err := restore(m); err != nil {
			t.Fatal(err)
		}
		if all := m.Rules(); all.Text != someRules || all.Version != 1 {
			t.Errorf("%s: %+v", what, all)
		}
		open := Command{Op: OpOpenSession, Session: sid("n"), TTL: time.Second, Principal: "cert:b"}
		m.Apply(0, &open)
		ask := ask("n", "a")
		if got, _ := m.Apply(0, &ask); got.Code != CodeDenied {
			t.Errorf("%s: %+v", what, got)
		}
	}
}
