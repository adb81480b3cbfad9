//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/testcert"
)

// auditIn returns the events of a directory.
func auditIn(t *testing.T, dir string) []audit.Event {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	return objects[audit.Event](t, string(text))
}

// find returns the first event of a kind.
func find(t *testing.T, all []audit.Event, event, outcome string) audit.Event {
	t.Helper()
	for _, e := range all {
		if e.Event == event && e.Outcome == outcome {
			return e
		}
	}
	t.Errorf("no %s that is %s: %+v", event, outcome, all)
	return audit.Event{}
}

func TestAuditOfServer(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "audit")
	p := start(t, "serve", "--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
		"--data-dir", filepath.Join(t.TempDir(), "data"), "--rules", fileOf(t, "first", "allow * acquire,read jobs\n"),
		"--audit", dir, "--audit-locks")
	url := "fencelock://" + p.await("fencelock: serving clients at ")
	door := p.await("fencelock: serving HTTP at ")
	eventually(t, "the first rules are in force", func() bool { return succeed(t, "rules", "get", "--backend", url) != "" })
	succeed(t, "run", "--name", "jobs/1", "--backend", url, "--", "true")
	start(t, "run", "--name", "else", "--backend", url, "--", "true").expectExit(exitDenied, "denied")
	resp, err := http.Get(door + "/v1/locks/else")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	succeed(t, "backup", filepath.Join(t.TempDir(), "backup"), "--backend", url)
	succeed(t, "rules", "remove", "--backend", url)
	p.terminate()
	all := auditIn(t, dir)
	if e := find(t, all, "acquire", audit.Done); e.Name != "jobs/1" || e.Token == 0 || !strings.HasPrefix(e.From, "127.0.0.1:") {
		t.Errorf("%+v", e)
	}
	find(t, all, "release", audit.Done)
	if e := find(t, all, "acquire", audit.Denied); e.Name != "else" || e.Rules != "1" || e.Principal != "address:127.0.0.1" {
		t.Errorf("%+v", e)
	}
	var via []audit.Event // "run" looks for a holder, too, if its acquire takes long
	for _, e := range all {
		if e.Via == "process:" {
			via = append(via, e)
		}
	}
	if e := find(t, via, "get-holder", audit.Denied); e.Name != "else" || e.Principal != "address:127.0.0.1" {
		t.Errorf("%+v", e)
	}
	for _, event := range []string{"backup", "set-rules"} {
		find(t, all, event, audit.Done)
	}
}

