// Command failed reads what `go test -json` printed and tells what failed and why, in few lines: of a test that failed
// its own messages, not what servers and passing tests said meanwhile. Whoever sees the end of a log sees the reason.
// It lists what was left out on purpose (package internal/deep), the failures that a busy machine excused, with the
// argument "slow" the tests that took longest, and with "packages" the lines of the packages. With "noskip" it exits
// with 1 if something else was skipped, or if more than one test in a hundred had no verdict.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/fencelock/fencelock/internal/deep"
)

type event struct {
	Action, Package, Test, Output, ImportPath string
	Elapsed                                   float64 // seconds
}

// telling are the lines worth a look: what a test says of itself, and what ends a program.
var telling = regexp.MustCompile(`^\s+\S+\.go:\d+: |^panic: |WARNING: DATA RACE|^fatal error: |^# |` +
	`^\S+\.go:\d+:\d+: |^goroutine \d+ .*running|^\*\*\* `)

// unfair is what tests say of failures that the machine may have caused (package internal/stall).
var unfair = regexp.MustCompile(`attempts that failed while the machine stood still|INCONCLUSIVE`)

// noVerdict is what a test says that the machine left without one: two spaces, unlike in summaries.
var noVerdict = regexp.MustCompile(`INCONCLUSIVE  `)

// ending begins what a program prints that ends in the middle: the stacks of all goroutines follow.
var ending = regexp.MustCompile(`^panic: |^fatal error: `)

// packageLine is what go test says of a package.
var packageLine = regexp.MustCompile(`^(ok|[?]|FAIL)\s`)

const (
	most   = 6   // lines of a test
	widest = 400 // bytes of a line

	slowest = 60 // tests that are listed
)

// report is what was read.
type report struct {
	said    map[string][]string        // by test
	last    map[string][]string        // by package, whatever it said
	running map[string]map[string]bool // by package, the tests that have begun and not ended
	stacks  map[string]string          // by package, all that a program printed which ended in the middle

	left, packages, excused []string
	slow                    []event
	tests, undecided        int
	skipped                 bool
}

func main() {
	r := &report{
		said: map[string][]string{}, last: map[string][]string{}, running: map[string]map[string]bool{},
		stacks: map[string]string{},
	}
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var e event
		if json.Unmarshal(in.Bytes(), &e) == nil {
			r.read(e)
		}
	}
	if err := in.Err(); err != nil {
		fmt.Println("the output of the tests cannot be read:", err)
		os.Exit(1)
	}
	r.sum()
}

// read takes one event. Skips and failures are told at once.
func (r *report) read(e event) {
	key := e.Package + e.ImportPath + " " + e.Test
	r.count(e)
	switch e.Action {
	case "output", "build-output":
		r.listen(key, e)
	case "skip":
		switch {
		case e.Test == "":
		case slices.ContainsFunc(r.said[key], func(line string) bool { return strings.Contains(line, ": "+deep.Mark) }):
			r.left = append(r.left, key)
		default:
			r.skipped = true
			fmt.Println("SKIPPED", key)
			for _, line := range r.said[key] {
				fmt.Print(line)
			}
		}
	case "fail", "build-fail":
		r.tellFailure(key, e)
	case "pass":
		delete(r.said, key)
	}
}

// count notes which tests run, and how long those took that have ended.
func (r *report) count(e event) {
	ended := e.Action == "pass" || e.Action == "fail"
	if ended {
		r.tests++
		if strings.Count(e.Test, "/") <= 1 {
			r.slow = append(r.slow, e)
		}
	}
	switch {
	case e.Test == "":
	case e.Action == "run":
		if r.running[e.Package] == nil {
			r.running[e.Package] = map[string]bool{}
		}
		r.running[e.Package][e.Test] = true
	case ended || e.Action == "skip":
		delete(r.running[e.Package], e.Test)
	}
}

// listen keeps what a line says.
func (r *report) listen(key string, e event) {
	lines := append(r.last[e.Package], e.Output)
	r.last[e.Package] = lines[max(0, len(lines)-2*most):]
	if r.stacks[e.Package] != "" || ending.MatchString(e.Output) {
		r.stacks[e.Package] += e.Output
	}
	if telling.MatchString(e.Output) {
		r.said[key] = append(r.said[key], e.Output)
	}
	if noVerdict.MatchString(e.Output) {
		r.undecided++
	}
	if unfair.MatchString(e.Output) {
		r.excused = append(r.excused, key+"\n"+e.Output)
	}
	if e.Test == "" && packageLine.MatchString(e.Output) {
		r.packages = append(r.packages, e.Output)
	}
}

func (r *report) tellFailure(key string, e event) {
	fmt.Println("FAILED", key)
	said := r.said[key]
	for _, line := range slices.Concat(said[:min(len(said), 1)], tail(said)) {
		fmt.Print(line[:min(len(line), widest)])
		if len(line) > widest {
			fmt.Println("…")
		}
	}
	if running := r.running[e.Package]; e.Test == "" && len(running) > 0 { // the program has ended in the middle
		fmt.Println("    running were", slices.Sorted(maps.Keys(running)))
		for _, line := range r.last[e.Package] {
			fmt.Print("    ", line[:min(len(line), widest)])
		}
		for _, stack := range strings.Split(r.stacks[e.Package], "\n\n") {
			if strings.Contains(stack, "_test.go:") { // where a test waits
				fmt.Printf("%s\n\n", stack)
			}
		}
	}
}

// sum tells what all events together say, and ends the program with 1 if that is bad.
func (r *report) sum() {
	asked := func(what string) bool { return slices.Contains(os.Args, what) }
	if len(r.left) > 0 {
		fmt.Printf("%d tests were left out, here or for make deep:\n  %s\n", len(r.left), strings.Join(r.left, "\n  "))
	}
	if len(r.excused) > 0 {
		fmt.Printf("%d failures were excused, since the machine stood still: look whether they return\n%s",
			len(r.excused), strings.Join(r.excused, ""))
	}
	if asked("packages") {
		slices.Sort(r.packages)
		fmt.Print(strings.Join(r.packages, ""))
	}
	if asked("slow") {
		slices.SortFunc(r.slow, func(a, b event) int { return cmp.Compare(b.Elapsed, a.Elapsed) })
		for _, e := range r.slow[:min(len(r.slow), slowest)] {
			fmt.Printf("%7.1f s  %s %s\n", e.Elapsed, e.Package, e.Test)
		}
	}
	bad := false
	if r.undecided > 0 {
		fmt.Printf("%d of %d tests have no verdict, since the machine stood still each time\n", r.undecided, r.tests)
		if bad = r.undecided*100 > r.tests; bad && asked("noskip") {
			fmt.Println("that is too many: run them on a machine that is less busy")
		}
	}
	if r.skipped && asked("noskip") {
		fmt.Println("tests were skipped although FENCELOCK_REQUIRE=all")
	}
	if (bad || r.skipped) && asked("noskip") {
		os.Exit(1)
	}
}

// tail is the last lines but the first.
func tail(lines []string) []string {
	if len(lines) < 2 {
		return nil
	}
	return lines[max(1, len(lines)-most):]
}
