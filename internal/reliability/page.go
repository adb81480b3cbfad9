package main

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/internal/testfindings"
)

//go:embed bugs.md
var bugs string

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

// head returns the table with which the page begins.
func head(f findings) string {
	var t table
	t.header(append([]string{""}, drivers...)...)
	t.perDriver("conformance: clauses passed", func(d string) string { return clauseCell(f.clauses[d]) })
	t.perDriver("directed cluster faults: rounds, violations", func(d string) string {
		rounds, violations := 0, 0
		for _, c := range f.faults[d] {
			rounds += c.Rounds
			violations += c.Violations
		}
		if rounds == 0 {
			return none
		}
		return fmt.Sprintf("%d, **%d**", rounds, violations)
	})
	t.perDriver("faults drawn by seed: faults, operations, violations", func(d string) string {
		return soakCell(f.soaks, d, func(s testfindings.Soak) string {
			return fmt.Sprintf("%d, %d, **%d**", s.Faults, s.Operations, s.Violations)
		})
	})
	t.perDriver("worst margin: from the end of a lost hold's validity to the rival's grant", func(d string) string {
		return margin(f, d)
	})
	t.perDriver("leader killed: the longest time until a lock was granted again", func(d string) string {
		for _, c := range f.faults[d] {
			if c.Slug == "leader-kill" && c.Recoveries > 0 {
				return seconds(c.LongestRecovery) + " s"
			}
		}
		return none
	})
	t.perDriver("faults that no driver survives (eviction, lost data, clock jumps): violations",
		func(d string) string {
			return soakCell(f.reported, d, func(s testfindings.Soak) string {
				return fmt.Sprintf("%d in %d", s.Violations, s.Faults)
			})
		})
	killed := 0
	for _, m := range f.mutants {
		if m.Killers != "" {
			killed++
		}
	}
	fmt.Fprintf(&t.b, "\nBroken drivers that the suites caught: %d of %d. Simulated: %s.\n", killed, len(f.mutants),
		strings.Join(hours(f.simulations), "; "))
	return t.b.String()
}

// hours returns the time that each simulation covered.
func hours(all []testfindings.Simulation) []string {
	var texts []string
	for _, s := range all {
		texts = append(texts, fmt.Sprintf("%s %.1f h", s.What, s.Hours))
	}
	return texts
}

func seconds(d time.Duration) string      { return fmt.Sprintf("%.2f", d.Seconds()) }
func milliseconds(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1000) }

// clauseCell is the cell of the worst run, with the number of runs.
func clauseCell(runs []testfindings.Clauses) string {
	if len(runs) == 0 {
		return none
	}
	most, failed, unknown := 0, 0, 0
	for _, c := range runs {
		most, failed, unknown = max(most, c.Passed), failed+c.Failed+c.Skipped, unknown+c.Inconclusive
	}
	cell := fmt.Sprintf("%d, × %d set-ups, **%d** failed", most, len(runs), failed)
	if unknown > 0 {
		cell += fmt.Sprintf(", %d without a verdict", unknown)
	}
	return cell
}

func soakCell(runs []testfindings.Soak, driver string, cell func(testfindings.Soak) string) string {
	i := slices.IndexFunc(runs, func(s testfindings.Soak) bool { return s.Driver == driver })
	if i < 0 {
		return none
	}
	return cell(runs[i])
}

// margin is the worst of the directed and the drawn faults.
func margin(f findings, driver string) string {
	var all []time.Duration
	for _, c := range f.faults[driver] {
		if c.Margin != nil {
			all = append(all, *c.Margin)
		}
	}
	for _, s := range f.soaks {
		if s.Driver == driver && s.Margin != nil {
			all = append(all, *s.Margin)
		}
	}
	if len(all) == 0 {
		return none
	}
	return milliseconds(slices.Min(all))
}

