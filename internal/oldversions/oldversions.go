// Package oldversions builds programs of earlier versions from the history of this repository, for tests of versions beside
// each other.
package oldversions

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/testtier"
)

// Release is the commit of the previous release.
const Release = "9d2c49a"

// Tree extracts the tree of a commit into a directory of the test. It leaves the test out where there is no such
// history, as in a module's download, unless FENCELOCK_REQUIRE=all.
func Tree(t testing.TB, commit string) (dir string) {
	t.Helper()
	if err := exec.Command("git", "cat-file", "-e", commit+"^{commit}").Run(); err != nil {
		lack := t.Skipf
		if os.Getenv("FENCELOCK_REQUIRE") == "all" {
			lack = t.Fatalf
		}
		lack("%sthere is no git history here with the commit %s: %v", testtier.Mark, commit, err)
	}
	dir = t.TempDir()
	run(t, dir, run(t, top(t), nil, "git", "archive", commit), "tar", "-x")
	return dir
}

// Build builds the package of a tree, such as ./cmd/fencelock, with today's modules, so that it downloads no others.
func Build(t testing.TB, dir, pkg string) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), filepath.Base(pkg))
	run(t, dir, nil, "go", "build", "-buildvcs=false", "-modfile="+filepath.Join(top(t), "go.mod"), "-o", program, pkg)
	return program
}

func top(t testing.TB) string {
	t.Helper()
	return strings.TrimSpace(run(t, "", nil, "git", "rev-parse", "--show-toplevel").String())
}

func run(t testing.TB, dir string, in *bytes.Buffer, name string, args ...string) *bytes.Buffer {
	t.Helper()
	cmd := exec.Command(name, args...)
	var out, failure bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &failure
	if in != nil {
		cmd.Stdin = in
	}
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, failure.Bytes())
	}
	return &out
}
