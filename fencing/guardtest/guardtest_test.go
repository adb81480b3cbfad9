//go:build unix

package guardtest_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
)

const space = "cluster-1"

func TestMain(m *testing.M) {
	opens := map[string]guardtest.Open{"files": opener(break_{})}
	for _, mutant := range mutants() {
		opens[mutant.name] = opener(mutant.break_)
	}
	guardtest.RunChild(opens)
	goleak.VerifyTestMain(m)
}

// The suite's own resource passes, so what a mutant fails is what was broken.
func TestFiles(t *testing.T) {
	guardtest.Run(t, guardtest.Harness{
		Name: "files", Open: opener(break_{}), Address: created(t), Space: space,
		Restart: func(testing.TB) {}, Checks: 2000, Ordered: true,
	})
}

// created returns a folder with the memory of a guard.
func created(t *testing.T) string {
	dir := t.TempDir()
	if err := (&files{dir: dir}).Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestMemory(t *testing.T) {
	for _, space := range []string{"", space} {
		t.Run("space-"+space, func(t *testing.T) {
			guard := new(fencing.Memory)
			var values sync.Map
			guardtest.Run(t, guardtest.Harness{
				Volatile: true, Space: space, Ordered: true,
				Open: func(context.Context, string) (*guardtest.Client, error) {
					return &guardtest.Client{
						Check: func(ctx context.Context, c fencing.Claim) error { return guard.Check(ctx, c) },
						Write: func(ctx context.Context, c fencing.Claim, value string, _ func()) error {
							return guard.Do(ctx, c, func() error { values.Store(c.Resource, value); return nil })
						},
						Update: func(ctx context.Context, c fencing.Claims, resource string, f guardtest.Change) error {
							return guard.Do(ctx, c, func() error {
								old, _ := values.Load(resource)
								text, _ := old.(string)
								value, err := f(ctx, text)
								if err == nil {
									values.Store(resource, value)
								}
								return err
							})
						},
						Keeper: guard,
						Read: func(_ context.Context, resource string) (string, error) {
							value, _ := values.Load(resource)
							text, _ := value.(string)
							return text, nil
						},
					}, nil
				},
			})
		})
	}
}

func TestClausesAreNumberedOnceAndDocumented(t *testing.T) {
	doc, err := os.ReadFile("guardtest.go")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, c := range guardtest.Clauses() {
		if seen[c.ID] || seen[c.Group+"/"+c.Slug] {
			t.Errorf("%v is there twice", c)
		}
		seen[c.ID], seen[c.Group+"/"+c.Slug] = true, true
		if !strings.Contains(string(doc), "//   - "+c.ID+" "+c.Slug+"\n") {
			t.Errorf("%v is missing from the package comment", c)
		}
	}
}

func TestUnsupportedClausesAreSkippedByName(t *testing.T) {
	h := guardtest.Harness{Name: "nobody", Open: opener(break_{}), Address: created(t), Space: space}
	want := map[string]string{"C1": "RunChild", "C2": "RunChild", "D1": "Harness.Restart"}
	for _, r := range guardtest.Check(t, h, "C1", "C2", "D1") {
		if r.Outcome != guardtest.Skipped || !strings.Contains(r.Messages[0], want[r.Clause.ID]) {
			t.Errorf("%v = %v %q, want it skipped for lack of %s", r.Clause, r.Outcome, r.Messages, want[r.Clause.ID])
		}
	}
	h.Volatile, h.Space = true, ""
	for _, r := range guardtest.Check(t, h, "C1", "C2", "D1", "R4") {
		if r.Outcome != guardtest.NotApplicable {
			t.Errorf("%v = %v %q, want it not to apply", r.Clause, r.Outcome, r.Messages)
		}
	}
}

// mutant is one way to get a guard wrong.
type mutant struct {
	name   string
	breaks []string // clauses that must fail
	break_
}

func mutants() []mutant {
	type claim = fencing.Claim
	return []mutant{
		{name: "does not compare tokens", breaks: []string{"R1", "R5", "M1", "M2", "W1", "W2"}, break_: break_{
			judge: func(c claim, r *record) error {
				r.Seen = fencing.Seen{}
				return judge(c, r)
			},
		}},
		{name: "accepts zero", breaks: []string{"R2", "R5", "W1"}, break_: break_{
			judge: func(c claim, r *record) error {
				if c.Token == 0 {
					return nil
				}
				return judge(c, r)
			},
		}},
		{name: "accepts zero for a new resource", breaks: []string{"R2"}, break_: break_{
			judge: func(c claim, r *record) error {
				if c.Token == 0 && r.Token == 0 {
					return nil
				}
				return judge(c, r)
			},
		}},
		{name: "accepts shared holds", breaks: []string{"R3", "R5", "R6"}, break_: break_{
			judge: func(c claim, r *record) error {
				c.Token = fencing.Token(c.Token.Order())
				return judge(c, r)
			},
		}},
		{name: "accepts every space", breaks: []string{"R4", "R5", "R6"}, break_: break_{
			judge: func(c claim, r *record) error { c.Space = space; return judge(c, r) },
		}},
		{name: "accepts tokens without a space", breaks: []string{"R4"}, break_: break_{
			judge: func(c claim, r *record) error {
				if c.Space == "" {
					c.Space = space
				}
				return judge(c, r)
			},
		}},
		{name: "errors do not contain the tokens", breaks: []string{"R5"}, break_: break_{
			judge: func(c claim, r *record) error {
				if err := judge(c, r); err != nil && r.Token == 40 {
					return fmt.Errorf("no: %w", fencing.ErrStale)
				}
				return judge(c, r)
			},
		}},
		{name: "remembers refused tokens", breaks: []string{"R6"}, break_: break_{
			judge: func(c claim, r *record) error {
				err := judge(c, r)
				if err != nil {
					r.Token = max(r.Token, fencing.Token(c.Token.Order()))
				}
				return err
			},
		}},
		{name: "admits tokens above MaxToken", breaks: []string{"R7"}, break_: break_{credulous: true}},
		{name: "admits each token only once", breaks: []string{"A1"}, break_: break_{
			judge: func(c claim, r *record) error {
				if r.Token == c.Token {
					return &fencing.StaleError{Resource: c.Resource, Token: c.Token, Highest: r.Token}
				}
				return judge(c, r)
			},
		}},
		{name: "ignores case in names", breaks: []string{"A2"}, break_: break_{name: strings.ToLower}},
		{name: "trims spaces from names", breaks: []string{"A2"}, break_: break_{name: strings.TrimSpace}},
		{name: "truncates names to 255 bytes", breaks: []string{"A2"}, break_: break_{
			name: func(name string) string { return name[:min(len(name), 255)] },
		}},
		{name: "trims slashes from names", breaks: []string{"A2"}, break_: break_{
			name: func(name string) string { return strings.TrimRight(name, "/") },
		}},
		{name: "compares tokens as floats", breaks: []string{"A3"}, break_: break_{
			judge: func(c claim, r *record) error {
				if float64(c.Token) >= float64(r.Token) && c.Token.Exclusive() {
					r.Token = 0
				}
				return judge(c, r)
			},
		}},
		{name: "compares tokens as text", breaks: []string{"A1", "A3"}, break_: break_{
			judge: func(c claim, r *record) error {
				if c.Token.Exclusive() && r.Token != 0 {
					if c.Token.String() < r.Token.String() {
						return &fencing.StaleError{Resource: c.Resource, Token: c.Token, Highest: r.Token}
					}
					r.Token = 0
				}
				return judge(c, r)
			},
		}},
		{name: "reads the value before it checks the claim", breaks: []string{"U1", "U2", "U5"}, break_: break_{ahead: true}},
		{name: "calls the function of a refused section", breaks: []string{"U3"}, break_: break_{heedless: true}},
		{name: "allows nested sections", breaks: []string{"U4"}, break_: break_{naive: true}},
		{name: "does not detect a deadlock", breaks: []string{"V1"}, break_: break_{trusted: guardtest.Deadlock}},
		{name: "does not detect an implicit commit", breaks: []string{"V2"}, break_: break_{
			trusted: guardtest.ImplicitCommit,
		}},
		{name: "does not detect an interrupt", breaks: []string{"V3"}, break_: break_{trusted: guardtest.Interrupt}},
		{name: "does not detect a lost connection", breaks: []string{"V4"}, break_: break_{
			trusted: guardtest.LostConnection,
		}},
		{name: "does not detect a manual commit", breaks: []string{"V5"}, break_: break_{trusted: guardtest.ManualCommit}},
		{name: "retries an unfenced section", breaks: []string{"V1", "V5"}, break_: break_{retried: true}},
		{name: "reports an unfenced section as refused", breaks: []string{"V1", "V5"}, break_: break_{accused: true}},
		{name: "reads from an old view", breaks: []string{"H1"}, break_: break_{oldView: true}},
		{name: "continues a transaction after a refusal", breaks: []string{"H2"}, break_: break_{careless: true}},
		{name: "allows a check in a savepoint", breaks: []string{"H3"}, break_: break_{undone: true}},
		{name: "remembers part of a refused set", breaks: []string{"S1"}, break_: break_{piecemeal: true}},
		{name: "locks claims in the order of the set", breaks: []string{"S2"}, break_: break_{unsorted: true}},
		{name: "ignores sequences", breaks: []string{"Q1", "Q2"}, break_: break_{
			judge: func(c claim, r *record) error { return judge(c.At(0), r) },
		}},
		{name: "compares sequences of different holds", breaks: []string{"Q2"}, break_: break_{
			judge: func(c claim, r *record) error {
				if r.Sequence > c.Sequence && c.Sequence > 0 {
					return &fencing.SequenceError{
						Resource: c.Resource, Token: c.Token, Sequence: c.Sequence, Last: r.Sequence,
					}
				}
				return judge(c, r)
			},
		}},
		{name: "remembers a sequence before its write", breaks: []string{"Q3"}, break_: break_{hasty: true}},
		{name: "treats a partly repeated set as repeated", breaks: []string{"Q4"}, break_: break_{mixes: true}},
		{name: "keeps the sequence of the previous hold", breaks: []string{"Q2"}, break_: break_{
			judge: func(c claim, r *record) error {
				last := r.Sequence
				err := judge(c, r)
				if err == nil {
					r.Sequence = max(r.Sequence, last)
				}
				return err
			},
		}},
		{name: "does not change the epoch in Accept", breaks: []string{"K1"}, break_: break_{
			accept: func(t, next fencing.Terms) fencing.Terms { next.Epoch = t.Epoch; return next },
		}},
		{name: "does not store the space in Accept", breaks: []string{"K1"}, break_: break_{
			accept: func(_, next fencing.Terms) fencing.Terms { next.Space = ""; return next },
		}},
		{name: "applies the floor only to new resources", breaks: []string{"K1", "K2"}, break_: break_{
			judge: func(c claim, r *record) error {
				if r.Token != 0 {
					r.terms.Floor = 0
				}
				return judge(c, r)
			},
		}},
		{name: "drops the space in Raise", breaks: []string{"K2"}, break_: break_{
			accept: func(t, next fencing.Terms) fencing.Terms {
				if next.Epoch == t.Epoch {
					next.Space = ""
				}
				return next
			},
		}},
		{name: "cleans tokens at the floor", breaks: []string{"K3"}, break_: break_{
			needless: func(t fencing.Terms, s fencing.Seen) bool {
				return t.Needless(s) || s.Token == t.Floor && s.Generation == fencing.Generation{}
			},
		}},
		{name: "cleans tokens of a generation below the floor", breaks: []string{"K3"}, break_: break_{
			needless: func(t fencing.Terms, s fencing.Seen) bool { return t.Needless(s) || s.Token < t.Floor },
		}},
		{name: "cleans every token", breaks: []string{"K3"}, break_: break_{
			needless: func(fencing.Terms, fencing.Seen) bool { return true },
		}},
		{name: "admits another hold with the same token", breaks: []string{"N1"}, break_: break_{
			judge: func(c claim, r *record) error {
				if c.Token == r.Token {
					c.Nonce = r.Nonce
				}
				return judge(c, r)
			},
		}},
		{name: "admits a hold without a nonce", breaks: []string{"N1", "N2"}, break_: break_{
			judge: func(c claim, r *record) error {
				if c.Token == r.Token && c.Nonce == (fencing.Nonce{}) {
					c.Nonce = r.Nonce
				}
				return judge(c, r)
			},
		}},
		{name: "does not remember a nonce shown later", breaks: []string{"N2"}, break_: break_{
			judge: func(c claim, r *record) error {
				before := r.Seen
				err := judge(c, r)
				if r.Token == before.Token {
					r.Nonce = before.Nonce
				}
				return err
			},
		}},
		{name: "compares tokens before generations", breaks: []string{"N3"}, break_: break_{
			judge: func(c claim, r *record) error { c.Generation = fencing.Generation{}; return judge(c, r) },
		}},
		{name: "compares generations only by number", breaks: []string{"N3"}, break_: break_{
			judge: func(c claim, r *record) error {
				if c.Generation.Number == r.Generation.Number {
					c.Generation = r.Generation
				}
				return judge(c, r)
			},
		}},
		{name: "admits a claim without a generation", breaks: []string{"N3"}, break_: break_{
			judge: func(c claim, r *record) error {
				if c.Generation.Number == 0 {
					c.Generation = r.Generation
				}
				return judge(c, r)
			},
		}},
		{name: "creates missing terms in a check", breaks: []string{"I1", "I3"}, break_: break_{mends: true}},
		{name: "creates lost terms in Create", breaks: []string{"I1"}, break_: break_{heals: true}},
		{name: "ignores the ID of the memory", breaks: []string{"I1", "I2", "I5"}, break_: break_{anyID: true}},
		{name: "accepts terms of an earlier epoch", breaks: []string{"I6"}, break_: break_{
			judge: func(c claim, r *record) error {
				r.terms.Epoch = max(r.terms.Epoch, r.Epoch)
				return judge(c, r)
			},
		}},
		{name: "ignores the format of the memory", breaks: []string{"I4"}, break_: break_{credits: true}},
		{name: "checks and writes without a lock", breaks: []string{"M1", "M2", "W2"}, break_: break_{unlocked: true}},
		{name: "writes before it checks", breaks: []string{"W1"}, break_: break_{early: true}},
		{
			name: "saves the token before the value", breaks: []string{"W2", "C1"},
			break_: break_{steps: []step{saveToken, saveValue}},
		},
		{name: "saves the value before the token", breaks: []string{"C1"}, break_: break_{steps: []step{saveValue, saveToken}}},
		{name: "answers before it saves", breaks: []string{"C2"}, break_: break_{
			late: 3, buffered: map[string][]record{},
		}},
		{name: "forgets tokens when it restarts", breaks: []string{"D1"}, break_: break_{tokens: map[string]fencing.Token{}}},
		{name: "ignores an ended context", breaks: []string{"E1"}, break_: break_{deaf: true}},
	}
}

// TestMutants breaks the guard in one way at a time and wants the suite to see each of them, on the clauses that say
// what was broken.
func TestMutants(t *testing.T) {
	var rows []string
	for _, m := range mutants() {
		t.Run(strings.NewReplacer(" ", "-", ",", "").Replace(m.name), func(t *testing.T) {
			h := guardtest.Harness{
				Name: m.name, Open: opener(m.break_), Address: created(t), Space: space, Checks: 2000,
				Restart: func(testing.TB) { clear(m.tokens) }, Ordered: true,
			}
			var killers []string
			// A race that a clause brings about may miss on a busy machine, where one side comes too late.
			for left, tries := m.breaks, 3; len(left) > 0; tries-- {
				all := guardtest.Check(t, h, left...)
				left = nil
				for _, r := range all {
					switch {
					case r.Outcome == guardtest.Failed:
						killers = append(killers, r.Clause.ID)
					case r.Outcome == guardtest.Passed && tries > 1:
						left = append(left, r.Clause.ID)
					default:
						t.Errorf("%v ended with %v, want it to fail", r.Clause, r.Outcome)
					}
				}
			}
			slices.Sort(killers)
			rows = append(rows, fmt.Sprintf("%-34s killed by %s", m.name, strings.Join(slices.Compact(killers), " ")))
		})
	}
	t.Logf("%d mutants\n%s", len(rows), strings.Join(rows, "\n"))
}
