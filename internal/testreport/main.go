// Command testreport reads the output of `go test -json` and prints the failures and their reasons, in few lines: of a
// test that failed its own messages, not the output of servers and passing tests. So the end of a log shows the
// reason. At the end it lists the skips with their reasons, and the failures that a busy machine excused.
//
// With the argument "packages" it prints the lines of the packages as they come, with "slow" the tests that took longest.
// It exits with 1 if a test failed, if its input was empty, or if more than one test in a hundred, and at least two,
// had no verdict. With "noskip" it does so too if a test was skipped that was neither left out on purpose (package
// internal/testtier) nor without a verdict.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testtier"
)

type event struct {
	Action, Package, Test, Output, ImportPath string
	Elapsed                                   float64 // seconds
}

// telling matches the lines worth a look: a test's own messages, and the end of a program.
var telling = regexp.MustCompile(`^\s+\S+\.go:\d+: |^panic: |WARNING: DATA RACE|^fatal error: |^# |` +
	`^\S+\.go:\d+:\d+: |^goroutine \d+ .*running|^\*\*\* `)

// further matches the lines of a message after the first.
var further = regexp.MustCompile(`^\s{8}`)

// unfair matches messages about failures that the machine may have caused (package internal/stallmeter).
var unfair = regexp.MustCompile(`attempts that failed while the machine stood still|` + stallmeter.Mark)

// ending matches the beginning of the output of a crash: the stacks of all goroutines follow.
var ending = regexp.MustCompile(`^panic: |^fatal error: `)

// packageLine matches the line of go test about a package.
var packageLine = regexp.MustCompile(`^(ok|[?]|FAIL)\s`)

const (
	most    = 6   // messages of a test
	longest = 40  // lines after the first of a message, like the standard error of a process
	widest  = 400 // bytes of a line

	slowest = 60 // tests that are listed
)

// message is one message of a test, with its last lines.
type message struct {
	first   string
	further []string
}

// report is the result of the input.
type report struct {
	out   io.Writer
	asked []string

	said    map[string][]message       // by test
	last    map[string][]string        // by package, any output
	running map[string]map[string]bool // by package, the tests that have begun and not ended
	stacks  map[string]string          // by package, all that a program printed which ended in the middle

	excused          []string
	slow             []event
	tests, undecided int
	failed, skipped  bool
	skips            map[string][]string // tests by the reason
}

