package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// What the tests print today must be understood. These lines are copies; a run of the report fails if they have changed.
func TestLinesAreUnderstood(t *testing.T) {
	var f findings
	for _, l := range []struct{ pkg, text string }{
		{"etcd", "    conformance_test.go:50: 99 clauses passed, 1 failed, 2 skipped, 19 not applicable"},
		{"zookeeper", "    cluster.go:180: overtaken-leader: 8 rounds in 1m15s, 1433 grants, 31 lost, 64 confirmed by the service, " +
			"shortest time from a loss to the rival 6.7 ms, 46 late writes refused, contexts up to 11.2 ms after the deadline, " +
			"map[acquire:161] failed, overlap 0.0 ms, 3 violations"},
		{"zookeeper", "    cluster.go:180: leader-kill: 2 rounds in 9s, 17 grants, 0 lost, 6 confirmed by the service, no loss was followed by a rival, " +
			"0 late writes refused, contexts up to 0.0 ms after the deadline, map[] failed, overlap 0.5 ms, 0 violations"},
		{"zookeeper", "    cluster.go:183: leader-kill: the locks went on after 1.15 s in the median of 2, 1.25 s in 95 of 100, 1.35 s at most"},
		{"redis", "    nemesis.go:99: soak: driver=redis seed=7 duration=30.1s steps=5/6 faults=9 operations=100 grants=80 losses=3 unknown=2 violations=1 " +
			"worst margin=12.5ms told before=2 after=1 never=0 overlaps=1 overlap max=3ms late context max=1ms recovery max=2.5s search=3ms"},
		{"redis", "        soak: driver=redis fault=client-kill count=4 recovery median=1s max=2s violated=1 others went on median=3s max=4s"},
		{"redis", `        soak: driver=redis violation="overlap" count=1`},
		{"redlock", "    violation_test.go:77: clock jumps past the TTL on 1 server,  holder had 3 votes                7 of 12   (58 %)"},
		{"conformance", "        release does not look who asks                           killed by O1 O3"},
		{"conformance/check", "        the same token twice                                     [token model]"},
		{"conformance/simulation", "    simulation_test.go:120: simulation: 1003.2 h, 512 seeds, 5 operations, 0 violations"},
	} {
		if err := f.line(l.pkg, l.text); err != nil {
			t.Errorf("%q: %v", l.text, err)
		}
	}
	if c := f.clauses["etcd"]; len(c) != 1 || c[0] != (clauses{99, 1, 2, 19}) {
		t.Errorf("clauses %v", f.clauses)
	}
	want := clusterFault{driver: "zookeeper", slug: "overtaken-leader", rounds: 8, grants: 1433, lost: 31, confirmed: 64, margin: "6.7", violations: 3}
	if len(f.faults) != 2 || f.faults[0] != want || f.faults[1].margin != "" || f.faults[1].overlap != 0.5 {
		t.Errorf("faults %+v", f.faults)
	}
	if r := f.recoveries["zookeeper"]["leader-kill"]; r != (recovery{"1.15", "1.35", 2}) {
		t.Errorf("recoveries %+v", f.recoveries)
	}
	if len(f.soaks) != 1 || f.soaks[0].values["faults"] != "9" || f.soaks[0].values["worst margin"] != "12.5ms" ||
		f.soaks[0].values["recovery max"] != "2.5s" || len(f.soaks[0].kinds) != 1 || len(f.soaks[0].found) != 1 {
		t.Fatalf("soaks %+v", f.soaks)
	}
	k := f.soaks[0].kinds[0].values
	if k["count"] != "4" || k["recovery max"] != "2s" || k["others went on max"] != "4s" || k["violated"] != "1" {
		t.Errorf("kind %+v", k)
	}
	if len(f.violations) != 1 || f.violations[0].times != 7 || f.violations[0].rounds != 12 {
		t.Errorf("violations %+v", f.violations)
	}
	if len(f.mutants) != 2 || f.mutants[0].killers != "O1 O3" || f.mutants[1].killers != "token model" || f.mutants[1].suite != "check" {
		t.Errorf("mutants %+v", f.mutants)
	}
	text := page(f, stepsOf(settings{soak: 1, rounds: 1}))
	for _, part := range []string{"| `overtaken-leader` |", "8, 1433, 6.7 ms, **3**", "the core 1003.2 h", "2 of 2", "overlap × 1"} {
		if !strings.Contains(text, part) {
			t.Errorf("the page does not say %q:\n%s", part, text)
		}
	}
}

// A kind of fault before any run is no finding.
func TestLineWithoutItsRunIsAnError(t *testing.T) {
	var f findings
	if err := f.line("redis", "soak: driver=redis fault=client-kill count=4"); err == nil {
		t.Error("no error")
	}
}

// The head in the README is that of the page.
func TestReadmeShowsTheHead(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	report, err := os.ReadFile("../../docs/RELIABILITY.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(readme), begin)
	shown, _, found := strings.Cut(rest, end)
	if !found || !strings.Contains(string(report), shown) {
		t.Error("the head of the report in README.md is not the one of docs/RELIABILITY.md: run make report")
	}
	if !strings.Contains(string(report), bugs) {
		t.Error("docs/RELIABILITY.md has not the list of bugs.md: run make report FROM=…")
	}
}

// Every command in the list of bugs runs a test that is there.
func TestBugsNameTests(t *testing.T) {
	commands := regexp.MustCompile("`go test -run '([^']+)' (\\S+)`").FindAllStringSubmatch(bugs, -1)
	if len(commands) < 10 {
		t.Fatalf("only %d commands", len(commands))
	}
	for _, c := range commands {
		files, err := filepath.Glob(filepath.Join("../..", c[2], "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Errorf("%s: no tests: %v", c[0], err)
		}
		var source strings.Builder
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			source.Write(text)
		}
		for name := range strings.SplitSeq(strings.ReplaceAll(c[1], `\|`, "|"), "|") {
			name, _, _ = strings.Cut(strings.Trim(name, "^$"), "/")
			name = strings.TrimSuffix(name, "$")
			if !regexp.MustCompile(`func ` + name + `\w*\(t \*testing`).MatchString(source.String()) {
				t.Errorf("%s: there is no such test", c[0])
			}
		}
	}
}
