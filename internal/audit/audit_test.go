package audit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/audit"
)

func open(t *testing.T, o audit.Options) *audit.Log {
	t.Helper()
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Keep = max(o.Keep, 1)
	l, err := audit.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closes(t, l) })
	return l
}

func closes(t *testing.T, l *audit.Log) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := l.Close(ctx); err != nil {
		t.Error(err)
	}
}

// lines returns the events of a file, each of which is a whole line.
func lines(t *testing.T, path string) (all []audit.Event) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(text) > 0 && text[len(text)-1] != '\n' {
		t.Errorf("%s ends with half a line", path)
	}
	for line := range bytes.Lines(text) {
		var e audit.Event
		if err := json.Unmarshal(line, &e); err != nil {
			t.Errorf("%s: %v", line, err)
		}
		all = append(all, e)
	}
	return all
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still not: %s", what)
		}
	}
}

func TestEventIsOneLine(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "audit")
	l := open(t, audit.Options{Dir: dir})
	at := time.Date(2026, 11, 27, 6, 0, 0, 0, time.FixedZone("", 3600))
	e := audit.Event{
		Time: at, Server: "s", Event: "force-release", Outcome: audit.Done, Principal: "cert:ops", From: "10.0.0.7:1",
		Name: "a\nb\x01\x02\\<>", Owner: "o", Holder: "cert:pay", Token: 7, By: "ann", Reason: `"it" hangs`, Rules: "3",
	}
	l.Write(e)
	closes(t, l)
	l.Write(e) // after the end it is dropped
	path := filepath.Join(dir, "audit.jsonl")
	e.Time = at.UTC()
	if got := lines(t, path); len(got) != 1 || got[0] != e {
		t.Errorf("%+v", got)
	}
	if n := l.Dropped(); n != 1 {
		t.Errorf("%d dropped", n)
	}
	about, err := os.Stat(path)
	if err != nil || about.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", about.Mode(), err)
	}
}

// A client chooses names and reasons: no text fills the files, or makes a line that jsonb refuses.
func TestTextsAreBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, audit.Options{Dir: dir})
	l.Write(audit.Event{Event: "get-holder", Outcome: audit.Denied, Name: "a\x00b", Reason: strings.Repeat("ä\x01", 1<<20)})
	closes(t, l)
	got := lines(t, filepath.Join(dir, "audit.jsonl"))
	if len(got) != 1 || got[0].Name != "a\uFFFDb" {
		t.Fatalf("%+v", got)
	}
	if r := got[0].Reason; len(r) > 1024 || len(r) < 1000 || !strings.HasSuffix(r, "…") || strings.Contains(r, "\uFFFD") {
		t.Errorf("%d bytes: %q", len(r), r)
	}
}

// After the clock was set back the file that is renamed is the newest one, and not deleted.
func TestRotateAfterTheClockWasSetBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	later := filepath.Join(dir, "audit-29991231T235959.999999999Z.jsonl")
	if err := os.WriteFile(later, []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := open(t, audit.Options{Dir: dir, Keep: 1, FileBytes: 1000})
	l.Write(audit.Event{Event: "expire", Name: strings.Repeat("x", 900)})
	eventually(t, "the first line is written", func() bool { return len(lines(t, filepath.Join(dir, "audit.jsonl"))) == 1 })
	l.Write(audit.Event{Event: "expire", Name: "y"})
	closes(t, l)
	if _, err := os.Stat(later); !os.IsNotExist(err) {
		t.Errorf("the file of before is not deleted: %v", err)
	}
	if got := lines(t, filepath.Join(dir, "audit-30000101T000000.000000000Z.jsonl")); len(got) != 1 {
		t.Errorf("%+v", got)
	}
}

// Full files are renamed, and the oldest ones deleted. No line is divided, and none is missing.
func TestFilesRotate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, audit.Options{Dir: dir, Keep: 2, FileBytes: 100_000})
	const writers, each = 8, 1000
	var writing sync.WaitGroup
	for i := range writers {
		writing.Go(func() {
			for n := range each {
				l.Write(audit.Event{Event: "expire", Outcome: audit.Done, Name: fmt.Sprintf("%d/%d", i, n), Reason: strings.Repeat("x", 100)})
			}
		})
	}
	writing.Wait()
	closes(t, l)
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 3 {
		t.Fatalf("%v %v", entries, err)
	}
	last := map[string]int{} // by writer
	for _, f := range entries {
		info, err := f.Info()
		if err != nil || info.Size() > 100_000 {
			t.Errorf("%s has %d bytes, %v", f.Name(), info.Size(), err)
		}
		for _, e := range lines(t, filepath.Join(dir, f.Name())) {
			i, n, _ := strings.Cut(e.Name, "/")
			var number int
			fmt.Sscan(n, &number)
			if before, found := last[i]; found && number != before+1 || e.Dropped != 0 {
				t.Errorf("%s after %d, %d dropped", e.Name, before, e.Dropped)
			}
			last[i] = number
		}
	}
	for i, n := range last {
		if n != each-1 {
			t.Errorf("the last line of %s is %d", i, n)
		}
	}
	if l.Dropped() != 0 || len(last) == 0 {
		t.Errorf("%d dropped, the last are %v", l.Dropped(), last)
	}
}

// A line that was cut off by the end of the machine is removed.
func TestHalfALineIsRemoved(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "audit.jsonl")
	whole := `{"event":"before"}` + "\n"
	for _, half := range []string{`{"event":"cut`, strings.Repeat("x", 200_000), ""} {
		if err := os.WriteFile(path, []byte(whole+half), 0o600); err != nil {
			t.Fatal(err)
		}
		l := open(t, audit.Options{Dir: dir})
		l.Write(audit.Event{Event: "after"})
		closes(t, l)
		if got := lines(t, path); len(got) != 2 || got[0].Event != "before" || got[1].Event != "after" {
			t.Errorf("%.20q: %+v", half, got)
		}
	}
}

// On a full disk events are dropped, which is logged once; the next event that is written says how many.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("the system has no /dev/full")
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "audit.jsonl")
	if err := os.Symlink("/dev/full", path); err != nil {
		t.Fatal(err)
	}
	var text lockedBuffer
	l := open(t, audit.Options{Dir: dir, Log: slog.New(slog.NewTextHandler(&text, nil))})
	for i := range uint64(3) {
		l.Write(audit.Event{Event: "dropped"})
		eventually(t, "the event is dropped", func() bool { return l.Dropped() == i+1 })
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	l.Write(audit.Event{Event: "first"})
	l.Write(audit.Event{Event: "second"})
	closes(t, l)
	got := lines(t, path)
	if len(got) != 2 || got[0].Dropped != 3 || got[1].Dropped != 0 || l.Dropped() != 3 {
		t.Errorf("%+v, %d dropped", got, l.Dropped())
	}
	if log := text.String(); strings.Count(log, "\n") != 2 || strings.Count(log, "audit events are dropped") != 1 ||
		!strings.Contains(log, "no space left") || !strings.Contains(log, "audit events are written again") {
		t.Errorf("the log: %s", log)
	}
}

type lockedBuffer struct {
	mu sync.Mutex // protects b
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestDirectoryThatCannotBeMade(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := audit.Open(audit.Options{Dir: filepath.Join(path, "audit")}); err == nil {
		t.Error("no error")
	}
}

// A nil log writes nothing.
func TestNoLog(t *testing.T) {
	t.Parallel()
	var l *audit.Log
	l.Write(audit.Event{})
	if l.Locks() || l.Dropped() != 0 || l.Close(t.Context()) != nil {
		t.Error("a nil log does something")
	}
}