func main() {
	ok, err := read(os.Stdin, os.Stdout, os.Args[1:])
	if err != nil {
		fmt.Println("the output of the tests cannot be read:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// read reports whether all is well with the tests in the events of in.
func read(in io.Reader, out io.Writer, asked []string) (ok bool, err error) {
	r := &report{
		out: out, asked: asked,
		said: map[string][]message{}, last: map[string][]string{}, running: map[string]map[string]bool{},
		stacks: map[string]string{}, skips: map[string][]string{},
	}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) == nil {
			r.read(e)
		} else {
			fmt.Fprintln(out, lines.Text()) // of the go command
		}
	}
	r.sum()
	return r.well(), lines.Err()
}

func (r *report) wants(what string) bool { return slices.Contains(r.asked, what) }

// read takes one event. Failures are printed immediately.
func (r *report) read(e event) {
	key := e.Package + e.ImportPath + " " + e.Test
	r.count(e)
	switch e.Action {
	case "output", "build-output":
		r.listen(key, e)
	case "skip":
		if e.Test != "" {
			r.skip(key, r.said[key])
		}
	case "fail", "build-fail":
		r.failed = true
		r.tellFailure(key, e)
	case "pass":
		delete(r.said, key)
	}
}

// place is the source position of a test's message.
var place = regexp.MustCompile(`^\s*\S+\.go:\d+: `)

// skip notes why a test was skipped, which is the last thing that it said.
func (r *report) skip(key string, said []message) {
	reason := "without a word"
	if len(said) > 0 {
		reason = place.ReplaceAllString(strings.TrimSpace(said[len(said)-1].first), "")
	}
	switch {
	case strings.HasPrefix(reason, testtier.Mark):
	case strings.HasPrefix(reason, stallmeter.Mark):
		r.undecided++
		r.tests++
		reason = strings.TrimSpace(stallmeter.Mark) + ": the machine stood still each time"
	default:
		r.skipped = true
	}
	r.skips[reason] = append(r.skips[reason], key)
}

// count notes which tests run, and the duration of the ended ones.
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

// listen keeps a line of output.
func (r *report) listen(key string, e event) {
	lines := append(r.last[e.Package], e.Output)
	r.last[e.Package] = lines[max(0, len(lines)-2*most):]
	if r.stacks[e.Package] != "" || ending.MatchString(e.Output) {
		r.stacks[e.Package] += e.Output
	}
	said := r.said[key]
	switch {
	case telling.MatchString(e.Output):
		r.said[key] = append(said, message{first: e.Output})
	case len(said) > 0 && further.MatchString(e.Output):
		last := &said[len(said)-1]
		last.further = append(last.further[max(0, len(last.further)-longest+1):], e.Output)
	}
	if unfair.MatchString(e.Output) {
		r.excused = append(r.excused, key+"\n"+e.Output)
	}
	if e.Test == "" && packageLine.MatchString(e.Output) && r.wants("packages") {
		fmt.Fprint(r.out, e.Output)
	}
}

func (r *report) tellFailure(key string, e event) {
	fmt.Fprintln(r.out, "FAILED", key)
	said := r.said[key]
	for _, m := range slices.Concat(said[:min(len(said), 1)], tail(said)) {
		for _, line := range append([]string{m.first}, m.further...) {
			fmt.Fprint(r.out, line[:min(len(line), widest)])
			if len(line) > widest {
				fmt.Fprintln(r.out, "…")
			}
		}
	}
	if running := r.running[e.Package]; e.Test == "" && len(running) > 0 { // the program has ended in the middle
		fmt.Fprintln(r.out, "    running were", slices.Sorted(maps.Keys(running)))
		for _, line := range r.last[e.Package] {
			fmt.Fprint(r.out, "    ", line[:min(len(line), widest)])
		}
		for _, stack := range strings.Split(r.stacks[e.Package], "\n\n") {
			if strings.Contains(stack, "_test.go:") { // where a test waits
				fmt.Fprintf(r.out, "%s\n\n", stack)
			}
		}
	}
}

// sum prints the result of all events.
func (r *report) sum() {
	if r.wants("slow") {
		slices.SortFunc(r.slow, func(a, b event) int { return cmp.Compare(b.Elapsed, a.Elapsed) })
		for _, e := range r.slow[:min(len(r.slow), slowest)] {
			fmt.Fprintf(r.out, "%7.1f s  %s %s\n", e.Elapsed, e.Package, e.Test)
		}
	}
	if len(r.excused) > 0 {
		fmt.Fprintf(r.out, "%d failures were excused, since the machine stood still: look whether they return\n%s",
			len(r.excused), strings.Join(r.excused, ""))
	}
	for _, reason := range slices.Sorted(maps.Keys(r.skips)) {
		tests := r.skips[reason]
		fmt.Fprintf(r.out, "SKIPPED %d, %s:\n  %s\n", len(tests), reason, strings.Join(tests, "\n  "))
	}
	fmt.Fprintf(r.out, "%d tests ended, %d of them without a verdict\n", r.tests, r.undecided)
}

// well reports whether the program may exit with 0.
func (r *report) well() bool {
	well := !r.failed && r.tests > 0
	if r.tests == 0 {
		fmt.Fprintln(r.out, "no test ended")
	}
	if stallmeter.TooMany(r.undecided, r.tests) {
		fmt.Fprintln(r.out, "too many tests are without a verdict: run them on a machine that is less busy")
		well = false
	}
	if r.skipped && r.wants("noskip") {
		fmt.Fprintln(r.out, "tests were skipped although FENCELOCK_REQUIRE=all")
		well = false
	}
	return well
}

// tail is the last messages but the first.
func tail(said []message) []message {
	if len(said) < 2 {
		return nil
	}
	return said[max(1, len(said)-most):]
}
