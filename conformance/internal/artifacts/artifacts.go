// Package artifacts finds the folder for the artifacts of a failed test.
package artifacts

import (
	"flag"
	"os"
	"testing"
)

// Kept reports whether go test keeps the artifact folders of tests: -artifacts.
func Kept() bool {
	f := flag.Lookup("test.artifacts")
	return f != nil && f.Value.String() == "true"
}

// Dir returns the artifact folder of the test if go test keeps artifacts, and otherwise a new folder that is kept,
// with what in its name.
func Dir(t testing.TB, what string) (string, error) {
	if Kept() {
		return t.ArtifactDir(), nil
	}
	return os.MkdirTemp("", "fencelock-"+what+"-")
}
