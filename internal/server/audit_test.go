package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/audit"
)

// audited has a server write to a directory.
func audited(t *testing.T, dir string, locks bool) func(*Config) {
	t.Helper()
	l, err := audit.Open(audit.Options{Dir: dir, Locks: locks, Keep: 1, Log: quiet(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close(context.Background()) })
	return func(c *Config) { c.Audit = l }
}

// auditOf returns the events that a directory has by now.
func auditOf(t *testing.T, dir string) (all []audit.Event) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "audit.jsonl"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var e audit.Event
		if bytes.HasSuffix(line, []byte("\n")) && json.Unmarshal(line, &e) != nil {
			t.Errorf("no event: %s", line)
		}
		all = append(all, e)
	}
	return all
}

// expectAudit waits for an event, and compares its fields that want has.
func expectAudit(t *testing.T, dir, server string, want audit.Event) {
	t.Helper()
	var got audit.Event
	eventually(t, want.Event+" of "+want.Name+" is written", func() bool {
		for _, e := range auditOf(t, dir) {
			if e.Event == want.Event && e.Outcome == want.Outcome && (want.Name == "" || e.Name == want.Name) &&
				(want.Principal == "" || e.Principal == want.Principal) {
				got = e
				return true
			}
		}
		return false
	})
	if got.Time.IsZero() || got.Server != server {
		t.Errorf("%+v", got)
	}
	for _, x := range []struct{ what, got, want string }{
		{"owner", got.Owner, want.Owner}, {"holder", got.Holder, want.Holder},
		{"by", got.By, want.By}, {"rules", got.Rules, want.Rules}, {"reason", got.Reason, want.Reason},
	} {
		if x.want != "" && x.got != x.want {
			t.Errorf("%s of %s: %s is %q, want %q", want.Event, want.Name, x.what, x.got, x.want)
		}
	}
	if want.Token != 0 && got.Token != want.Token {
		t.Errorf("%s of %s: token %d, want %d", want.Event, want.Name, got.Token, want.Token)
	}
	if want.From != "" && got.From == "" {
		t.Errorf("%s of %s has no address", want.Event, want.Name)
	}
}

// somewhere is any address.
const somewhere = "any"

