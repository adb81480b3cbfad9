package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/testfindings"
)

// written is what "go test -json" prints of a fact.
func written(t *testing.T, pkg string, fact any) string {
	t.Helper()
	a := &attribute{TB: t}
	testfindings.Write(a, fact)
	text, err := json.Marshal(map[string]string{
		"Action": "attr", "Package": module + "/" + pkg, "Test": "Test", "Key": a.key, "Value": a.value,
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(text) + "\n"
}

type attribute struct {
	testing.TB
	key, value string
}

func (a *attribute) Attr(key, value string) { a.key, a.value = key, value }

func TestPageSaysWhatTestsWrite(t *testing.T) {
	margin := 6700 * time.Microsecond
	var out strings.Builder
	for _, each := range []struct {
		pkg  string
		fact any
	}{
		{"etcd", testfindings.Clauses{Passed: 99, Failed: 1, Skipped: 2, Inconclusive: 4, NotApplicable: 19}},
		{
			"zookeeper",
			testfindings.ClusterFault{Slug: "overtaken-leader", Rounds: 8, Grants: 1433, Violations: 3, Margin: &margin},
		},
		{"zookeeper", testfindings.ClusterFault{
			Slug: "leader-kill", Rounds: 2, Grants: 17, Recoveries: 2, MedianRecovery: 1150 * time.Millisecond,
			LongestRecovery: 1350 * time.Millisecond,
		}},
		{"redis", testfindings.Soak{
			Driver: "redis", Seed: 7, Took: 30 * time.Second, Faults: 9, Operations: 100, Violations: 1,
			LongestRecovery: 2 * time.Second,
			Kinds:           []testfindings.SoakKind{{Slug: "client-kill", Count: 4, LongestRecovery: 2 * time.Second}},
			Found:           []testfindings.Count{{What: "overlap", Times: 1}},
		}},
		{
			"postgres",
			testfindings.Failover{
				Standby: "lagging", Rounds: 20, Grants: 1275, Losses: 3, Doubled: 2, Overrun: 29 * time.Millisecond,
			},
		},
		{"internal/soak", testfindings.ServerSoak{Faults: 51, Grants: 10356, Violations: 2}},
		{"redlock", testfindings.Rate{Fault: "clock jumps", Times: 7, Rounds: 12}},
		{"conformance", testfindings.Mutant{What: "release does not compare the holder", Killers: "O1 O3"}},
		{"conformance/check", testfindings.Mutant{What: "the same token twice", Killers: "token model"}},
		{"conformance/simulation", testfindings.Simulation{What: "the core", Hours: 1003.2, Text: "512 seeds"}},
	} {
		out.WriteString(written(t, each.pkg, each.fact))
	}
	out.WriteString(`{"Action":"attr","Package":"` + module + `/redis","Key":"else","Value":"x"}` + "\nno JSON\n")
	var f findings
	if err := eachAttribute([]byte(out.String()), f.attribute); err != nil {
		t.Fatal(err)
	}
	text := page(f, stepsOf(settings{soak: 1, rounds: 1}))
	for _, part := range []string{
		"| `overtaken-leader` |", "8, 1433, 6.7 ms, **3**", "2, 17, no loss, **0**", "1.15, 1.35 (2 rounds)",
		"1.35 s", "the core 1003.2 h",
		"99, × 1 set-ups, **3** failed, 4 without a verdict", "2 of 2", "(overlap × 1)", "| 4, 2s |",
		"| clock jumps | 7 of 12 |", "| 51 | 0 | 10356 | 0s | **2** |",
		"| lagging | 20 | 1275 | 3 | **0** | 2 | 29.0 ms |",
		"| check | the same token twice | token model |",
	} {
		if !strings.Contains(text, part) {
			t.Errorf("the page does not say %q:\n%s", part, text)
		}
	}
}

// The section about the soak of the server is written anew without the rest of the page, as often as one likes.
func TestServerSectionIsWrittenAlone(t *testing.T) {
	const rest = "# Reliability\n\nfirst\n" + afterServer + "\n\nlast\n"
	text, err := rest, error(nil)
	for _, faults := range []int{51, 52} {
		section := serverSection(&testfindings.ServerSoak{Faults: faults}, "2026-11-26, commit a")
		if text, err = withServer(text, section); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(text, section+afterServer) || strings.Replace(text, section, "", 1) != rest {
			t.Errorf("the page:\n%s", text)
		}
	}
	if _, err := withServer("# Another page\n", "x"); err == nil {
		t.Error("a page without the section behind it is no error")
	}
}

func TestFactThatIsNotUnderstoodIsAnError(t *testing.T) {
	var f findings
	if err := f.attribute("redis", "fencelock.Soak", `{"Fault":1}`); err == nil {
		t.Error("no error")
	}
}

func TestPageHasTheListOfBugs(t *testing.T) {
	report, err := os.ReadFile("../../docs/RELIABILITY.md")
	if err != nil {
		t.Fatal(err)
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
