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
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/internal/testtier"
)

// Harness describes one configuration of a driver and its service to the suite.
type Harness struct {
	// New returns a new independent client of the service: its own connection, which shares only the service with other
	// clients. The suite closes the driver; close other resources in t.Cleanup, which runs after that.
	New func(t testing.TB) backend.Driver

	// Linked returns such a client behind a link that the suite breaks: a fault.Proxy, or NetworkLink for the in-process
	// driver. Nil: the clauses that need it are skipped by name.
	Linked func(t testing.TB) (backend.Driver, fault.Link)

	// Server has the operations on the service itself. Clauses that need a nil function are skipped by name.
	Server Server

	// Leftovers lists the driver's remaining entries in the service: keys, nodes, sessions. It leaves out entries
	// that are meant to outlive all holds, such as a token counter. Nil: skipped by name.
	Leftovers func() ([]string, error)

	// Intrude puts foreign entries beside the driver's entries for name, as other programs or people might. Nil: skipped
	// by name.
	Intrude func(t testing.TB, name string)

	// Ahead raises the service's token counter so that all later tokens are greater than token, and may end every hold.
	// Nil: the clause about great tokens does not apply, since few services allow it.
	Ahead func(t testing.TB, token fencing.Token)

	// Principal is the identity that the service has authenticated for the drivers that New makes: ForceRelease reports
	// it to its victims, instead of ForceRequest.Principal. Empty: the service does not authenticate clients.
	Principal string
	// TTL is the short TTL that clauses let pass. Default: the larger of Description.MinTTL and one second.
	TTL time.Duration

	longRefusal time.Duration // see RefusesLong
}

// RefusesLong returns h with a clause U1 that refuses releases for a TTL and two minutes, if is and if all tests run.
// Otherwise U1 refuses them for a quarter of a TTL.
func (h Harness) RefusesLong(is bool) Harness {
	if is && testtier.Wanted() {
		h.longRefusal = 2 * time.Minute
	}
	return h
}

// Server has the actions of an operator, or of an outage, on the service. Nil functions are not supported. Apart from
// Evict and EvictWaiter they affect every client, so the suite calls them while no other clause runs.
type Server struct {
	// Restart restarts the service, with its data on disk, at the same address.
	Restart func(t testing.TB)
	// Stop ends the service so that connecting fails; Start restarts it.
	Stop, Start func(t testing.TB)
	// Pause freezes the service so that it does not respond; Resume continues it.
	Pause, Resume func(t testing.TB)
	// RefuseRelease has the service refuse to release holds of one name (or of all), while it renews them: a revoked
	// right. RefuseWrites has it refuse all changes of locks: a read-only database, a changed password. The service
	// returns an error. allow ends it; nil: the service has no such refusal, and the clause does not apply.
	RefuseRelease, RefuseWrites func(t testing.TB, name string) (allow func())
	// Evict deletes the service's entries for the holds of one name, without the driver's knowledge.
	Evict func(t testing.TB, name string)
	// EvictWaiter deletes the queue entries of the waiters for one name, but not of its holders, and returns the
	// number of deleted entries. 0: waiters have no entries, and clause W10 does not apply.
	EvictWaiter func(t testing.TB, name string) (deleted int)
	// Wipe deletes everything that the driver keeps in the service, counters and the token space included, as when its
	// disk is replaced.
	Wipe func(t testing.TB)
	// Compact deletes the past events of name, so that the service cannot replay them to a watch.
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
	crowd  bool       // not beside other clauses: hundreds of calls, or timed steps, that delay other clauses
	rounds func() int // its duration in multiples of a usual clause; nil: 1
	run    func(t *trial)
}

func (c Clause) String() string { return c.ID + " " + c.Group + "/" + c.Slug }

// Clauses returns all clauses in the order in which Run reports them.
func Clauses() []Clause {
	var all []Clause
	for _, group := range [][]Clause{
		exclusionClauses, ownershipClauses, nonceClauses, requestClauses, leaseClauses, sentClauses, waitingClauses,
		cancellationClauses, besideClauses, ambiguityClauses, doubtClauses, nameClauses, errorClauses, capabilityClauses,
		forceClauses, refusalClauses, listClauses, watchClauses, showsClauses, sharedClauses, permitsClauses, crowdClauses, multiClauses,
		conflictClauses, hierarchyClauses, deadlockClauses, fencingClauses, greatClauses, tierClauses, coreClauses,
		closingClauses, electionClauses, identityClauses, outageClauses, startClauses, leftoverClauses, closeClauses,
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
	needRefuseRelease
	needRefuseWrites
)

// lacking names the needs of the clause that the harness does not offer.
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
		{needRefuseRelease, h.Server.RefuseRelease != nil, "Server.RefuseRelease"},
		{needRefuseWrites, h.Server.RefuseWrites != nil, "Server.RefuseWrites"},
	} {
		if n&each.need != 0 && !each.there {
			return "Harness." + each.field
		}
	}
	return ""
}

// Outcome is how a clause ended.
type Outcome uint8

