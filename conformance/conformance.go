package conformance

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/deep"
	"github.com/fencelock/fencelock/internal/facts"
	"github.com/fencelock/fencelock/internal/stall"
)

// Harness is what the suite needs to know about one configuration of a driver and the service behind it.
type Harness struct {
	// New returns one more independent client of the service: its own connection, and nothing shared with the others
	// but the service. The suite closes the driver; what else was opened is for t.Cleanup, which runs after that.
	New func(t testing.TB) backend.Driver

	// Linked returns the same through a link that the suite breaks: through a fault.Proxy, or NetworkLink for the
	// in-process driver. Nil: the clauses that need it are skipped by name.
	Linked func(t testing.TB) (backend.Driver, fault.Link)

	// Server is what can be done to the service itself. Clauses that need what is nil are skipped by name.
	Server Server

	// Leftovers lists what the service still keeps of the driver's: keys, nodes, sessions. Things that are meant to
	// outlive all holds, such as a token counter, are left out. Nil: skipped by name.
	Leftovers func() ([]string, error)

	// Intrude puts foreign entries beside those that the driver keeps for name: what other programs, or people, might
	// leave in the same place. Nil: skipped by name.
	Intrude func(t testing.TB, name string)

	// TTL is the short TTL that clauses let pass. Default: the larger of Description.MinTTL and one second.
	TTL time.Duration
}

// Server is what an operator, or an outage, can do to the service. Functions that are nil cannot be done. Apart from
// Evict and EvictWaiter they affect every client, so the suite calls them while nothing else runs.
type Server struct {
	// Restart ends the service and starts it again, with what it keeps on disk, under the same address.
	Restart func(t testing.TB)
	// Stop ends the service so that connecting fails; Start starts it again.
	Stop, Start func(t testing.TB)
	// Pause freezes the service so that it says nothing at all; Resume lets it go on.
	Pause, Resume func(t testing.TB)
	// Evict deletes what the service keeps for the holds of one name, behind the driver's back.
	Evict func(t testing.TB, name string)
	// EvictWaiter deletes what the service keeps for those who wait for one name, their places in the queue, and
	// nothing of its holders.
	EvictWaiter func(t testing.TB, name string)
	// Wipe deletes everything that the driver keeps in the service, counters and the token space included, as a disk
	// that is replaced does.
	Wipe func(t testing.TB)
	// Compact makes the service forget the events of name so far, for those who watch since a revision before.
	Compact func(t testing.TB, name string)
}

// Clause is one numbered obligation of a driver, or of the core above it.
type Clause struct {
	ID    string // "X1"
	Group string // "exclusion"
	Slug  string // "one-holder-at-a-time"
	Rule  string // the obligation in words

	caps   backend.Capabilities // applies only to drivers that declare all of them
	needs  need
	serial bool       // not beside other clauses: it breaks the service
	crowd  bool       // not beside other clauses: they would wait for its hundreds of calls, and it for theirs
	rounds func() int // how often as long as others it may take; nil: once
	run    func(t *trial)
}

func (c Clause) String() string { return c.ID + " " + c.Group + "/" + c.Slug }

// Clauses returns all clauses in the order in which Run reports them.
func Clauses() []Clause {
	var all []Clause
	for _, group := range [][]Clause{
		exclusionClauses, ownershipClauses, leaseClauses, waitingClauses, cancellationClauses, ambiguityClauses,
		nameClauses, errorClauses, capabilityClauses, watchClauses, sharedClauses, permitsClauses, multiClauses,
		hierarchyClauses, deadlockClauses, fencingClauses, tierClauses, coreClauses, electionClauses, identityClauses,
		outageClauses, leftoverClauses,
	} {
		all = append(all, group...)
	}
	return all
}

// need is something that a clause needs from the harness.
type need uint16

const (
	needLink need = 1 << iota
	needRestart
	needStop
	needPause
	needEvict
	needEvictWaiter
	needWipe
	needCompact
	needLeftovers
	needIntrude
)