// On a full disk the gateway serves on.
func TestAuditOfGateway(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("the system has no /dev/full")
	}
	dir := t.TempDir()
	at := filepath.Join(dir, "audit.jsonl")
	if err := os.Symlink("/dev/full", at); err != nil {
		t.Fatal(err)
	}
	token := principal.NewToken()
	rules := fileOf(t, "rules", "allow token:ci acquire jobs\n")
	p := start(t, "gateway", "--backend", "memory://", "--http-listen", "127.0.0.1:0", "--ops-listen", "127.0.0.1:0",
		"--rules", rules, "--principals", fileOf(t, "principals", lineOf("token:ci", token)), "--audit", dir, "--audit-locks")
	ops := p.await("fencelock: serving probes at ")
	addr := p.await("fencelock: serving HTTP at ")
	by := &bearer{http.DefaultTransport, fileOf(t, "credential", token)}
	acquire := func(name string) {
		t.Helper()
		body := map[string]any{"ownerId": "o", "ttlMillis": 600_000}
		if _, _, err := exchange(context.WithoutCancel(t.Context()), by, addr+"/v1/locks/jobs%2F"+name+"/acquire", body); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{"1", "2", "3"} {
		acquire(name)
	}
	metric := regexp.MustCompile(`(?m)^fencelock_audit_dropped_events_total 3$`)
	eventually(t, "three events are counted", func() bool {
		resp, err := http.Get(ops + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var text bytes.Buffer
		_, _ = text.ReadFrom(resp.Body)
		return metric.Match(text.Bytes())
	})
	if err := os.Remove(at); err != nil {
		t.Fatal(err)
	}
	replace(t, rules, "allow token:ci acquire other\n")
	eventually(t, "the new rules are in force", func() bool {
		body := map[string]any{"ownerId": "o", "ttlMillis": 600_000}
		_, _, err := exchange(context.WithoutCancel(t.Context()), by, addr+"/v1/locks/jobs%2F4/acquire", body)
		return errors.Is(err, fencelock.ErrDenied)
	})
	p.terminate()
	all := auditIn(t, dir)
	if all[0].Dropped != 3 {
		t.Errorf("%+v", all[0])
	}
	set := find(t, all, "set-rules", audit.Done)
	if denied := find(t, all, "acquire", audit.Denied); denied.Name != "jobs/4" || denied.Rules != set.Rules || set.Rules == "" {
		t.Errorf("%+v, %+v", denied, set)
	}
}

// Clients without certificates send a token, which --principals knows.
func TestServeTokens(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	cert, key := authority.Sign(t, "localhost")
	token, data, dir := principal.NewToken(), filepath.Join(t.TempDir(), "data"), t.TempDir()
	principals := fileOf(t, "principals", lineOf("token:ci", token))
	p := start(t, "serve", "--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0", "--data-dir", data, "--tls-cert", cert,
		"--tls-key", key, "--rules", fileOf(t, "rules", "allow token:ci acquire,read jobs\n"), "--principals", principals,
		"--audit", dir)
	addr := p.await("fencelock: serving clients at ")
	eventually(t, "the first rules are in force", func() bool {
		return succeed(t, "rules", "get", "--backend", "unix:"+filepath.Join(data, "admin.sock")) != ""
	})
	url := "fencelocks://localhost" + addr[strings.LastIndex(addr, ":"):] + "?ca=" + authority.File
	run := func(name, token string) *program {
		at := url
		if token != "" {
			at += "&credential=" + fileOf(t, "credential", token)
		}
		return start(t, "run", "--name", name, "--backend", at, "--", "true")
	}
	run("jobs/1", token).expectExit(exitOK)
	run("else", token).expectExit(exitDenied, "token:ci may not acquire")
	run("jobs/1", "").expectExit(exitDenied, "may not acquire")
	run("jobs/1", principal.NewToken()).expectExit(exitDenied, "the token is unknown")
	p.terminate()
	if e := find(t, auditIn(t, dir), "connect", audit.Denied); e.Reason != "the token is unknown" {
		t.Errorf("%+v", e)
	}
	start(t, "serve", "--dev", "--listen", "127.0.0.1:0", "--principals", principals).expectExit(exitUsage, "needs --tls-cert")
}

// The statements of docs/SECURITY.md copy the files to PostgreSQL.
func TestAuditIntoPostgreSQL(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```sql\n(CREATE TABLE fencelock_audit.*?;\n)(\\\\copy (\\w+) FROM '[^']*' (WITH [^\n]*))\n(.*?;\n)```").
		FindStringSubmatch(string(text))
	if m == nil {
		t.Fatal("docs/SECURITY.md has no such statements")
	}
	dir := t.TempDir()
	l, err := audit.Open(audit.Options{Dir: dir, Keep: 1, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	want := audit.Event{
		Time: time.Now().UTC().Truncate(time.Millisecond), Event: "acquire", Outcome: audit.Denied, Token: 1<<64 - 1,
		Name: "a\\b\tc\n\"d\" e,\x01\x02\ufffd \u2028\\.", Principal: "token:ci",
	}
	given := want
	given.Name = strings.ReplaceAll(want.Name, "\ufffd", "\x00") // which jsonb has not
	l.Write(given)
	l.Write(audit.Event{Event: "backup", Outcome: audit.Done})
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	ctx := context.WithoutCancel(t.Context())
	conn, err := pgx.Connect(ctx, containers.Postgres(t).URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, m[1]); err != nil {
		t.Fatal(err)
	}
	if tag, err := conn.PgConn().CopyFrom(ctx, file, "COPY "+m[3]+" FROM STDIN "+m[4]); err != nil || tag.RowsAffected() != 2 {
		t.Fatalf("%v, %v", tag, err)
	}
	var got audit.Event
	var token string
	err = conn.QueryRow(ctx, m[5]).Scan(&got.Time, &got.Principal, &got.Event, &got.Name, &token)
	if err != nil || !got.Time.Equal(want.Time) || got.Principal != want.Principal || got.Event != want.Event ||
		got.Name != want.Name || token != "18446744073709551615" {
		t.Errorf("%+v, token %s, %v", got, token, err)
	}
}