const (
	// Passed: the driver meets the clause.
	Passed Outcome = iota + 1
	// Failed: the driver violates the clause.
	Failed
	// Skipped: the harness lacks a function that the clause needs. A failure under FENCELOCK_REQUIRE=all.
	Skipped
	// Inconclusive: a step was late in each attempt, and each time the machine stalled for so long that this may be
	// the reason. A skip: there is no verdict on the driver. A second holder, a wrong answer and a bad token are
	// failures on any machine.
	Inconclusive
	// NotApplicable: the driver does not declare the capability; clause P1 checks that it returns ErrUnsupported.
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
	Messages []string // the findings, or the reason for the skip
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
// and rule. With FENCELOCK_REQUIRE=all in the environment, a skipped clause fails.
//
// Clauses run concurrently for any value of -parallel, since they mostly wait for leases to end; clauses that break
// the whole service run alone at the end. Run must not share the service with other tests. The time that go test
// prints for a clause is only the time that the report waited for it; the clause logs its own duration.
//
// With -short, Run skips the clauses that break the service; the others take a few seconds.
//
// A clause that is late during a stall of the machine is repeated, at most twice, when the others have ended: see
// Inconclusive. Run fails if more than one in a hundred of the clauses that ran are inconclusive, and at least two:
// the machine is too busy then.
//
// With groups, such as "exclusion", Run runs only their clauses: for further configurations of a driver that runs all
// clauses in one configuration.
func Run(t *testing.T, h Harness, groups ...string) {
	t.Helper()
	clauses := inGroups(t, groups)
	s := newSuite(t, h, clauses)
	defer stallmeter.Begin().End() // one meter for all clauses
	s.startParallel(func(c *Clause) bool { return selected(t.Name() + "/" + c.Group + "/" + c.Slug) })
	cases := map[string]*oneCase{}
	for _, c := range s.cases {
		cases[c.clause.ID] = c
	}
	run(t, clauses, func(t *testing.T, c Clause) Result {
		if c.serial {
			testtier.NotShort(t)
		}
		return s.result(cases[c.ID])
	})
}

// inGroups returns the clauses of the groups, or all clauses.
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

// run runs a subtest for each clause, and reports the results.
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
	testfindings.Write(t, testfindings.Clauses{
		Passed: report.Count(Passed), Failed: report.Count(Failed), Inconclusive: report.Count(Inconclusive),
		Skipped: report.Count(Skipped), NotApplicable: report.Count(NotApplicable),
	})
	tellAll(t, report)
}

// tellAll logs a summary, and fails t if too many clauses are inconclusive.
func tellAll(t testing.TB, report Report) {
	t.Helper()
	t.Logf("%d clauses passed, %d failed, %d inconclusive, %d skipped, %d not applicable", report.Count(Passed),
		report.Count(Failed), report.Count(Inconclusive), report.Count(Skipped), report.Count(NotApplicable))
	for _, r := range report {
		switch r.Outcome {
		case Skipped:
			t.Logf("skipped: %v: %s", r.Clause, r.Messages[0])
		case Failed:
			t.Logf("failed: %v: %s", r.Clause, r.Messages[0])
		case Inconclusive:
			t.Logf("inconclusive: %v: %s", r.Clause, r.Messages[0])
		}
	}
	ran := report.Count(Passed) + report.Count(Failed) + report.Count(Inconclusive)
	if n := report.Count(Inconclusive); stallmeter.TooMany(n, ran) {
		t.Errorf("%d of %d clauses are inconclusive: the machine is too busy for a verdict", n, ran)
	}
}

func tell(t testing.TB, r Result) {
	t.Helper()
	switch r.Outcome {
	case Failed:
		t.Errorf("%s  %s", r.Clause.ID, r.Clause.Rule)
		for _, m := range r.Messages {
			t.Errorf("    %s", m)
		}
	case Skipped:
		if os.Getenv("FENCELOCK_REQUIRE") == "all" {
			t.Fatalf("not tried, %s\n    %s  %s", r.Messages[0], r.Clause.ID, r.Clause.Rule)
		}
		t.Skipf("not tried, %s\n    %s  %s", r.Messages[0], r.Clause.ID, r.Clause.Rule)
	case Inconclusive:
		t.Skipf("%s%s  %s\n    %s", stallmeter.Mark, r.Clause.ID, r.Clause.Rule, strings.Join(r.Messages, "\n    "))
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

// Check tests the driver of h and returns the findings, without failing tb: for tests that expect failures, and for
// tables. With only, Check runs only the clauses with these numbers; an unknown number fails tb.
func Check(tb testing.TB, h Harness, only ...string) Report {
	tb.Helper()
	s := newSuite(tb, h, chosen(tb, only))
	defer stallmeter.Begin().End() // one meter for all clauses
	s.startParallel(func(*Clause) bool { return true })
	report := make(Report, 0, len(s.cases))
	for _, c := range s.cases {
		report = append(report, s.result(c))
	}
	return report
}

// chosen returns the clauses with the numbers in only, or all clauses.
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
