package logs_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/observe/internal/scenario"
	"github.com/fencelock/fencelock/observe/logs"
)

// records returns what a logger with a level writes about the scenario.
func records(t *testing.T, level slog.Level) (all []map[string]any) {
	t.Helper()
	var out bytes.Buffer
	l := slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: level}))
	scenario.New(t).Run(t.Context(), logs.New(l))
	for line := range bytes.Lines(out.Bytes()) {
		record := map[string]any{}
		if err := json.Unmarshal(line, &record); err != nil {
			t.Fatal(err)
		}
		all = append(all, record)
	}
	return all
}

func TestRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		count := map[string]int{}
		for _, r := range records(t, slog.LevelDebug) {
			count[r["level"].(string)+" "+r["msg"].(string)]++
			if r["name"] == nil || r["driver"] != "memory" || r["tier"] != "correctness" || r["owner"] != "worker" {
				t.Errorf("record %v lacks something", r)
			}
			switch r["msg"] {
			case "lock lost":
				if r["reason"] == nil || r["hold"] == nil || r["token"] == nil || r["kind"] != "exclusive" {
					t.Errorf("record %v lacks something", r)
				}
			case "acquire waits for the lock":
				if r["holder"] != "rival" {
					t.Errorf("waits for %v, want rival", r["holder"])
				}
			case "forced release":
				if r["why"] == nil {
					t.Errorf("record %v lacks why", r)
				}
			}
		}
		for record, n := range map[string]int{
			"ERROR lock lost": 2, "WARN lock not renewed, trying again": 1, "WARN forced release": 2,
			"WARN acquire failed": 1, "INFO leadership begins": 1, "INFO leadership ended": 1,
			"DEBUG acquire waits for the lock": 2, "DEBUG lock is held by another": 2, "DEBUG lock acquired": 4,
			"DEBUG lock released": 2, "DEBUG lock renewed": 4,
		} {
			if count[record] != n {
				t.Errorf("%d records %q, want %d", count[record], record, n)
			}
			delete(count, record)
		}
		if len(count) != 0 {
			t.Errorf("other records: %v", count)
		}
	})
}

func TestLevel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, r := range records(t, slog.LevelWarn) {
			if level := r["level"]; level != "WARN" && level != "ERROR" {
				t.Errorf("record %v at a level that is off", r)
			}
		}
	})
}

// The end of a client is no error, and an unknown type is a record.
func TestLevels(t *testing.T) {
	var out bytes.Buffer
	o := logs.New(slog.New(slog.NewTextHandler(&out, nil)))
	o.Observe(t.Context(), fencelock.Event{Type: fencelock.EventLost, Reason: fencelock.ReasonClosed})
	o.Observe(t.Context(), fencelock.Event{Type: "new"})
	o.Observe(t.Context(), fencelock.Event{Type: fencelock.EventShed, Count: 7})
	for _, want := range []string{`level=INFO msg="lock lost"`, `level=INFO msg="lock new"`, "count=7"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("records\n%swant one with %s", out.String(), want)
		}
	}
}
