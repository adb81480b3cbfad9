// Package golden compares the guards' requests to their stores with files in fencing/testdata, so that a change of the
// protocol is seen in review. docs/FENCING-SPEC.md explains the files. To rewrite them:
//
//	go test ./fencing/... -run Golden -update
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "write the files in fencing/testdata anew")

// Compare is an error of the test unless the file holds the text.
func Compare(t testing.TB, name, text string) {
	t.Helper()
	dir, err := os.Getwd()
	for err == nil && filepath.Base(dir) != "fencing" {
		if dir == filepath.Dir(dir) {
			t.Fatal("golden: the test is not in the folder fencing")
		}
		dir = filepath.Dir(dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil { //nolint:gosec // a file of the repository
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if text != string(want) {
		t.Errorf("%s is not what is said now; if that is meant, go test ./fencing/... -run Golden -update. Now:\n%s",
			path, text)
	}
}
