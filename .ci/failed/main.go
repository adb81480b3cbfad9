// Command failed reads what `go test -json` printed and tells what failed and why, in few lines: of a test that failed its
// own messages, not what servers and passing tests said meanwhile. Whoever sees the end of a log sees the reason. It exits
// with 1 if a test was skipped, where the argument "noskip" is given.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
)

type event struct {
	Action, Package, Test, Output, ImportPath string
}

// telling are the lines worth a look: what a test says of itself, and what ends a program.
var telling = regexp.MustCompile(`^\s+\S+\.go:\d+: |^panic: |WARNING: DATA RACE|^fatal error: |^# |^\S+\.go:\d+:\d+: |^goroutine \d+ .*running|^\*\*\* `)

const (
	most   = 6   // lines of a test
	widest = 400 // bytes of a line
)

func main() {
	said := map[string][]string{} // by test
	skipped := false
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var e event
		if json.Unmarshal(in.Bytes(), &e) != nil {
			continue
		}
		key := e.Package + e.ImportPath + " " + e.Test
		switch e.Action {
		case "output", "build-output":
			if telling.MatchString(e.Output) {
				said[key] = append(said[key], e.Output)
			}
		case "skip":
			if e.Test != "" {
				skipped = true
				fmt.Println("SKIPPED", key)
			}
		case "fail", "build-fail":
			fmt.Println("FAILED", key)
			for _, line := range slices.Concat(said[key][:min(len(said[key]), 1)], tail(said[key])) {
				fmt.Print(line[:min(len(line), widest)])
				if len(line) > widest {
					fmt.Println("…")
				}
			}
		case "pass":
			delete(said, key)
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