// page is the whole report.
func page(f findings, steps []step) string {
	var b strings.Builder
	b.WriteString("# Reliability\n\n" +
		"Written by `make report`; every figure comes from a test, on one machine:\n" + f.about + ".\n" +
		"Methods: [conformance](../conformance/doc.go) (clauses), [cluster](../conformance/cluster/cluster.go) (directed faults),\n" +
		"[nemesis](../conformance/nemesis/doc.go) (faults drawn by a seed, processes that are stopped and killed),\n" +
		"[check](../conformance/check/doc.go) (histories: scans, and a search for a legal order),\n" +
		"[simulation](../conformance/simulation/doc.go).\n\n")
	b.WriteString(head(f))
	b.WriteString("\nA violation is: two holders of one lock, a token that does not rise, an acknowledged hold that ends before its time, a\n" +
		"holder that gets no notice of its loss before a rival holds the lock, a call that outlives its context, a wait for a\n" +
		"free lock, or a leftover. The drivers of the correctness tier must have no violation, whatever breaks.\n" +
		"\nA hold counts until its lease's context ends, or until its deadline if the program did not check it. A stopped process sees\n" +
		"the loss when it resumes, and its lease then reports it. The worst margin is the shortest time from the end of a hold\n" +
		"to the rival's grant.\n")
	b.WriteString("\n## Directed faults\n\nOne fault at a time on three nodes, under five clients that contend for three names.\n\n" +
		faultTable(f))
	b.WriteString("\n## Recovery\n\nThe time from the fault until a free name was granted again, in seconds: median and maximum.\n\n" +
		recoveryTable(f))
	b.WriteString("\n## Failovers of PostgreSQL\n\n" + failoverText + failoverTable(f.failovers))
	b.WriteString("\n## Faults drawn by seed\n\n" + soakTable(f.soaks))
	b.WriteString(serverSection(f.server, f.about))
	b.WriteString(afterServer + "\n\n" +
		"No client can prevent these violations, because the service itself loses holds. Therefore these drivers do not compile in the\n" +
		"correctness tier. The library reports the loss at the next renewal, when a rival may already hold the lock. Each\n" +
		"violation is attributed to the last fault before it.\n\n")
	b.WriteString(reportedTable(f.reported))
	b.WriteString("\nTwo holders of one Redlock lock at once, on five servers, where an assumption of the algorithm does not hold:\n\n" +
		rateTable(f.rates))
	b.WriteString("\n## Others under the same checks\n\n" +
		"Each library acquires, holds and waits for locks while links stall or fail, servers stop, and keys are deleted. No library can\n" +
		"report a deleted key before a rival holds the lock. For libraries that report no losses, the check assumes a user who watches\n" +
		"the deadline.\n\n" + strings.Join(f.peers, "\n\n") + "\n")
	b.WriteString("\n## Broken drivers\n\nEach driver is broken in one way, and the suite must detect it.\n\n" +
		mutantTable(f.mutants))
	b.WriteString("\n## Simulated time\n\n")
	for _, s := range f.simulations {
		fmt.Fprintf(&b, "- %s %.1f h: %s\n", s.What, s.Hours, s.Text)
	}
	b.WriteString("\n## Bugs found\n\n" + bugs)
	b.WriteString("\n## Commands\n\n`make report` runs these commands in order:\n\n```sh\n")
	for _, s := range steps {
		fmt.Fprintln(&b, s)
	}
	b.WriteString("```\n")
	return b.String()
}

// serverTitle begins the section about the soak of the bundled server, and afterServer the section after that.
const (
	serverTitle = "\n## The bundled server under machines and operators\n"
	afterServer = "\n## What Redis and Redlock do not survive"
)

// serverSection is the section that "-only soak-server" rewrites; empty without a run.
func serverSection(s *testfindings.ServerSoak, about string) string {
	if s == nil {
		return ""
	}
	var t table
	t.header("seed", "time", "faults", "kinds of faults", "grants", "longest time without a grant", "violations")
	t.row(fmt.Sprint(s.Seed), s.Took.Round(time.Second).String(), fmt.Sprint(s.Faults), fmt.Sprint(s.Kinds),
		fmt.Sprint(s.Grants), s.Longest.Round(100*time.Millisecond).String(), fmt.Sprintf("**%d**", s.Violations))
	return serverTitle + "\nThree members in network namespaces, with lost and slow packets, failing and slow disks, stopped and killed processes,\n" +
		"upgrades from an earlier version, and operators' mistakes: a copied directory, an old disk, a lost one. A separate\n" +
		"checker judges the clients' histories. " + about + ".\n\n" + t.b.String()
}

// withServer returns the page with another section about the soak of the bundled server.
func withServer(page, section string) (string, error) {
	after := strings.Index(page, afterServer)
	if after < 0 {
		return "", fmt.Errorf("the page has no section %q", strings.TrimSpace(afterServer))
	}
	before := after
	if i := strings.Index(page[:after], serverTitle); i >= 0 {
		before = i
	}
	return page[:before] + section + page[after:], nil
}

// clusterTable has a row for each directed fault.
func clusterTable(f findings, cell string, text func(testfindings.ClusterFault) string) string {
	var slugs []string
	for _, of := range f.faults {
		for _, c := range of {
			if text(c) != "" && !slices.Contains(slugs, c.Slug) {
				slugs = append(slugs, c.Slug)
			}
		}
	}
	slices.Sort(slugs)
	var t table
	header := []string{"fault"}
	for _, d := range clusters {
		header = append(header, d+cell)
	}
	t.header(header...)
	for _, slug := range slugs {
		cells := []string{"`" + slug + "`"}
		for _, d := range clusters {
			shown := none
			for _, c := range f.faults[d] {
				if c.Slug == slug && text(c) != "" {
					shown = text(c)
				}
			}
			cells = append(cells, shown)
		}
		t.row(cells...)
	}
	return t.b.String()
}

