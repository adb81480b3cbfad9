package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	_ "github.com/fencelock/fencelock/backend/memory" // for tests of behaviour that all backends share
)

// The program has no backend that excludes nobody: two of its processes would both hold a lock of the memory driver.
func TestTheProgramHasNoMemoryBackend(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "fencelock")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, args := range [][]string{
		{"run", "--backend", "memory://", "--name", "x", "--", "true"},
		{"run", "--backend", "memory://shared", "--tier", "correctness", "--name", "x", "--", "true"},
		{"ls", "--backend", "memory://"},
		{"holder", "--backend", "memory://", "x"},
	} {
		out, err := exec.Command(program, args...).CombinedOutput()
		if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != exitUsage ||
			!strings.Contains(string(out), "do not exclude other processes") {
			t.Errorf("%v: %v: %s", args, err, out)
		}
	}
}
