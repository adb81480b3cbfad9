// Package deep says which tests run at which of three speeds.
//
//	make quick      go test -short, some packages: every save; ten seconds
//	go test ./...   every change, and the CI; five minutes
//	make deep       FENCELOCK_DEEP=1: before an issue is closed, and every night; three quarters of an hour
//
// A test that is left out is a skip whose message begins with Mark. The CI lists these, and takes no other skip.
package deep

import (
	"os"
	"testing"
)

// Env is the variable that asks for everything: clusters that are broken, soaks, long simulations, mutants in real time.
const Env = "FENCELOCK_DEEP"

// Mark is how the messages of tests that are left out begin.
const Mark = "left out: "

// Wanted reports whether everything is to run.
func Wanted() bool { return os.Getenv(Env) != "" }

// Only leaves the test out, unless everything is to run.
func Only(t testing.TB) {
	t.Helper()
	if !Wanted() {
		t.Skip(Mark + "make deep runs it (" + Env + "=1)")
	}
}

// NotShort leaves the test out with -short.
func NotShort(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip(Mark + "-short")
	}
}