// lacking names what the clause needs and the harness does not offer.
func (h *Harness) lacking(n need) string {
	for _, each := range []struct {
		need  need
		there bool
		field string
	}{
		{needLink, h.Linked != nil, "Linked"},
		{needRestart, h.Server.Restart != nil, "Server.Restart"},
		{needStop, h.Server.Stop != nil && h.Server.Start != nil, "Server.Stop and Start"},
		{needPause, h.Server.Pause != nil && h.Server.Resume != nil, "Server.Pause and Resume"},
		{needEvict, h.Server.Evict != nil, "Server.Evict"},
		{needEvictWaiter, h.Server.EvictWaiter != nil, "Server.EvictWaiter"},
		{needWipe, h.Server.Wipe != nil, "Server.Wipe"},
		{needCompact, h.Server.Compact != nil, "Server.Compact"},
		{needLeftovers, h.Leftovers != nil, "Leftovers"},
		{needIntrude, h.Intrude != nil, "Intrude"},
	} {
		if n&each.need != 0 && !each.there {
			return "Harness." + each.field
		}
	}
	return ""
}

// Outcome says how a clause ended.
type Outcome uint8

const (
	// Passed: the driver keeps the clause.
	Passed Outcome = iota + 1
	// Failed: it breaks the clause.
	Failed
	// Skipped: the harness lacks what is needed to try. A failure under FENCELOCK_REQUIRE=all.
	Skipped
	// Inconclusive: it failed each time that it was tried, and each time the machine stood still for so long that it
	// may be the reason. No failure: nothing is known of the driver.
	Inconclusive
	// NotApplicable: the driver does not declare the capability; clause P1 sees that it then refuses.
	NotApplicable
)

// String returns "pass", "FAIL", "skip", "????" or "n/a".
func (o Outcome) String() string {
	return [...]string{"?", "pass", "FAIL", "skip", "????", "n/a"}[min(o, NotApplicable)]
}

// Result is the outcome of one clause.
type Result struct {
	Clause   Clause
	Outcome  Outcome
	Messages []string // what was found, or why it was skipped
	Took     time.Duration
}

// Report is the outcome of a run.
type Report []Result

// Count returns how many clauses ended with o.
func (r Report) Count(o Outcome) int {
	n := 0
	for _, each := range r {
		if each.Outcome == o {
			n++
		}
	}
	return n
}

// Run tests the driver of h, one subtest for each clause: Test…/<group>/<clause>. A failure prints the clause's number
// and rule. With FENCELOCK_REQUIRE=all in the environment a clause that has to be skipped fails.
//
// Clauses run side by side whatever -parallel says, since most of the time they wait for a lease to end; those that
// break the whole service run alone at the end. Run must not share the service with other tests. The time that go test
// tells of a clause is how long the report waited for it, and 0 if it had ended before its turn; what it took itself is
// logged.
//
// With -short those are left out: the others take a few seconds.
//
// A clause that fails while the machine stood still is tried again, twice at most: see Inconclusive.
//
// With groups, such as "exclusion", it runs their clauses only: for one more configuration of a driver whose others run
// all.
func Run(t *testing.T, h Harness, groups ...string) {
	t.Helper()
	clauses := inGroups(t, groups)
	s := newSuite(t, h, clauses)
	defer stall.Begin().End() // one meter for all clauses
	s.startParallel(func(c *Clause) bool { return selected(t.Name() + "/" + c.Group + "/" + c.Slug) })
	cases := map[string]*oneCase{}
	for _, c := range s.cases {
		cases[c.clause.ID] = c
	}
	run(t, clauses, func(t *testing.T, c Clause) Result {
		if c.serial {
			deep.NotShort(t)
		}
		return s.result(cases[c.ID])
	})
}

// inGroups returns the clauses of those groups, or all of them.
func inGroups(tb testing.TB, groups []string) []Clause {
	tb.Helper()
	all := Clauses()
	if len(groups) == 0 {
		return all
	}
	for _, g := range groups {
		if !slices.ContainsFunc(all, func(c Clause) bool { return c.Group == g }) {
			tb.Fatalf("conformance: there is no group %q", g)
		}
	}
	return slices.DeleteFunc(all, func(c Clause) bool { return !slices.Contains(groups, c.Group) })
}

