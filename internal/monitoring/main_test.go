package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/metrics"
)

const root = "../.."

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// What is generated is what the tree has.
func TestGenerated(t *testing.T) {
	for file, want := range files(root) {
		if read(t, file) != string(want) {
			t.Errorf("%s is out of date: go run ./internal/monitoring", file)
		}
	}
}

// exported returns the names of all series that something exports. Those of clients are in the page, which a test of
// module observe compares with the observers.
func exported(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{"process_start_time_seconds": true, "process_resident_memory_bytes": true}
	add := func(name string, histogram bool) {
		names[name] = true
		for _, suffix := range []string{"_bucket", "_count", "_sum"} {
			names[name+suffix] = histogram
		}
	}
	for _, m := range metrics.All() {
		add(m.Name, m.Type == metrics.Histogram)
	}
	for _, m := range regexp.MustCompile("\\| `(fencelock_client_[a-z_]+)`").FindAllStringSubmatch(read(t, page), -1) {
		add(m[1], strings.HasSuffix(m[1], "_duration_seconds"))
	}
	return names
}

var (
	series = regexp.MustCompile(`\b(?:fencelock|process|go)_[a-z_]+`)
	label  = regexp.MustCompile(`\b(kind|outcome|waited|end|limit|use)="([a-z-]+)"`)
	alert  = regexp.MustCompile(`- alert: (\w+)`)
)

// Every metric and label value of a rule, of its test and of a panel is exported.
func TestMonitoredMetricsAreExported(t *testing.T) {
	names, values := exported(t), map[string]bool{}
	for _, m := range metrics.All() {
		for label, all := range m.Values {
			for _, v := range all {
				values[label+"="+v] = true
			}
		}
	}
	var texts []string
	for line := range strings.Lines(read(t, "deploy/monitoring/alerts.yaml")) {
		if !strings.Contains(line, "summary:") && !strings.Contains(line, "name:") {
			texts = append(texts, line)
		}
	}
	texts = append(texts, read(t, "deploy/monitoring/alerts_test.yaml"))
	for _, r := range rows {
		for _, p := range r.panels {
			for _, q := range p.queries {
				texts = append(texts, q[0])
			}
		}
	}
	seen := 0
	for _, text := range texts {
		for _, name := range series.FindAllString(text, -1) {
			if seen++; !names[name] {
				t.Errorf("%s is used, and nothing exports it", name)
			}
		}
		for _, l := range label.FindAllStringSubmatch(text, -1) {
			if !values[l[1]+"="+l[2]] {
				t.Errorf("no metric has the label %s", l[0])
			}
		}
	}
	if seen == 0 {
		t.Error("no metric was found")
	}
}

// Rules and panels add up the gauges of a cluster for each leader, never over the leaders, of which there are two while the
// leader changes.
func TestClustersAreNotCountedTwice(t *testing.T) {
	gauges := map[string]bool{}
	for _, m := range metrics.All() {
		if m.Where == metrics.Leader && m.Type == metrics.Gauge {
			gauges[m.Name] = true
		}
	}
	sum := regexp.MustCompile(`sum(?: by \(([a-z, ]*)\))? ?\((\w+)`)
	texts := []string{read(t, "deploy/monitoring/alerts.yaml")}
	for _, r := range rows {
		for _, p := range r.panels {
			for _, q := range p.queries {
				texts = append(texts, q[0])
			}
		}
	}
	seen := 0
	for _, text := range texts {
		for _, m := range sum.FindAllStringSubmatch(text, -1) {
			if !gauges[m[2]] {
				continue
			}
			if seen++; !slices.Contains(strings.Split(m[1], ", "), "leader") {
				t.Errorf("%s adds up leaders", m[0])
			}
		}
	}
	if seen == 0 {
		t.Error("no sum was found")
	}
}

