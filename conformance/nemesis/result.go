package nemesis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/check"
	"github.com/fencelock/fencelock/conformance/internal/artifacts"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testfindings"
)

// Failed is the kind of violation that a run finds without check: a missing event.
const Failed check.Kind = "failed"

// Inconclusive is the kind of a step that failed three times, each time while the machine stalled: not a failure.
const Inconclusive check.Kind = "inconclusive"

// Result is the result of a run.
type Result struct {
	Driver   string
	Seed     uint64
	Planned  time.Duration
	Took     time.Duration
	Reported bool
	Schedule Schedule
	Steps    int // executed steps of the schedule
	Faults   int
	Kinds    map[string]*KindResult // by slug

	check.Figures
	Violations []check.Violation
	Dump       string // the folder with the data about a failure

	worst *check.Report // with violations
}

// KindResult is the result of the faults of one kind.
type KindResult struct {
	Count      int
	Recoveries []time.Duration // from the end of the fault until every client and every name has had a turn
	Outages    []time.Duration // from its beginning until the unaffected clients went on, even with the victim's name
	Notified   []time.Duration // from a forced release until the holder's notification
	// Unexplained counts the holders that were notified with a wrong reason.
	Unexplained int
	Violated    int // number of faults with a violation before the next step
}

// played is a step with the instant of its beginning.
type played struct {
	since    backend.Instant
	step     Step
	violated bool
}

// Failures returns the violations that fail the run, and are not only counted.
func (r *Result) Failures() []check.Violation {
	return slices.DeleteFunc(slices.Clone(r.Violations), func(v check.Violation) bool {
		return v.Kind == Inconclusive ||
			r.Reported && v.Kind != Failed && v.Kind != check.NoFault && v.Kind != check.Leftover
	})
}

// kind returns the result of a kind.
func (r *Result) kind(slug string) *KindResult {
	k := r.Kinds[slug]
	if k == nil {
		k = &KindResult{}
		r.Kinds[slug] = k
	}
	return k
}

func (r *Result) count(a *attack, recovered time.Duration) {
	k := r.kind(a.Kind)
	r.Faults++
	k.Count++
	k.Recoveries = append(k.Recoveries, recovered)
	if a.outage > 0 {
		k.Outages = append(k.Outages, a.outage)
	}
	if a.unexplained {
		k.Unexplained++
	}
	if a.told > 0 {
		k.Notified = append(k.Notified, a.told)
	}
}

// String is the summary: a line for the run, and one for each kind.
func (r Result) String() string {
	var b strings.Builder
	margin := "none"
	if r.Margins > 0 {
		margin = r.Margin.Round(100 * time.Microsecond).String()
	}
	var recoveries []time.Duration
	for _, k := range r.Kinds {
		recoveries = append(recoveries, k.Recoveries...)
	}
	what := "soak"
	if r.Reported {
		what = "reported"
	}
	fmt.Fprintf(&b,
		"%s: driver=%s seed=%d duration=%v steps=%d/%d faults=%d operations=%d grants=%d losses=%d "+
			"unknown=%d violations=%d worst margin=%s notified before=%d after=%d never=%d overlaps=%d overlap max=%v "+
			"late context max=%v recovery max=%v search=%v",
		what, r.Driver, r.Seed, r.Took.Round(100*time.Millisecond), r.Steps, len(r.Schedule.Steps), r.Faults,
		r.Operations, r.Grants,
		r.Losses, r.Unknowns, len(r.Violations), margin, r.NotifiedBefore, r.NotifiedAfter, r.NeverNotified, r.Overlaps,
		r.Overlapped.Round(100*time.Microsecond), r.LateContext.Round(100*time.Microsecond), most(recoveries),
		r.Search.Round(time.Millisecond))
	for _, slug := range sortedKeys(r.Kinds) {
		k := r.Kinds[slug]
		fmt.Fprintf(&b, "\n%s: driver=%s fault=%s count=%d recovery median=%v max=%v", what, r.Driver, slug, k.Count,
			median(k.Recoveries), most(k.Recoveries))
		if k.Violated > 0 {
			fmt.Fprintf(&b, " violated=%d", k.Violated)
		}
		if len(k.Outages) > 0 {
			fmt.Fprintf(&b, " others went on median=%v max=%v", median(k.Outages), most(k.Outages))
		}
		if len(k.Notified) > 0 {
			fmt.Fprintf(&b, " notified median=%v max=%v unexplained=%d", median(k.Notified), most(k.Notified), k.Unexplained)
		}
	}
	counts := r.counts()
	for _, kind := range sortedKeys(counts) {
		fmt.Fprintf(&b, "\n%s: driver=%s violation=%q count=%d", what, r.Driver, kind, counts[kind])
	}
	return b.String()
}

// fact returns the summary for programs.
func (r *Result) fact() testfindings.Soak {
	fact := testfindings.Soak{
		Driver: r.Driver, Reported: r.Reported, Seed: r.Seed, Took: r.Took, Faults: r.Faults, Operations: r.Operations,
		Grants: r.Grants, Losses: r.Losses, Violations: len(r.Violations), Overlap: r.Overlapped,
	}
	if r.Margins > 0 {
		fact.Margin = &r.Margin
	}
	for _, slug := range sortedKeys(r.Kinds) {
		k := r.Kinds[slug]
		most := most(k.Recoveries)
		fact.Kinds = append(fact.Kinds,
			testfindings.SoakKind{Slug: slug, Count: k.Count, Violated: k.Violated, LongestRecovery: most})
		fact.LongestRecovery = max(fact.LongestRecovery, most)
	}
	counts := r.counts()
	for _, kind := range sortedKeys(counts) {
		fact.Found = append(fact.Found, testfindings.Count{What: string(kind), Times: counts[kind]})
	}
	return fact
}