// run makes a subtest of each clause, and says what came of them.
func run(t *testing.T, clauses []Clause, try func(*testing.T, Clause) Result) {
	t.Helper()
	var report Report
	for len(clauses) > 0 {
		end := slices.IndexFunc(clauses, func(c Clause) bool { return c.Group != clauses[0].Group })
		if end < 0 {
			end = len(clauses)
		}
		t.Run(clauses[0].Group, func(t *testing.T) {
			for _, c := range clauses[:end] {
				t.Run(c.Slug, func(t *testing.T) {
					result := try(t, c)
					report = append(report, result)
					tell(t, result)
				})
			}
		})
		clauses = clauses[end:]
	}
	t.Logf("%d clauses passed, %d failed, %d inconclusive, %d skipped, %d not applicable", report.Count(Passed),
		report.Count(Failed), report.Count(Inconclusive), report.Count(Skipped), report.Count(NotApplicable))
	facts.Write(t, facts.Clauses{
		Passed: report.Count(Passed), Failed: report.Count(Failed), Inconclusive: report.Count(Inconclusive),
		Skipped: report.Count(Skipped), NotApplicable: report.Count(NotApplicable),
	})
	for _, r := range report {
		switch r.Outcome {
		case Skipped:
			t.Logf("skipped: %v: %s", r.Clause, r.Messages[0])
		case Failed:
			t.Logf("failed: %v: %s", r.Clause, r.Messages[0])
		case Inconclusive:
			t.Logf("INCONCLUSIVE: %v: %s", r.Clause, r.Messages[0])
		}
	}
}

func tell(t *testing.T, r Result) {
	t.Helper()
	switch r.Outcome {
	case Failed:
		t.Errorf("%s  %s", r.Clause.ID, r.Clause.Rule)
		for _, m := range r.Messages {
			t.Errorf("    %s", m)
		}
	case Skipped:
		if os.Getenv("FENCELOCK_REQUIRE") == "all" {
			t.Fatalf("%s  %s\n    not tried: %s", r.Clause.ID, r.Clause.Rule, r.Messages[0])
		}
		t.Skipf("%s  %s\n    not tried: %s", r.Clause.ID, r.Clause.Rule, r.Messages[0])
	case Inconclusive:
		t.Logf("INCONCLUSIVE  %s  %s\n    %s", r.Clause.ID, r.Clause.Rule, strings.Join(r.Messages, "\n    "))
	case Passed:
		said := ""
		if n := len(r.Messages); n > 0 {
			said = ": " + r.Messages[n-1]
		}
		t.Logf("%s  took %v%s", r.Clause.ID, r.Took.Round(time.Millisecond), said)
	case NotApplicable:
		t.Logf("%s does not apply: %s", r.Clause.ID, r.Messages[0])
	}
}

// Check tests the driver of h and returns what it found, without failing tb: for tests that expect failures, and for
// tables. With only, it tries just the clauses with those numbers; an unknown number fails tb.
func Check(tb testing.TB, h Harness, only ...string) Report {
	tb.Helper()
	s := newSuite(tb, h, chosen(tb, only))
	defer stall.Begin().End() // one meter for all clauses
	s.startParallel(func(*Clause) bool { return true })
	report := make(Report, 0, len(s.cases))
	for _, c := range s.cases {
		report = append(report, s.result(c))
	}
	return report
}

// chosen returns the clauses with those numbers, or all of them.
func chosen(tb testing.TB, only []string) []Clause {
	tb.Helper()
	if len(only) == 0 {
		return Clauses()
	}
	var clauses []Clause
	for _, id := range only {
		clauses = append(clauses, find(tb, id))
	}
	return clauses
}

func find(tb testing.TB, id string) Clause {
	tb.Helper()
	for _, c := range Clauses() {
		if c.ID == id {
			return c
		}
	}
	tb.Fatalf("conformance: there is no clause %q", id)
	return Clause{}
}

// String returns a table of the report.
func (r Report) String() string {
	s := ""
	for _, each := range r {
		s += fmt.Sprintf("%-4s  %-3s  %s/%s\n", each.Outcome, each.Clause.ID, each.Clause.Group, each.Clause.Slug)
		for _, m := range each.Messages {
			s += "            " + m + "\n"
		}
	}
	return s
}