// Every alert has a section of the runbooks, and a test in which it fires and one in which it does not.
func TestAlertsAreComplete(t *testing.T) {
	books, tests := read(t, "docs/RUNBOOKS.md"), read(t, "deploy/monitoring/alerts_test.yaml")
	var names []string
	for _, m := range alert.FindAllStringSubmatch(read(t, "deploy/monitoring/alerts.yaml"), -1) {
		names = append(names, m[1])
		if !strings.Contains(books, "\n## "+m[1]+"\n") {
			t.Errorf("docs/RUNBOOKS.md has no section %s", m[1])
		}
		fires := strings.Contains(tests, fmt.Sprintf("alertname: %s, exp_alerts: [\n", m[1]))
		quiet := strings.Contains(tests, fmt.Sprintf("alertname: %s, exp_alerts: []", m[1]))
		if !fires || !quiet {
			t.Errorf("%s: tested where it fires %t, and where all is well %t", m[1], fires, quiet)
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^## (\w+)$`).FindAllStringSubmatch(books, -1) {
		if !slices.Contains(names, m[1]) {
			t.Errorf("docs/RUNBOOKS.md has a section %s without an alert", m[1])
		}
	}
}

// The rules do what their tests say.
func TestRules(t *testing.T) {
	if _, err := exec.LookPath("promtool"); err != nil {
		if os.Getenv("FENCELOCK_REQUIRE") == "all" {
			t.Fatal("promtool is required: apt-get install prometheus")
		}
		t.Skip("promtool is not installed: apt-get install prometheus")
	}
	cmd := exec.Command("promtool", "test", "rules", "alerts_test.yaml")
	cmd.Dir = filepath.Join(root, "deploy/monitoring")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// The table of requirements names tests, metrics, panels and alerts that exist.
func TestEvidenceNamesWhatExists(t *testing.T) {
	_, text, found := strings.Cut(read(t, page), "| requirement |")
	if !found {
		t.Fatal("the page has no table of requirements")
	}
	text, _, _ = strings.Cut(text, "\n\n")
	tests, names, titles := testsOfTree(t), exported(t), map[string]bool{}
	for _, r := range rows {
		for _, p := range r.panels {
			titles[p.title] = true
		}
	}
	rules := read(t, "deploy/monitoring/alerts.yaml")
	lines := strings.Split(text, "\n")[2:] // without the titles of the columns
	for _, line := range lines {
		cells := strings.Split(line, "|")
		if len(cells) != 6 {
			t.Fatalf("%d cells: %s", len(cells)-2, line)
		}
		shown := regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(cells[4], -1)
		if len(shown) == 0 {
			t.Errorf("no test shows %s", cells[1])
		}
		for _, m := range shown {
			if !tests[m[1]] {
				t.Errorf("%s: there is no %s", cells[1], m[1])
			}
		}
		family := ""
		for _, m := range regexp.MustCompile("`(fencelock_[a-z]+_|…_)([a-z_]+)").FindAllStringSubmatch(cells[2], -1) {
			if m[1] != "…_" {
				family = m[1]
			} else if family == "" {
				family = "fencelock_server_"
			}
			if !names[family+m[2]] {
				t.Errorf("%s: nothing exports %s", cells[1], family+m[2])
			}
		}
		for _, m := range regexp.MustCompile(`"([A-Z][^"]+)"`).FindAllStringSubmatch(cells[2], -1) {
			if !titles[m[1]] {
				t.Errorf("%s: the dashboard has no panel %q", cells[1], m[1])
			}
		}
		for _, m := range regexp.MustCompile(`(?:Fencelock|…)([A-Z]\w+)`).FindAllStringSubmatch(cells[3], -1) {
			if !strings.Contains(rules, "- alert: Fencelock"+m[1]+"\n") {
				t.Errorf("%s: there is no alert Fencelock%s", cells[1], m[1])
			}
		}
	}
	if len(lines) < 10 {
		t.Errorf("%d rows, want those of the whole table", len(lines))
	}
}

// testsOfTree returns the names of all tests in the repository.
func testsOfTree(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	err := filepath.WalkDir(root, func(file string, _ os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		text, err := os.ReadFile(file)
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(text, -1) {
			names[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
