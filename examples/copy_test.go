// Package examples_test copies the examples into another module, as their readers do.
package examples_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// printed is what each example prints that needs no lock service, nor arguments.
var printed = map[string]string{
	"cache":       "page front, built at",
	"cron":        "report of",
	"election":    "schedules job 3",
	"first":       "alone with accounts/42",
	"httpservice": "wrote /documents/7",
	"migration":   "step 2",
	"permits":     "rendering 19",
	"quickstart":  "stale",
	"transfer":    "ann paid 30 to bob",
	"webhook":     "booked payments/77\n200 OK\n200 OK",
	"workers":     "converted c.raw",
}

// others are the examples that do not run alone, and the folders that are no examples to copy: the stories share a
// package, the lockers are a module, and tasks contains the code of docs/tasks.
var others = []string{"lockers", "members", "newdriver", "stories", "tasks"}

// Each example compiles outside of this repository and prints what it should.
func TestCopiesCompileAndRun(t *testing.T) {
	t.Parallel()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	folders, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, folder := range folders {
		name := folder.Name()
		if !folder.IsDir() || name == "stories" || name == "lockers" || name == "tasks" {
			continue
		}
		if printed[name] == "" && !slices.Contains(others, name) {
			t.Errorf("examples/%s is new: enter it in this test", name)
		}
		copySource(t, name, filepath.Join(dir, name))
	}
	const module = "github.com/fencelock/fencelock"
	mod := strings.Replace(string(read(t, "../go.mod")), "module "+module, "module example.com/copied", 1)
	mod += "\nrequire " + module + " v0.0.0\n\nreplace " + module + " => " + root + "\n"
	write(t, filepath.Join(dir, "go.mod"), []byte(mod))
	write(t, filepath.Join(dir, "go.sum"), read(t, "../go.sum"))
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-s -w", "-o", "bin/", "./...")
	build.Dir = dir
	// The module cache has everything, since the test itself was built from it.
	build.Env = append(os.Environ(), "GOWORK=off", "GOPROXY=off", "GOFLAGS="+os.Getenv("GOFLAGS")+" -mod=mod")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("the copies do not compile: %v\n%s", err, out)
	}
	for name, want := range printed {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := exec.CommandContext(t.Context(), filepath.Join(dir, "bin", name))
			run.Dir = t.TempDir()
			if out, err := run.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%v; want %q in:\n%s", err, want, out)
			}
		})
	}
}

// copySource copies the Go files of a folder that are no tests.
func copySource(t *testing.T, from, to string) {
	t.Helper()
	err := filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		write(t, filepath.Join(to, strings.TrimPrefix(path, from)), read(t, path))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func write(t *testing.T, path string, text []byte) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(path), 0o700)
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}
