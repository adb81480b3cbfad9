package main

import (
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// findings are what all outputs tell.
type findings struct {
	about       string
	clauses     map[string][]clauses // by driver
	faults      []clusterFault
	recoveries  map[string]map[string]recovery // by driver and fault
	soaks       []soak
	reported    []soak
	mutants     []mutant
	simulations []string
	violations  []violation
	peers       []string
}

// clauses is how one run of the conformance suite ended.
type clauses struct{ passed, failed, skipped, notApplicable int }

// clusterFault is a directed fault of conformance/cluster.
type clusterFault struct {
	driver, slug                                string
	rounds, grants, lost, confirmed, violations int
	margin                                      string // shortest time from a loss to the rival, in ms; empty: no rival followed
	overlap                                     float64
}

// recovery is how long it took from a leader's fault until the locks went on, in seconds.
type recovery struct {
	median, most string
	rounds       int
}

// soak is a run with drawn faults.
type soak struct {
	driver string
	values map[string]string
	kinds  []kind
	found  []string // "overlap ×3"
}

// kind is what the faults of one kind have shown.
type kind struct {
	slug   string
	values map[string]string
}

type mutant struct{ suite, what, killers string }

// violation is a row of redlock's TestViolationRate.
type violation struct {
	fault         string
	times, rounds int
}

var (
	logged       = regexp.MustCompile(`^\s*(?:[\w]+\.go:\d+: )?(.*?)\s*$`)
	clausesLine  = regexp.MustCompile(`^(\d+) clauses passed, (\d+) failed, (\d+) skipped, (\d+) not applicable`)
	faultLine    = regexp.MustCompile(`^([a-z-]+): (\d+) rounds in \S+, (\d+) grants, (\d+) lost, (\d+) confirmed by the service, (.*?), \d+ late writes refused.* overlap ([\d.]+) ms, (\d+) violations$`)
	marginPart   = regexp.MustCompile(`^shortest time from a loss to the rival (-?[\d.]+) ms$`)
	recoveryLine = regexp.MustCompile(`^([a-z-]+): the locks went on after ([\d.]+) s in the median of (\d+), [\d.]+ s in 95 of 100, ([\d.]+) s at most$`)
	soakLine     = regexp.MustCompile(`^(soak|reported): driver=(\S+) (.*)$`)
	pair         = regexp.MustCompile(`([a-z][a-z ]*)=("[^"]*"|\S+)`)
	mutantLine   = regexp.MustCompile(`^(.{56,}?) (?:killed by (.*)|\[(.*)\])$`)
	rateLine     = regexp.MustCompile(`^(.*\S)\s+(\d+) of (\d+)\s+\(\d+ %\)$`)
)

// line takes in one line that a test of pkg has printed. What it does not know it ignores.
func (f *findings) line(pkg, text string) error {
	text = logged.FindStringSubmatch(text)[1]
	driver, _, _ := strings.Cut(pkg, "/")
	if m := clausesLine.FindStringSubmatch(text); m != nil {
		if f.clauses == nil {
			f.clauses = map[string][]clauses{}
		}
		n := numbers(m[1:])
		f.clauses[driver] = append(f.clauses[driver], clauses{n[0], n[1], n[2], n[3]})
	} else if m := faultLine.FindStringSubmatch(text); m != nil {
		n := numbers(m[2:6])
		c := clusterFault{driver: driver, slug: m[1], rounds: n[0], grants: n[1], lost: n[2], confirmed: n[3]}
		if margin := marginPart.FindStringSubmatch(m[6]); margin != nil {
			c.margin = margin[1]
		}
		c.overlap, _ = strconv.ParseFloat(m[7], 64)
		c.violations = numbers(m[8:])[0]
		f.faults = append(f.faults, c)
	} else if m := recoveryLine.FindStringSubmatch(text); m != nil {
		if f.recoveries == nil {
			f.recoveries = map[string]map[string]recovery{}
		}
		if f.recoveries[driver] == nil {
			f.recoveries[driver] = map[string]recovery{}
		}
		f.recoveries[driver][m[1]] = recovery{median: m[2], rounds: numbers(m[3:4])[0], most: m[4]}
	} else if m := soakLine.FindStringSubmatch(text); m != nil {
		return f.soakLine(m[1], m[2], m[3])
	} else if strings.HasPrefix(text, "simulation: ") || strings.HasPrefix(text, "simulation of the machine: ") {
		f.simulations = append(f.simulations, text)
	} else if m := rateLine.FindStringSubmatch(text); m != nil && pkg == "redlock" {
		n := numbers(m[2:])
		f.violations = append(f.violations, violation{fault: strings.Join(strings.Fields(m[1]), " "), times: n[0], rounds: n[1]})
	} else if m := mutantLine.FindStringSubmatch(text); m != nil && strings.HasPrefix(pkg, "conformance") {
		f.mutants = append(f.mutants, mutant{suite: path.Base(pkg), what: strings.TrimSpace(m[1]), killers: m[2] + m[3]})
	}
	return nil
}

// soakLine takes in a line of a run with drawn faults: the first of a run, or one of its kinds of faults or violations.
func (f *findings) soakLine(what, driver, rest string) error {
	runs := &f.soaks
	if what == "reported" {
		runs = &f.reported
	}
	values := pairs(rest)
	if _, first := values["seed"]; first {
		*runs = append(*runs, soak{driver: driver, values: values})
		return nil
	}
	if len(*runs) == 0 || (*runs)[len(*runs)-1].driver != driver {
		return fmt.Errorf("%q follows no run of %s", rest, driver)
	}
	run := &(*runs)[len(*runs)-1]
	switch {
	case values["fault"] != "":
		run.kinds = append(run.kinds, kind{slug: values["fault"], values: values})
	case values["violation"] != "":
		run.found = append(run.found, fmt.Sprintf("%s × %s", strings.Trim(values["violation"], `"`), values["count"]))
	}
	return nil
}

// pairs reads "a=1 b median=2 max=3 c median=4 max=5": a max belongs to the median before it.
func pairs(text string) map[string]string {
	values, of := map[string]string{}, ""
	for _, m := range pair.FindAllStringSubmatch(text, -1) {
		key := m[1]
		if before, ok := strings.CutSuffix(key, " median"); ok {
			of = before + " "
		} else if key == "max" {
			key = of + "max"
		}
		values[key] = m[2]
	}
	return values
}

func numbers(texts []string) []int {
	out := make([]int, len(texts))
	for i, text := range texts {
		out[i], _ = strconv.Atoi(text) // the pattern lets nothing else through
	}
	return out
}

// longest returns the longest of durations as they were printed, and "" for none.
func longest(texts ...string) string {
	most, found := time.Duration(0), ""
	for _, text := range texts {
		if d, err := time.ParseDuration(text); err == nil && (found == "" || d > most) {
			most, found = d, text
		}
	}
	return found
}

// milliseconds reads a duration as it was printed.
func milliseconds(text string) (float64, bool) {
	d, err := time.ParseDuration(text)
	return float64(d) / float64(time.Millisecond), err == nil
}
