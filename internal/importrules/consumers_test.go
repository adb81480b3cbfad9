package importrules

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// consumers says what a module that uses one driver may come to: the lines of its go.sum and the modules that it selects.
// A larger number is a decision: each module that the root requires sets a minimum version for its users. See
// docs/decisions/2026-11-27-drivers-and-server-share-a-module.md.
var consumers = map[string]struct{ sums, modules int }{
	"redis":     {45, 80},
	"redlock":   {45, 80},
	"etcd":      {80, 125},
	"zookeeper": {25, 76},
	"postgres":  {50, 84},
	"builtin":   {90, 110},
}

// TestConsumers makes a module that uses one driver, and counts what it downloads. It asks the module proxy for go.mod
// files that are not in the module cache.
func TestConsumers(t *testing.T) {
	root := output(t, ".", "go", "list", "-m", "-f", "{{.Dir}}", module)
	for driver, most := range consumers {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			write := func(name, text string) {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			write("go.mod", "module example.com/consumer\n\ngo 1.26.0\n\nrequire "+module+" v0.1.0\n\nreplace "+module+
				" => "+root+"\n")
			write("main.go", "package main\n\nimport (\n\t_ \""+module+"\"\n\t_ \""+module+"/"+driver+
				"\"\n)\n\nfunc main() {}\n")
			output(t, dir, "go", "mod", "tidy")
			sums, err := os.ReadFile(filepath.Join(dir, "go.sum"))
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Count(string(sums), "\n")
			modules := 1 + strings.Count(output(t, dir, "go", "list", "-m", "all"), "\n")
			t.Logf("go.sum has %d lines, %d modules", lines, modules)
			if lines > most.sums || modules > most.modules {
				t.Errorf("go.sum has %d lines, at most %d; %d modules, at most %d", lines, most.sums, modules, most.modules)
			}
			for line := range strings.Lines(string(sums)) {
				if hasPrefix(line, testcontainers) {
					t.Errorf("go.sum has %s", line)
				}
			}
		})
	}
}

func output(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	for _, offline := range []string{"dial tcp", "i/o timeout", "module lookup disabled"} {
		if err != nil && strings.Contains(stderr.String(), offline) {
			t.Skipf("NEEDS A MODULE PROXY, or a module cache with all that it asks for: %s", &stderr)
		}
	}
	if err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, &stderr)
	}
	return strings.TrimSpace(string(out))
}
