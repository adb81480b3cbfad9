package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Faults that break other libraries do not break ours, and each library gets a row.
func TestCheckOfPeers(t *testing.T) {
	need(t, "redis-server")
	var out bytes.Buffer
	dir := t.TempDir()
	file := filepath.Join(dir, "check.json")
	o := options{backend: "redis", quick: true, seed: 1, json: file, dump: dir}
	if err := runCheck(t.Context(), &out, o); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var rows []checkResult
	if err := json.Unmarshal(text, &rows); err != nil {
		t.Fatal(err)
	}
	if len(rows) != 4 {
		t.Errorf("%d rows, want ours and three others:\n%s", len(rows), out.String())
	}
	for _, r := range rows {
		if len(r.Errors) > 0 || r.Figures.Grants < 100 || r.Figures.Losses == 0 || r.Figures.Faults != len(breakages) {
			t.Errorf("%s: too little was done, or it failed: %+v", r.Peer, r)
		}
		if r.Ours && (len(r.Violations) > 0 || r.Figures.NeverNotified > 0) {
			report, _ := os.ReadFile(filepath.Join(dir, "redis-"+r.Peer, "report.txt"))
			t.Errorf("ours: %v, and %d losses without a notification\n%s", r.Violations, r.Figures.NeverNotified, report)
		}
		if !strings.Contains(out.String(), "| "+r.Peer+" |") {
			t.Errorf("%s has no row:\n%s", r.Peer, out.String())
		}
	}
}
