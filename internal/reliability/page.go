package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

//go:embed bugs.md
var bugs string

const (
	begin = "<!-- reliability: make report -->\n"
	end   = "<!-- end of reliability -->\n"
)

// rewrite replaces what is between the marks of a file.
func rewrite(file, text string) error {
	old, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, found := bytes.Cut(old, []byte(begin))
	_, after, closed := bytes.Cut(rest, []byte(end))
	if !found || !closed {
		return fmt.Errorf("%s: the marks %q and %q are not there", file, begin, end)
	}
	return os.WriteFile(file, bytes.Join([][]byte{before, []byte(begin + text + end), after}, nil), 0o644)
}

// table writes a Markdown table.
type table struct{ b strings.Builder }

func (t *table) header(cells ...string) {
	t.row(cells...)
	t.b.WriteString("|" + strings.Repeat("---|", len(cells)) + "\n")
}

func (t *table) row(cells ...string) { t.b.WriteString("| " + strings.Join(cells, " | ") + " |\n") }

// perDriver is a row with a cell for each driver.
func (t *table) perDriver(what string, cell func(driver string) string) {
	cells := []string{what}
	for _, d := range drivers {
		cells = append(cells, cell(d))
	}
	t.row(cells...)
}

const none = "–"

// head is the table that README.md shows, and the page begins with.
func head(f findings) string {
	var t table
	t.header(append([]string{""}, drivers...)...)
	t.perDriver("conformance: clauses passed", func(d string) string { return clauseCell(f.clauses[d]) })
	t.perDriver("directed cluster faults: rounds, violations", func(d string) string {
		rounds, violations := 0, 0
		for _, c := range f.faults {
			if c.driver == d {
				rounds += c.rounds
				violations += c.violations
			}
		}
		if rounds == 0 {
			return none
		}
		return fmt.Sprintf("%d, **%d**", rounds, violations)
	})
	t.perDriver("faults drawn by seed: faults, operations, violations", func(d string) string {
		return soakCell(f.soaks, d, func(s soak) string {
			return fmt.Sprintf("%s, %s, **%s**", s.values["faults"], s.values["operations"], s.values["violations"])
		})
	})
	t.perDriver("worst margin: from the end of a lost holder's belief to its rival's grant", func(d string) string { return margin(f, d) })
	t.perDriver("leader killed: the locks went on after, at most", func(d string) string {
		r, ok := f.recoveries[d]["leader-kill"]
		if !ok {
			return none
		}
		return r.most + " s"
	})
	t.perDriver("what no driver promises to survive (eviction, lost data, clock jumps): violations", func(d string) string {
		return soakCell(f.reported, d, func(s soak) string { return s.values["violations"] + " in " + s.values["faults"] })
	})
	killed := 0
	for _, m := range f.mutants {
		if m.killers != "" {
			killed++
		}
	}
	fmt.Fprintf(&t.b, "\nBroken drivers that the suites caught: %d of %d. Simulated: %s.\n", killed, len(f.mutants),
		strings.Join(hours(f.simulations), "; "))
	return t.b.String()
}

// hours is the beginning of each line of a simulation: how much time it covered.
func hours(lines []string) []string {
	var all []string
	for _, line := range lines {
		what := "the core"
		if strings.HasPrefix(line, "simulation of the machine") {
			what = "the bundled server's state machine"
		}
		_, rest, _ := strings.Cut(line, ": ")
		first, _, _ := strings.Cut(rest, ", ")
		all = append(all, what+" "+first)
	}
	return all
}

// clauseCell is that of the worst run, and says how many there were.
func clauseCell(runs []clauses) string {
	if len(runs) == 0 {
		return none
	}
	failed, most := 0, clauses{}
	for _, c := range runs {
		failed += c.failed + c.skipped
		if c.passed > most.passed {
			most = c
		}
	}
	return fmt.Sprintf("%d, × %d set-ups, **%d** failed", most.passed, len(runs), failed)
}

func soakCell(runs []soak, driver string, cell func(soak) string) string {
	i := slices.IndexFunc(runs, func(s soak) bool { return s.driver == driver })
	if i < 0 {
		return none
	}
	return cell(runs[i])
}

