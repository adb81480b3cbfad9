// Package guardtest tests guards: this module's and your own. A guard that passes keeps the promise of
// fencing.Guard: it admits tokens in one order under concurrent checks, checks and writes in one step, and never forgets.
//
//	func TestMain(m *testing.M) {
//		guardtest.RunChild(map[string]guardtest.Open{"mine": open}) // for the clauses that kill a process
//		os.Exit(m.Run())
//	}
//
//	func TestGuard(t *testing.T) {
//		server := start(t)
//		guardtest.Run(t, guardtest.Harness{
//			Name: "mine", Open: open, Address: server.Addr(), Restart: server.Restart,
//		})
//	}
//
//	func open(ctx context.Context, address string) (*guardtest.Client, error) { … }
//
// A failure names the clause and prints its rule:
//
//	--- FAIL: TestGuard/refuses/stale
//	    R1  a token lower than the highest admitted token is refused with ErrStale
//
// The clauses:
//
//   - R1 stale
//   - R2 zero
//   - R3 not-exclusive
//   - R4 another-space
//   - R5 tells-both-tokens
//   - R6 leaves-no-trace
//   - R7 poison
//   - A1 again
//   - A2 each-resource-by-itself
//   - A3 all-63-bits
//   - M1 whatever-the-order
//   - M2 from-the-first-token
//   - W1 refused-writes-nothing
//   - W2 never-goes-back
//   - U1 overtaken-write-survives
//   - U2 racing-writers
//   - U3 refused-is-not-called
//   - U4 nested
//   - U5 one-hold
//   - V1 deadlock
//   - V2 implicit-commit
//   - V3 interrupt
//   - V4 lost-connection
//   - V5 manual-commit
//   - H1 old-view
//   - H2 refused-is-rolled-back
//   - H3 savepoint
//   - S1 all-or-none
//   - S2 opposite-orders
//   - Q1 repeated
//   - Q2 reordered
//   - Q3 failed-may-be-repeated
//   - Q4 mixed-sets
//   - N1 equal-token
//   - N2 nonce-is-filled
//   - N3 generations
//   - K1 begins-anew
//   - K2 floor
//   - K3 clean
//   - I1 terms-lost
//   - I2 created-anew
//   - I3 not-created
//   - I4 another-format
//   - I5 pinned-id
//   - I6 terms-restored
//   - C1 between-check-and-write
//   - C2 at-any-time
//   - D1 across-restart
//   - E1 ended-context
package guardtest

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/fencelock/fencelock/fencing"
)

// Client is one client of a guarded resource, as a user of the guard is: with its own connection. Its functions
// may be called from one goroutine at a time.
type Client struct {
	// Check asks the guard, as a separate step. If the guard lives in transactions, Check runs one, which commits if
	// the claim is admitted, and rolls back otherwise.
	Check func(ctx context.Context, c fencing.Claim) error

	// Write checks the claim and writes value to the resource, in one step. Where the check is a step of a transaction
	// that the caller drives, it calls between after the check and before the write; elsewhere never. Nil: the guard
	// does not guard writes, only callers that ask first, and the clauses W and C do not apply.
	Write func(ctx context.Context, c fencing.Claim, value string, between func()) error

	// Read returns the last value written, or "" before the first. Nil if Write is.
	Read func(ctx context.Context, resource string) (string, error)

	// Update is a guarded section: it shows the claims, reads the resource, and writes the result of f, or nothing if f
	// fails. F may be called more than once. Its context is the section's, or else Update's. Nil:
	// the guard has no sections, and the clauses U, S and Q do not apply.
	Update func(ctx context.Context, claims fencing.Claims, resource string, f Change) error

	// Ends are guarded sections with transactions that end too early, in each way in which the resource can end one. A
	// clause V applies if its end is there.
	Ends map[End]Ended

	// Hand drives a transaction by hand, with a check inside. Nil: there are no transactions, and H1, H2 and U4 do not
	// apply.
	Hand func(ctx context.Context, c fencing.Claim, h Hand) error

	// Savepoint begins a transaction, shows the claim within a savepoint, rolls that back, calls rival, writes value to
	// the resource and commits. It gives up if the check does not admit the claim. Nil: H3 does not apply.
	Savepoint func(ctx context.Context, c fencing.Claim, rival func(), value string) error

	// Keeper is the operator's side of the guard. Nil: the clauses K and I do not apply.
	Keeper fencing.Keeper

	// SetTerms writes the text of the guard's terms behind its back, or deletes it if it is empty. Nil: I1, I4 and I6 do not
	// apply.
	SetTerms func(ctx context.Context, text string) error

	// Wipe deletes all that the guard keeps, as if it had never been created. Nil: I2 and I3 do not apply.
	Wipe func(ctx context.Context) error

	// Pinned is Check by a guard with that Options.ID. Nil: I5 does not apply.
	Pinned func(ctx context.Context, id fencing.Nonce, c fencing.Claim) error

	// Close ends the client. Nil: no need to end it.
	Close func() error
}

// Change makes a new value of the old one, "" without one.
type Change func(ctx context.Context, old string) (string, error)

// Hand is a transaction driven by hand: it begins, reads another resource, which may give it its view of the data,
// calls Early, shows the claim, reads the resource, writes the result of Change, commits.
type Hand struct {
	Early  func()
	Change func(old string) string
	// Careless: the transaction goes on although the claim was not admitted.
	Careless bool
}

// Open returns one more client of the resource at the address.
type Open func(ctx context.Context, address string) (*Client, error)