func faultTable(f findings) string {
	return clusterTable(f, ": rounds, grants, worst margin, violations", func(c testfindings.ClusterFault) string {
		margin := "no loss"
		if c.Margin != nil {
			margin = milliseconds(*c.Margin)
		}
		return fmt.Sprintf("%d, %d, %s, **%d**", c.Rounds, c.Grants, margin, c.Violations)
	})
}

func recoveryTable(f findings) string {
	return clusterTable(f, "", func(c testfindings.ClusterFault) string {
		if c.Recoveries == 0 {
			return ""
		}
		return fmt.Sprintf("%s, %s (%d rounds)", seconds(c.MedianRecovery), seconds(c.LongestRecovery), c.Recoveries)
	})
}

const failoverText = "The primary is killed under four clients that contend for three names, and its standby is promoted. Without a quorum a\n" +
	"failover may lose the last holds: a rival is granted the lock while the first hold is still valid, with a greater token,\n" +
	"so guards refuse the first holder's writes. The correctness tier accepts such a server only with\n" +
	"`Options.AcceptAsyncReplica`.\n\n"

func failoverTable(all []testfindings.Failover) string {
	var t table
	t.header("standby", "failovers", "grants", "losses", "tokens out of order",
		"holders beside whom a rival was granted", "for at most")
	for _, f := range all {
		longest := none
		if f.Doubled > 0 {
			longest = milliseconds(f.Overrun)
		}
		t.row(f.Standby, fmt.Sprint(f.Rounds), fmt.Sprint(f.Grants), fmt.Sprint(f.Losses),
			fmt.Sprintf("**%d**", f.Disorder),
			fmt.Sprint(f.Doubled), longest)
	}
	return t.b.String()
}

func soakTable(runs []testfindings.Soak) string {
	var t table
	t.header("driver", "seed", "time", "faults", "operations", "grants", "losses", "worst margin", "longest recovery",
		"violations")
	for _, s := range runs {
		margin := "none"
		if s.Margin != nil {
			margin = milliseconds(*s.Margin)
		}
		t.row(s.Driver, fmt.Sprint(s.Seed), s.Took.Round(100*time.Millisecond).String(), fmt.Sprint(s.Faults),
			fmt.Sprint(s.Operations),
			fmt.Sprint(s.Grants), fmt.Sprint(s.Losses), margin, s.LongestRecovery.String(),
			fmt.Sprintf("**%d**%s", s.Violations, foundIn(s)))
	}
	t.b.WriteString("\nEach kind of fault: the number of times, and the longest time until every client and every name had a turn again.\n\n")
	var slugs []string
	for _, s := range runs {
		for _, k := range s.Kinds {
			if !slices.Contains(slugs, k.Slug) {
				slugs = append(slugs, k.Slug)
			}
		}
	}
	slices.Sort(slugs)
	t.header(append([]string{"fault"}, drivers...)...)
	for _, slug := range slugs {
		t.perDriver("`"+slug+"`", func(d string) string {
			n, most := 0, time.Duration(0)
			for _, s := range runs {
				for _, k := range s.Kinds {
					if s.Driver == d && k.Slug == slug {
						n += k.Count
						most = max(most, k.LongestRecovery)
					}
				}
			}
			if n == 0 {
				return none
			}
			return fmt.Sprintf("%d, %v", n, most)
		})
	}
	return t.b.String()
}

func foundIn(s testfindings.Soak) string {
	var found []string
	for _, c := range s.Found {
		found = append(found, fmt.Sprintf("%s × %d", c.What, c.Times))
	}
	if len(found) == 0 {
		return ""
	}
	return " (" + strings.Join(found, ", ") + ")"
}

func reportedTable(runs []testfindings.Soak) string {
	var t table
	t.header("driver", "fault", "times", "times with a violation")
	for _, s := range runs {
		for _, k := range s.Kinds {
			t.row(s.Driver, "`"+k.Slug+"`", fmt.Sprint(k.Count), fmt.Sprint(k.Violated))
		}
		t.row(s.Driver, "all", fmt.Sprint(s.Faults),
			fmt.Sprintf("violations: %d%s, longest overlap %v", s.Violations, foundIn(s),
				s.Overlap.Round(100*time.Microsecond)))
	}
	return t.b.String()
}

func rateTable(rows []testfindings.Rate) string {
	var t table
	t.header("what happened", "rounds with two holders")
	for _, r := range rows {
		t.row(r.Fault, fmt.Sprintf("%d of %d", r.Times, r.Rounds))
	}
	return t.b.String()
}

func mutantTable(all []mutant) string {
	var t table
	t.header("suite", "broken driver", "caught by")
	for _, m := range all {
		t.row(m.suite, m.What, m.Killers)
	}
	return t.b.String()
}