// margin is the worst of the directed and the drawn faults, in ms.
func margin(f findings, driver string) string {
	worst, found := 0.0, false
	take := func(ms float64) {
		if !found || ms < worst {
			worst, found = ms, true
		}
	}
	for _, c := range f.faults {
		if ms, err := strconv.ParseFloat(c.margin, 64); err == nil && c.driver == driver {
			take(ms)
		}
	}
	for _, s := range f.soaks {
		if ms, ok := milliseconds(s.values["worst margin"]); ok && s.driver == driver {
			take(ms)
		}
	}
	if !found {
		return none
	}
	return fmt.Sprintf("%.1f ms", worst)
}

// page is the whole report.
func page(f findings, steps []step) string {
	var b strings.Builder
	b.WriteString("# Reliability\n\n" +
		"Written by `make report`; every figure is one that a test printed, on one machine:\n" + f.about + ".\n" +
		"How it is done: [conformance](../conformance/doc.go) (clauses), [cluster](../conformance/cluster/cluster.go) (directed faults),\n" +
		"[nemesis](../conformance/nemesis/doc.go) (faults drawn by a seed, processes that are stopped and killed),\n" +
		"[check](../conformance/check/doc.go) (histories: scans, and a search for a legal order),\n" +
		"[simulation](../conformance/simulation/doc.go).\n\n")
	b.WriteString(head(f))
	b.WriteString("\nA violation is: two who believe in one lock, a token that does not rise, a hold that was acknowledged and is gone before\n" +
		"its time, a holder that is not told of its loss before its rival holds, a caller that waits beyond its context or in vain,\n" +
		"something left behind. All of them must be 0 for the drivers of the correctness tier, whatever breaks.\n" +
		"\nA holder believes until its lease's context ends, or until its deadline where nobody looked: a process that is stopped is told when\n" +
		"it wakes, and whoever asks its lease then is told the truth. The worst margin is the shortest time from there to the rival's grant.\n")
	b.WriteString("\n## Directed faults\n\nOne fault at a time on three nodes, under five clients that contend for three names.\n\n" + faultTable(f))
	b.WriteString("\n## Recovery\n\nFrom the fault until names that nobody held went on, in seconds: median, and the longest.\n\n" + recoveryTable(f))
	b.WriteString("\n## Faults drawn by seed\n\n" + soakTable(f.soaks))
	b.WriteString("\n## What Redis and Redlock do not survive\n\n" +
		"No client can prevent what follows: the service itself forgets. That is why these drivers do not compile where a double run\n" +
		"corrupts data: their tier is efficiency. The library reports the loss at the next renewal, which is too late for the rival\n" +
		"that came before. A violation is counted for the fault after which it was found.\n\n")
	b.WriteString(reportedTable(f.reported))
	b.WriteString("\nTwo holders of one Redlock lock at once, on five servers, where what the algorithm assumes does not hold:\n\n" + rateTable(f.violations))
	b.WriteString("\n## Others under the same checks\n\nEach library takes, holds and waits for locks, while links are held back or lost, servers stop, and keys are deleted behind\n" +
		"everybody; the last one nobody can tell a holder before its rival. Libraries that tell nobody get the benefit of a user who watches\n" +
		"the deadline.\n\n" + strings.Join(f.peers, "\n\n") + "\n")
	b.WriteString("\n## Broken drivers\n\nEach is broken in one way, and the suite is right only if it notices.\n\n" + mutantTable(f.mutants))
	b.WriteString("\n## Simulated time\n\n")
	for _, line := range f.simulations {
		b.WriteString("- " + line + "\n")
	}
	b.WriteString("\n## Bugs found\n\n" + bugs)
	b.WriteString("\n## Commands\n\nWhat `make report` runs, one after the other:\n\n```sh\n")
	for _, s := range steps {
		fmt.Fprintln(&b, s)
	}
	b.WriteString("```\n")
	return b.String()
}

