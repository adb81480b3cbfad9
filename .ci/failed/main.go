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
var telling = regexp.MustCompile(`^\s+\S+\.go:\d+: |^panic: |WARNING: DATA RACE|^fatal error: |^# |^\S+\.go:\d+:\d+: |^goroutine \d+ .*running|^\*\*\* `)

// unfair is what tests say of failures that the machine may have caused (package internal/stall).
var unfair = regexp.MustCompile(`attempts that failed while the machine stood still|INCONCLUSIVE`)

// noVerdict is what a test says that the machine left without one: two spaces, unlike in summaries.
var noVerdict = regexp.MustCompile(`INCONCLUSIVE  `)

// packageLine is what go test says of a package.
var packageLine = regexp.MustCompile(`^(ok|[?]|FAIL)\s`)

const (
	most   = 6   // lines of a test
	widest = 400 // bytes of a line

	slowest = 60 // tests that are listed
)

func main() {
	said := map[string][]string{}           // by test
	last := map[string][]string{}           // by package, whatever it said
	running := map[string]map[string]bool{} // by package, the tests that have begun and not ended
	skipped := false
	var left, packages, excused []string
	tests, undecided := 0, 0
	var slow []event
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var e event
		if json.Unmarshal(in.Bytes(), &e) != nil {
			continue
		}
		key := e.Package + e.ImportPath + " " + e.Test
		if e.Action == "pass" || e.Action == "fail" {
			tests++
			if strings.Count(e.Test, "/") <= 1 {
				slow = append(slow, e)
			}
		}
		switch of := running[e.Package]; {
		case e.Test == "":
		case e.Action == "run" && of == nil:
			running[e.Package] = map[string]bool{e.Test: true}
		case e.Action == "run":
			of[e.Test] = true
		case e.Action == "pass" || e.Action == "fail" || e.Action == "skip":
			delete(of, e.Test)
		}
		switch e.Action {
		case "output", "build-output":
			if lines := append(last[e.Package], e.Output); len(lines) > 2*most {
				last[e.Package] = lines[1:]
			} else {
				last[e.Package] = lines
			}
			if telling.MatchString(e.Output) {
				said[key] = append(said[key], e.Output)
			}
			if noVerdict.MatchString(e.Output) {
				undecided++
			}
			if unfair.MatchString(e.Output) {
				excused = append(excused, key+"\n"+e.Output)
			}
			if e.Test == "" && packageLine.MatchString(e.Output) {
				packages = append(packages, e.Output)
			}
		case "skip":
			switch {
			case e.Test == "":
			case slices.ContainsFunc(said[key], func(line string) bool { return strings.Contains(line, ": "+deep.Mark) }):
				left = append(left, key)
			default:
				skipped = true
				fmt.Println("SKIPPED", key)
				for _, line := range said[key] {
					fmt.Print(line)
				}
			}
		case "fail", "build-fail":
			fmt.Println("FAILED", key)
			for _, line := range slices.Concat(said[key][:min(len(said[key]), 1)], tail(said[key])) {
				fmt.Print(line[:min(len(line), widest)])
				if len(line) > widest {
					fmt.Println("…")
				}
			}
			if e.Test == "" && len(running[e.Package]) > 0 { // the program has ended in the middle
				fmt.Println("    running were", slices.Sorted(maps.Keys(running[e.Package])))
				for _, line := range last[e.Package] {
					fmt.Print("    ", line[:min(len(line), widest)])
				}
			}
		case "pass":
			delete(said, key)
		}
	}
	if err := in.Err(); err != nil {
		fmt.Println("the output of the tests cannot be read:", err)
		os.Exit(1)
	}
	if len(left) > 0 {
		fmt.Printf("%d tests were left out, here or for make deep:\n  %s\n", len(left), strings.Join(left, "\n  "))
	}
	if len(excused) > 0 {
		fmt.Printf("%d failures were excused, since the machine stood still: look whether they return\n%s", len(excused),
			strings.Join(excused, ""))
	}
	if slices.Contains(os.Args, "packages") {
		slices.Sort(packages)
		fmt.Print(strings.Join(packages, ""))
	}
	if slices.Contains(os.Args, "slow") {
		slices.SortFunc(slow, func(a, b event) int { return cmp.Compare(b.Elapsed, a.Elapsed) })
		for _, e := range slow[:min(len(slow), slowest)] {
			fmt.Printf("%7.1f s  %s %s\n", e.Elapsed, e.Package, e.Test)
		}
	}
	if undecided > 0 {
		fmt.Printf("%d of %d tests have no verdict, since the machine stood still each time\n", undecided, tests)
		if undecided*100 > tests && slices.Contains(os.Args, "noskip") {
			fmt.Println("that is too many: run them on a machine that is less busy")
			os.Exit(1)
		}
	}
	if skipped && slices.Contains(os.Args, "noskip") {
		fmt.Println("tests were skipped although FENCELOCK_REQUIRE=all")
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