// Each event has who did it, from where, to what, and by which rules.
func TestAudit(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startRuled(t, matrixRules, audited(t, dir, false), func(c *Config) { c.MinTTL = 100 * time.Millisecond })
	is := func(want audit.Event) { t.Helper(); expectAudit(t, dir, s.ID(), want) }
	is(audit.Event{Event: "set-rules", Outcome: audit.Done, Principal: "process:", Rules: "1"})

	peer, acquirer, forcer := s.as("peer"), s.as("acquirer"), s.as("forcer")
	mine := acquirer.open(longTTL)
	acquirer.call(acquireOf(mine, "b/1", backend.NewRequestID(), false))
	is(audit.Event{
		Event: "acquire", Outcome: audit.Denied, Principal: "cert:acquirer", From: somewhere, Name: "b/1", Owner: "somebody",
		Rules: "1",
	})
	acquirer.call(&lockpb.Request{Session: mine, Call: &lockpb.Request_AcquireAll{AcquireAll: &lockpb.AcquireAll{
		Requests: []*lockpb.Acquire{
			acquireOf(nil, "a/1", backend.NewRequestID(), false).GetAcquire(),
			acquireOf(nil, "b/2", backend.NewRequestID(), false).GetAcquire(),
		},
	}}})
	is(audit.Event{Event: "acquire-all", Outcome: audit.Denied, Principal: "cert:acquirer", Name: "b/2"})
	_, token := peer.hold(peer.open(longTTL), "a/held")
	acquirer.call(holderOf("a/held"))
	is(audit.Event{Event: "get-holder", Outcome: audit.Denied, Principal: "cert:acquirer", From: somewhere, Name: "a/held"})
	if r := forcer.call(&lockpb.Request{Call: &lockpb.Request_ForceRelease{
		ForceRelease: &lockpb.ForceRelease{Name: "a/held", Reason: "it hangs", By: "ann"},
	}}); codeOf(r) != 0 {
		t.Fatal(r)
	}
	is(audit.Event{
		Event: "force-release", Outcome: audit.Done, Principal: "cert:forcer", From: somewhere, Name: "a/held", Owner: "somebody",
		Holder: "cert:peer", Token: token, By: "ann", Reason: "it hangs", Rules: "1",
	})
	_, token = peer.holdShort(100*time.Millisecond, "a/short")
	is(audit.Event{
		Event: "expire", Outcome: audit.Done, Name: "a/short", Owner: "somebody", Holder: "cert:peer", Token: token, Rules: "1",
	})

	admin, other := s.admin("admin", s.AdminAddr()), s.admin("other", s.AdminAddr())
	_, _ = other.SetMaintenance(t.Context(), &lockpb.SetMaintenanceRequest{On: true})
	is(audit.Event{Event: "set-maintenance", Outcome: audit.Denied, Principal: "cert:other", From: somewhere, Name: s.ID()})
	_, _ = s.admin("admin", s.Addr().String()).RemoveMember(t.Context(), &lockpb.RemoveMemberRequest{NodeId: "none"})
	is(audit.Event{Event: "remove-member", Outcome: audit.Denied, Principal: "cert:admin", Name: "none"})
	_, _ = admin.RemoveMember(t.Context(), &lockpb.RemoveMemberRequest{NodeId: "none"})
	is(audit.Event{Event: "remove-member", Outcome: audit.Failed, Principal: "cert:admin", Name: "none"})
	stream, err := admin.Backup(t.Context(), &lockpb.BackupRequest{})
	for err == nil {
		_, err = stream.Recv()
	}
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	is(audit.Event{Event: "backup", Outcome: audit.Done, Principal: "cert:admin", From: somewhere})
	if _, err := admin.EndSession(t.Context(), &lockpb.EndSessionRequest{Name: "none"}); err == nil {
		t.Error("there is such a session")
	}
	is(audit.Event{Event: "end-session", Outcome: audit.Failed, Principal: "cert:admin", Name: "none"})
	if _, err := admin.SetRules(t.Context(), &lockpb.SetRulesRequest{Text: "allow cert:admin admin \"\"\n"}); err != nil {
		t.Fatal(err)
	}
	is(audit.Event{Event: "set-rules", Outcome: audit.Done, Principal: "cert:admin", Rules: "2"})
	if _, err := admin.GetRules(t.Context(), &lockpb.GetRulesRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := s.config.Audit.Close(t.Context()); err != nil { // the log is written later
		t.Fatal(err)
	}
	for _, e := range auditOf(t, dir) {
		if e.Outcome == audit.Done && (e.Event == "acquire" || e.Event == "release" || e.Event == "get-rules") {
			t.Errorf("%+v", e)
		}
	}
}

// A member writes what it decided as the leader: no replay of the log repeats it.
func TestAuditIsNotReplayed(t *testing.T) {
	t.Parallel()
	dir, data := t.TempDir(), t.TempDir()
	config := func() Config {
		c := Config{DataDir: data, MinTTL: 100 * time.Millisecond, Listen: "127.0.0.1:0"}
		audited(t, dir, true)(&c)
		return c
	}
	s := alone(t, config())
	c := attach(t, s)
	session := c.open(longTTL)
	id, token := c.hold(session, "x")
	if r := c.call(releaseOf(session, "x", id, token)); codeOf(r) != 0 {
		t.Fatal(r)
	}
	q := &lockpb.SetRulesRequest{Text: "allow * read \"\"\n"}
	if _, err := operate(t, s.AdminAddr()).SetRules(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	for _, want := range []audit.Event{
		{Event: "acquire", Name: "x", Token: token, Owner: "somebody", Principal: "process:"},
		{Event: "release", Name: "x", Token: token}, {Event: "set-rules", Principal: "socket:", Rules: "1"},
	} {
		want.Outcome = audit.Done
		expectAudit(t, dir, s.ID(), want)
	}
	before := len(auditOf(t, dir))
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	again := alone(t, config())
	c = attach(t, again)
	c.hold(c.open(longTTL), "y")
	expectAudit(t, dir, again.ID(), audit.Event{Event: "acquire", Outcome: audit.Done, Name: "y"})
	if all := auditOf(t, dir); len(all) != before+1 {
		t.Errorf("%d lines before, and now: %+v", before, all)
	}
}