// counts returns the number of violations of each kind.
func (r *Result) counts() map[check.Kind]int {
	counts := map[check.Kind]int{}
	for _, v := range r.Violations {
		counts[v.Kind]++
	}
	return counts
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	var all []K
	for k := range m {
		all = append(all, k)
	}
	slices.Sort(all)
	return all
}

func median(all []time.Duration) time.Duration {
	if len(all) == 0 {
		return 0
	}
	all = slices.Clone(all)
	slices.Sort(all)
	return all[(len(all)-1)/2].Round(time.Millisecond)
}

func most(all []time.Duration) time.Duration {
	if len(all) == 0 {
		return 0
	}
	return slices.Max(all).Round(time.Millisecond)
}

// failed records an error that ends the run.
func (r *run) failed(err error) {
	kind := Failed
	switch {
	case errors.Is(err, errNoFault): // the step has no result, for any reason
		kind = check.NoFault
	case errors.As(err, new(*stallmeter.InconclusiveError)):
		kind = Inconclusive
	}
	r.found(kind, err.Error())
}

func (r *run) found(kind check.Kind, text string) {
	r.result.Violations = append(r.result.Violations, check.Violation{Kind: kind, At: r.all.marks.Now(), Text: text})
}

// verify checks the history of the names of the current epoch.
func (r *run) verify(ctx context.Context) {
	h := r.all.epoch(r.epoch)
	report := check.Verify(ctx, h, check.Rules{
		Fencing: tierOf(r.admin) == fencelock.Correctness, TTL: r.TTL, Patience: patience, Recovery: r.plan.Recovery,
		Timeout: r.plan.Search,
		Seed:    fmt.Sprintf("%s=%d", SeedEnv, r.plan.Seed),
	})
	r.result.add(report.Figures)
	r.result.Violations = append(r.result.Violations, report.Violations...)
	r.blame(report.Violations)
	if r.result.worst == nil || len(report.Violations) > len(r.result.worst.Violations) ||
		len(r.result.Failures()) > 0 && len(r.result.worst.Violations) == 0 {
		r.result.worst = &report
	}
	if artifacts.Kept() {
		if err := report.Dump(filepath.Join(r.t.ArtifactDir(), fmt.Sprintf("epoch-%d", r.epoch))); err != nil {
			r.t.Logf("epoch %d is not dumped: %v", r.epoch, err)
		}
	}
	if r.all.broken != nil {
		r.failed(r.all.broken)
	}
}

// blame marks each step of the epoch with a violation between its beginning and the next step's.
func (r *run) blame(found []check.Violation) {
	for _, v := range found {
		for i, p := range slices.Backward(r.played) {
			if v.At == 0 || v.At < p.since {
				continue
			}
			if !p.violated {
				r.played[i].violated = true
				for _, d := range p.step.Draws {
					r.result.kind(d.Kind).Violated++
				}
			}
			break
		}
	}
	r.played = nil
}

// add adds the figures of another epoch.
func (r *Result) add(f check.Figures) {
	if f.Margins > 0 && (r.Margins == 0 || f.Margin < r.Margin) {
		r.Margin = f.Margin
	}
	for _, n := range []struct{ sum, add *int }{
		{&r.Operations, &f.Operations}, {&r.Grants, &f.Grants}, {&r.Refusals, &f.Refusals}, {&r.Unknowns, &f.Unknowns},
		{&r.Renewals, &f.Renewals}, {&r.Losses, &f.Losses}, {&r.NotifiedBefore, &f.NotifiedBefore},
		{&r.NotifiedAfter, &f.NotifiedAfter},
		{&r.NeverNotified, &f.NeverNotified}, {&r.Margins, &f.Margins}, {&r.Overlaps, &f.Overlaps}, {&r.Searched, &f.Searched},
	} {
		*n.sum += *n.add
	}
	for _, d := range []struct{ most, of *time.Duration }{
		{&r.Overlapped, &f.Overlapped}, {&r.LateContext, &f.LateContext}, {&r.Idle, &f.Idle},
	} {
		*d.most = max(*d.most, *d.of)
	}
	r.Scans += f.Scans
	r.Search += f.Search
}

// dump writes the data about a failure into a folder, and names it in the result.
func (r *run) dump(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	dir, err := artifacts.Dir(r.t, "soak-"+r.Driver)
	if err != nil {
		r.t.Logf("nothing is dumped: %v", err)
		return
	}
	r.result.Dump = dir
	var errs []error
	if r.result.worst != nil {
		errs = append(errs, r.result.worst.Dump(dir))
	}
	write := func(name, text string) {
		errs = append(errs, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	var found []string
	for _, v := range r.result.Violations {
		found = append(found, v.String())
	}
	write("run.txt", fmt.Sprintf("%v\n\n%v\n\n%s\n", r.result, r.result.Schedule, strings.Join(found, "\n")))
	for _, c := range r.clients {
		if now := c.now(); now != nil && now.child != nil {
			write(now.name+".stderr", now.child.Stderr())
		}
	}
	if r.Logs != nil {
		for name, text := range r.Logs(ctx) {
			write(name+".log", text)
		}
	}
	if err := errors.Join(errs...); err != nil {
		r.t.Logf("not everything was dumped: %v", err)
	}
	r.t.Logf("the last history, or the one with most violations, the schedule and the servers' logs are in %s", dir)
}
