// Package mutate shows that tests can fail: it breaks one file of a package, and wants a test to fail.
package mutate

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Source returns the content of a file with text replaced by instead. It fails the test unless the file has the text
// once.
func Source(t *testing.T, file, text, instead string) string {
	t.Helper()
	source, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(source), text); n != 1 {
		t.Fatalf("%s has the text %q %d times, want once", file, text, n)
	}
	return strings.Replace(string(source), text, instead, 1)
}

// maxRuns bounds the runs of a mutant under which clauses of the suite were inconclusive.
const maxRuns = 3

// Test runs the tests of a package with the content of a file replaced, and returns their output. It is an error if
// they pass. They run again, up to maxRuns times in all, if they pass because a busy machine kept a clause of the suite
// from a verdict. args are arguments of "go test" before the package.
func Test(t *testing.T, file, source, pkg string, args ...string) string {
	t.Helper()
	dir := t.TempDir()
	path, err := filepath.Abs(file)
	if err != nil {
		t.Fatal(err)
	}
	broken, overlay := filepath.Join(dir, filepath.Base(file)), filepath.Join(dir, "overlay.json")
	text, err := json.Marshal(map[string]map[string]string{"Replace": {path: broken}})
	if err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string][]byte{broken: []byte(source), overlay: text} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args = append(append([]string{"test", "-count=1", "-v", "-overlay", overlay}, args...), pkg)
	var out []byte
	for range maxRuns {
		if out, err = exec.CommandContext(t.Context(), "go", args...).CombinedOutput(); err != nil {
			return string(out)
		}
		if !strings.Contains(string(out), "INCONCLUSIVE") {
			break
		}
	}
	t.Errorf("this mutant survives")
	return string(out)
}
