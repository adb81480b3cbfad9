package conformance_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance"
)

// docs/MECHANISMS.md names what exists: files, identifiers that they declare, clauses, and tests of the same package.
// Every file of a package that it covers has a line.
func TestMechanismsNameWhatExists(t *testing.T) {
	const root = ".."
	text, err := os.ReadFile(filepath.Join(root, "docs", "MECHANISMS.md"))
	if err != nil {
		t.Fatal(err)
	}
	clauses := map[string]bool{}
	for _, c := range conformance.Clauses() {
		clauses[c.ID] = true
	}
	packages := strings.Split(string(text), "\n## ")[1:]
	if len(packages) < 2 {
		t.Fatalf("%d packages, want those that are on the engine", len(packages))
	}
	for _, section := range packages {
		pkg, table, _ := strings.Cut(section, "\n")
		t.Run(strings.ReplaceAll(pkg, "/", "-"), func(t *testing.T) {
			files, tests := sources(t, filepath.Join(root, pkg))
			for _, row := range regexp.MustCompile(`(?m)^\|(.+)\|(.+)\|(.+)\|$`).FindAllStringSubmatch(table, -1)[1:] {
				checkMechanism(t, row, files, tests, clauses)
			}
			for file := range files {
				if !strings.Contains(table, "`"+file+"`") {
					t.Errorf("no mechanism is in %s", file)
				}
			}
		})
	}
}

// sources returns the files of a package without those that have a package comment only, and the text of its tests.
func sources(t *testing.T, dir string) (files map[string]string, tests string) {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(all) == 0 {
		t.Fatalf("no files in %s: %v", dir, err)
	}
	files = map[string]string{}
	for _, path := range all {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		switch name := filepath.Base(path); {
		case strings.HasSuffix(name, "_test.go"):
			tests += string(text)
		case name != "doc.go":
			files[name] = string(text)
		}
	}
	return files, tests
}

func checkMechanism(t *testing.T, row []string, files map[string]string, tests string, clauses map[string]bool) {
	t.Helper()
	what, where, paid := strings.TrimSpace(row[1]), row[2], row[3]
	if strings.Trim(what, "-") == "" {
		return
	}
	source := ""
	for _, code := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(where, -1) {
		name := code[1]
		if strings.HasSuffix(name, ".go") {
			if source = files[name]; source == "" {
				t.Errorf("%s: there is no file %s", what, name)
			}
			continue
		}
		declared := regexp.MustCompile(`(?m)^(?:func (?:\([^)]*\) )?|type |var |\t)` + regexp.QuoteMeta(name) + `\b`)
		if !declared.MatchString(source) {
			t.Errorf("%s: %s is not declared there", what, name)
		}
	}
	ids := regexp.MustCompile(`\b[A-Z][0-9]+\b`).FindAllString(paid, -1)
	for _, id := range ids {
		if !clauses[id] {
			t.Errorf("%s: there is no clause %s", what, id)
		}
	}
	names := regexp.MustCompile(`\bTest\w+`).FindAllString(paid, -1)
	for _, name := range names {
		if !strings.Contains(tests, "func "+name+"(") {
			t.Errorf("%s: there is no test %s", what, name)
		}
	}
	if len(ids)+len(names) == 0 {
		t.Errorf("%s: no clause and no test pays for it", what)
	}
}