// Harness describes one guard and the resource behind it for the clauses.
type Harness struct {
	// Open and Address give the clients of a guard that was created. In child processes Open is the function that RunChild
	// knows by Name.
	Open    Open
	Address string
	Name    string

	// Space is in all claims, so that the guard trusts only this one. Empty: R4 does not apply.
	Space string

	// Restart ends the resource as by a crash and restarts it, with its data on disk, at the same address. If the
	// resource lives in its clients' processes, such as a file, it has no effect: clients are closed before. Nil: D1 is
	// skipped by name, or fails with FENCELOCK_REQUIRE=all in the environment.
	Restart func(t testing.TB)

	// Volatile says that the guard remembers in memory and does not claim more: C1, C2 and D1 do not apply.
	Volatile bool

	// Again reports whether an error says that the database rolled back for internal reasons, such as a deadlock, and
	// that a retry may succeed. Nil: no error does.
	Again func(error) bool

	// Apart says that the claims of a set are judged one after the other, for want of a step that takes them all: S1
	// does not apply.
	Apart bool

	// Blind says that the store does not list the guard's entries, so that Create cannot see that terms were lost.
	Blind bool

	// Ordered: the guard remembers a sequence only with the write, and detects mixed sets: Q3 and Q4 apply.
	Ordered bool

	// Checks is the number of checks of M1, from Clients clients. Default 2000, from 8. FENCELOCK_CHECKS in the
	// environment takes the place of the former. In U2 and U5 each writer writes once for 400 of them, at least 5
	// times, and six times as often with FENCELOCK_DEEP.
	Checks, Clients int
}

// Clause is one numbered obligation of a guard.
type Clause struct {
	ID    string // "R1"
	Group string // "refuses"
	Slug  string // "stale"
	Rule  string // the obligation in words

	needs need
	end   End // what Client.Ends must have
	run   func(t *trial)
}

func (c Clause) String() string { return c.ID + " " + c.Group + "/" + c.Slug }

// need lists the properties that a guard must have for the clause to apply.
type need uint16

const (
	needSpace     need = 1 << iota // Harness.Space
	needWrite                      // Client.Write
	needDurable                    // not Harness.Volatile
	needChild                      // RunChild
	needRestart                    // Harness.Restart
	needUpdate                     // Client.Update
	needHand                       // Client.Hand
	needSavepoint                  // Client.Savepoint
	needKeeper                     // Client.Keeper
	needTogether                   // not Harness.Apart
	needOrdered                    // Harness.Ordered
	needSetTerms                   // Client.SetTerms
	needWipe                       // Client.Wipe
	needPinned                     // Client.Pinned
)

// Clauses returns all clauses in the order in which Run tries them.
func Clauses() []Clause {
	var all []Clause
	for _, group := range [][]Clause{
		refuseClauses, admitClauses, monotoneClauses, writeClauses, sectionClauses, endClauses, handClauses, setClauses,
		sequenceClauses, holdClauses, keeperClauses, memoryClauses, crashClauses,
		durableClauses, errorClauses,
	} {
		all = append(all, group...)
	}
	return all
}

// Outcome says how a clause ended.
type Outcome uint8

const (
	// Passed: the guard keeps the clause.
	Passed Outcome = iota + 1
	// Failed: it breaks the clause.
	Failed
	// Skipped: the harness lacks a requirement of the clause. A failure under FENCELOCK_REQUIRE=all.
	Skipped
	// NotApplicable: the guard does not make the clause's promise.
	NotApplicable
)

// String returns "pass", "FAIL", "skip" or "n/a".
func (o Outcome) String() string {
	return [...]string{"?", "pass", "FAIL", "skip", "n/a"}[min(o, NotApplicable)]
}

// Result is the outcome of one clause.
type Result struct {
	Clause   Clause
	Outcome  Outcome
	Messages []string // the findings, or the reason for the skip
	Notes    []string // the counts
}

// Run tests a guard, one subtest for each clause: Test…/<group>/<clause>. A failure prints the clause's number and
// rule.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, c := range Clauses() {
		t.Run(c.Group+"/"+c.Slug, func(t *testing.T) {
			r := try(t, h, c)
			for _, note := range r.Notes {
				t.Log(note)
			}
			switch r.Outcome {
			case Failed:
				t.Errorf("%s  %s", c.ID, c.Rule)
				for _, m := range r.Messages {
					t.Errorf("    %s", m)
				}
			case Skipped:
				text := fmt.Sprintf("%s  %s\n    not tried: %s", c.ID, c.Rule, r.Messages[0])
				if os.Getenv("FENCELOCK_REQUIRE") == "all" {
					t.Fatal(text)
				}
				t.Skip(text)
			case NotApplicable:
				t.Logf("%s does not apply: %s", c.ID, r.Messages[0])
			}
		})
	}
}

// Check tests a guard and returns its results without failing tb: for tests that expect failures. With only, it tries
// only the clauses with these numbers; an unknown number fails tb.
func Check(tb testing.TB, h Harness, only ...string) []Result {
	tb.Helper()
	var results []Result
	found := 0
	for _, c := range Clauses() {
		wanted := len(only) == 0
		for _, id := range only {
			wanted = wanted || id == c.ID
		}
		if wanted {
			found++
			results = append(results, try(tb, h, c))
		}
	}
	if len(only) > 0 && found != len(only) {
		tb.Fatalf("guardtest: of the clauses %v only %d exist", only, found)
	}
	return results
}