func faultTable(f findings) string {
	var slugs []string
	for _, c := range f.faults {
		if !slices.Contains(slugs, c.slug) {
			slugs = append(slugs, c.slug)
		}
	}
	slices.Sort(slugs)
	var t table
	header := []string{"fault"}
	for _, d := range clusters {
		header = append(header, d+": rounds, grants, worst margin, violations")
	}
	t.header(header...)
	for _, slug := range slugs {
		cells := []string{"`" + slug + "`"}
		for _, d := range clusters {
			cell := none
			for _, c := range f.faults {
				if c.slug != slug || c.driver != d {
					continue
				}
				margin := "no loss"
				if c.margin != "" {
					margin = c.margin + " ms"
				}
				cell = fmt.Sprintf("%d, %d, %s, **%d**", c.rounds, c.grants, margin, c.violations)
			}
			cells = append(cells, cell)
		}
		t.row(cells...)
	}
	return t.b.String()
}

func recoveryTable(f findings) string {
	var slugs []string
	for _, of := range f.recoveries {
		for slug := range of {
			if !slices.Contains(slugs, slug) {
				slugs = append(slugs, slug)
			}
		}
	}
	slices.Sort(slugs)
	var t table
	t.header(append([]string{"fault"}, clusters...)...)
	for _, slug := range slugs {
		cells := []string{"`" + slug + "`"}
		for _, d := range clusters {
			r, ok := f.recoveries[d][slug]
			if !ok {
				cells = append(cells, none)
				continue
			}
			cells = append(cells, fmt.Sprintf("%s, %s (%d rounds)", r.median, r.most, r.rounds))
		}
		t.row(cells...)
	}
	return t.b.String()
}

func soakTable(runs []soak) string {
	var t table
	t.header("driver", "seed", "time", "faults", "operations", "grants", "losses", "worst margin", "longest recovery", "violations")
	for _, s := range runs {
		t.row(s.driver, s.values["seed"], s.values["duration"], s.values["faults"], s.values["operations"], s.values["grants"],
			s.values["losses"], s.values["worst margin"], s.values["recovery max"], "**"+s.values["violations"]+"**"+foundIn(s))
	}
	t.b.WriteString("\nEach kind of fault: how often, and the longest time until every client and every name had a turn again.\n\n")
	var slugs []string
	for _, s := range runs {
		for _, k := range s.kinds {
			if !slices.Contains(slugs, k.slug) {
				slugs = append(slugs, k.slug)
			}
		}
	}
	slices.Sort(slugs)
	t.header(append([]string{"fault"}, drivers...)...)
	for _, slug := range slugs {
		t.perDriver("`"+slug+"`", func(d string) string {
			n, most := 0, ""
			for _, s := range runs {
				for _, k := range s.kinds {
					if s.driver == d && k.slug == slug {
						count, _ := strconv.Atoi(k.values["count"])
						n += count
						most = longest(most, k.values["recovery max"])
					}
				}
			}
			if n == 0 {
				return none
			}
			return fmt.Sprintf("%d, %s", n, most)
		})
	}
	return t.b.String()
}

func foundIn(s soak) string {
	if len(s.found) == 0 {
		return ""
	}
	return " (" + strings.Join(s.found, ", ") + ")"
}

func reportedTable(runs []soak) string {
	var t table
	t.header("driver", "fault", "times", "times with a violation")
	for _, s := range runs {
		for _, k := range s.kinds {
			violated := k.values["violated"]
			if violated == "" {
				violated = "0"
			}
			t.row(s.driver, "`"+k.slug+"`", k.values["count"], violated)
		}
		t.row(s.driver, "all", s.values["faults"], "violations: "+s.values["violations"]+foundIn(s)+", longest overlap "+s.values["overlap max"])
	}
	return t.b.String()
}

func rateTable(rows []violation) string {
	var t table
	t.header("what happened", "rounds with two holders")
	for _, v := range rows {
		t.row(v.fault, fmt.Sprintf("%d of %d", v.times, v.rounds))
	}
	return t.b.String()
}

func mutantTable(all []mutant) string {
	var t table
	t.header("suite", "broken driver", "caught by")
	for _, m := range all {
		t.row(m.suite, m.what, m.killers)
	}
	return t.b.String()
}
