// Package testtier selects the tests that run at each of three speeds.
//
//	make quick      go test -short, some packages: every save; ten seconds
//	go test ./...   every change, and the CI; five minutes
//	make deep       FENCELOCK_DEEP=1: before an issue is closed, and every night; three quarters of an hour
//
// A test that is left out is a skip with a message that begins with Mark. The CI lists these, and takes no other skip.
package testtier

import (
	"flag"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// Env is the variable that asks for everything: clusters that are broken, soaks, long simulations, mutants in real
// time.
const Env = "FENCELOCK_DEEP"

// Mark is the beginning of the messages of tests that are left out.
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

// Some returns nil, for all, if everything is to run. Otherwise it leaves the rest out, which a subtest says, and
// returns some.
func Some(t *testing.T, some ...string) []string {
	t.Helper()
	if Wanted() {
		return nil
	}
	t.Run("the-rest", func(t *testing.T) {
		t.Skip(Mark + "make deep runs it (" + Env + "=1): all but " + strings.Join(some, ", "))
	})
	return some
}

// NotShort leaves the test out with -short.
func NotShort(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip(Mark + "-short")
	}
}

// Rounds returns few, and all if everything is to run.
func Rounds(few, all int) int {
	if Wanted() {
		return all
	}
	return few
}

// Wide lets n tests that call t.Parallel run side by side, or as many as -parallel says. Go's default is the number of
// processors, which is far too few for tests that wait for servers, and n may be far too many for servers that share few
// processors: it is three times their number at most. It is for TestMain. If everything is to run it is half as many: the
// suites are longer, and the race detector takes its share.
func Wide(n int) {
	n = min(n, 3*runtime.NumCPU())
	if Wanted() {
		n /= 2
	}
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		_ = flag.Set("test.parallel", strconv.Itoa(max(n, runtime.GOMAXPROCS(0))))
	}
}
