package engine_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/testtier"
)

// mutant is one way to break the engine: a text that occurs once in a file, and what stands there instead.
type mutant struct {
	what, file, text, instead string
	clauses                   string // of the suite, each of which fails on the in-process driver
	test                      string // of this package, which fails
}

var mutants = []mutant{
	{
		what: "a waiter is not woken", file: "wait.go", clauses: "W1",
		text: "if w := d.waiters[p.RequestID]; w != nil {", instead: "if w := d.waiters[p.RequestID]; false {",
	},
	{
		what: "a wake wakes every waiter", file: "wait.go", test: "TestWakeReachesOneWaiter",
		text: "wake(w.woken)\n\t\t}\n\tcase PushTurns:", instead: "for _, w = range d.waiters {\nwake(w.woken)\n}\n}\n\tcase PushTurns:",
	},
	{
		what: "a waiter that is not woken sends no sign of life", file: "wait.go", clauses: "W6 W10 W11",
		text: "return w.sleepOn(ctx, s, pause*3/4+", instead: "return w.sleepOn(ctx, s, 1000*pause+",
	},
	{
		what: "a loss is not passed on", file: "wait.go", clauses: "P7",
		text: "\t\tlost(p.Loss)\n", instead: "\t\t_ = lost\n",
	},
	{
		what: "an Enter that was refused resolves an earlier doubt", file: "acquire.go", test: "TestDoubtSurvivesRefusals",
		text: "a.doubt = a.doubt || class", instead: "a.doubt = class",
	},
	{
		what: "a grant is dated by its answer", file: "acquire.go", clauses: "L7",
		text: "pos.Incarnation, sent\n", instead: "pos.Incarnation, a.d.clock.Now()\n",
	},
	{
		what: "a renewal is dated by its answer", file: "renew.go", clauses: "L7",
		text: "\t\tout[i] = backend.Renewal{SentAt: sent,", instead: "\t\tsent = d.clock.Now()\n\t\tout[i] = backend.Renewal{SentAt: sent,",
	},
	{
		what: "an attempt that ends leaves its place in the queue", file: "acquire.go", clauses: "C3 M2 K1 K2",
		text: "if (a.placed || a.late) && !a.doubt {", instead: "if false {",
	},
	{
		what: "a service that refuses ends a wait", file: "acquire.go", test: "TestRefusedAttempt",
		text: "class == NotDone && !first.Wait && a.tries", instead: "class == NotDone && a.tries",
	},
	{
		what: "a Leave overtakes an Enter", file: "renew.go", test: "TestLeaveDoesNotOvertakeEnter",
		text: "if err := d.awaitLanding(ctx, g.RequestID); err != nil {", instead: "if err := ctx.Err(); err != nil {",
	},
	{
		what: "a hold that is gone is renewed", file: "renew.go", clauses: "O1 L4 E1",
		text: "if outcomes[n].Gone {", instead: "if false {",
	},
	{
		what: "a step keeps its caller beyond the end of the context", file: "exchange.go", clauses: "C5 D14",
		text: "\tcase <-ctx.Done():\n\t\thow = Ended\n", instead: "",
	},
	{
		what: "an exchange keeps its caller beyond the end of the context", file: "exchange.go",
		test: "TestLeaveDoesNotOvertakeEnter",
		text: "\tcase <-ctx.Done():\n\tcase <-closing:\n", instead: "\tcase <-closing:\n",
	},
	{
		what: "a step that was left is over", file: "exchange.go", test: "TestLeaveWaitsForLateStep",
		text: "\t\tdefer landed()\n", instead: "\t\tlanded()\n",
	},
	{
		what: "a step that is not answered keeps its caller", file: "exchange.go", test: "TestUnansweredStepEnds",
		text: "\t\tlate = timer.C\n", instead: "",
	},
	{
		what: "Close waits for nothing", file: "driver.go", test: "TestCloseWaitsForExchanges",
		text: "err := d.gate.Wait(ctx)", instead: "err := ctx.Err()",
	},
	{
		what: "a proof is dated by its answer", file: "session.go", test: "TestSlowProof",
		text: "if err == nil && r.sent > s.proved {", instead: "if r.sent = all.d.clock.Now(); err == nil {",
	},
	{
		what: "a proof of any age will do", file: "session.go", test: "TestSlowProof",
		text: "case all.d.clock.Now().Sub(s.proved) <= age:", instead: "case age > 0:",
	},
	{
		what: "the end of a session is no loss", file: "session.go", test: "TestSessionIsShared",
		text: "\tfor _, id := range lost {\n", instead: "\tfor _, id := range lost[:0] {\n",
	},
	{
		what: "a session that was outgrown goes on", file: "session.go", test: "TestOutgrownSessionIsReplaced",
		text: "\t\tall.table.Replace(s)\n\t\ts.outgrow()\n", instead: "\t\treturn nil\n",
	},
	{
		what: "a release does not name what may arrive late", file: "renew.go", test: "TestDoubtEndsBesideALivingHold",
		text: "h.s.binding(), h.late, g", instead: "h.s.binding(), nil, g",
	},
	{
		what: "what is in doubt stays on its session", file: "session.go", test: "TestDoubtEndsBesideALivingHold",
		text: "doubts && all.abandonDoubts(s); doubts", instead: "false; doubts",
	},
	{
		what: "a lost hold that may come back is forgotten", file: "wait.go", test: "TestLostHoldThatMayComeBack",
		text: "if !d.sessions.doubtLate(g) {", instead: "if true {",
	},
	{
		what: "few steps in an exchange are no reason for more exchanges", file: "batch.go", test: "TestBatchOfFewSteps",
		text: "return max(1, b.most/b.fewer)", instead: "return 1",
	},
	{
		what: "an endpoint that does not answer is waited for", file: "hedge.go", test: "TestSilentEndpointIsPassedBy",
		text: "\t\tcase <-timer.C:\n\t\t\tsend()\n", instead: "\t\tcase <-timer.C:\n",
	},
	{
		what: "a release does not name what an endpoint may do late", file: "acquire.go", test: "TestSilentEndpointIsPassedBy",
		text: "s != nil && (late || class", instead: "s != nil && (class",
	},
	{
		what: "a hedged release takes its own work for a loss", file: "renew.go", test: "TestSilentEndpointIsPassedBy",
		text: "if late && err == nil && l.Known && left", instead: "if late && false && left",
	},
	{
		what: "a loss reaches another hold of the request", file: "wait.go", test: "TestSessionIsFollowed",
		text: "d.sessions.holdsAnother(of) {", instead: "of.Name != \"\" {",
	},
	{
		what: "a hold is kept that was released while it moved", file: "session.go", test: "TestReleaseOvertakesARenewal",
		text: "return !stands || all", instead: "return stands && false || all",
	},
	{
		what: "a waiter watches the first of its places only", file: "wait.go", test: "TestWaiterWatchesItsPlace",
		text: "pos.Place != \"\" && pos.Place != w.place:", instead: "pos.Place != \"\" && w.place == \"\":",
	},
	{
		what: "a waiter watches its place before time has passed", file: "wait.go", test: "TestWaiterWatchesItsPlace",
		text: "case w.timeouts > 0 && pos.Place", instead: "case pos.Place",
	},
	{
		what: "an acquire of a service with prompt acquires runs elsewhere", file: "acquire.go", test: "TestPromptEnters",
		text: "hedgedUntil(ctx, d, d.enters,", instead: "hedgedUntil(ctx, d, d.prompt,",
	},
	{
		what: "a session that ends is proved in its own time", file: "session.go", test: "TestSessionIsFollowed",
		text: "_ = all.prove(ctx, s, -1)", instead: "continue",
	},
	{
		what: "waiters are not checked", file: "check.go", test: "TestWaitersAreCheckedTogether",
		text: "d.checking = d.gate.Go(func(context.Context) { d.check() })", instead: "d.checking = true",
	},
	{
		what: "every check is a full one", file: "check.go", test: "TestWaitersAreCheckedTogether",
		text: "Quick: !full,", instead: "Quick: false,",
	},
	{
		what: "a check that failed is not made again", file: "check.go", test: "TestWaitersAreCheckedTogether",
		text: "q.due = d.clock.Now().Add(d.spread(checkAgain))", instead: "q.due = d.clock.Now().Add(time.Hour)",
	},
	{
		what: "a check wakes nobody", file: "check.go", test: "TestWaitersAreCheckedTogether",
		text: "\t\t\t\twake(one.woken)\n", instead: "",
	},
	{
		what: "what was handed over is settled once", file: "check.go", test: "TestExpire",
		text: "if again > 0 && !d.gate.Closed() {", instead: "if false {",
	},
	{
		what: "a full check waits for the next quick one", file: "check.go", test: "TestFullChecksAreMadeWhenDue",
		text: "soonest = min(soonest, q.due)", instead: "_ = q.due",
	},
	{
		what: "a hold that expires is not forgotten, nor its name settled", file: "renew.go", test: "TestExpire",
		text: "d.forget(g)\n\td.settleIn(g.Name, left.Settle)", instead: "",
	},
	{
		what: "a waiter without a place polls no faster", file: "wait.go", test: "TestWaiterWithoutAPlacePolls",
		text: "if pos.Poll {", instead: "if false {",
	},
	{
		what: "a waiter polls at the end of no hold", file: "wait.go", test: "TestWaiterWithoutAPlacePolls",
		text: "h != nil && h.RetryAfter > 0 {", instead: "h != nil && false {",
	},
	{
		what: "a refusal for good is waited out", file: "acquire.go", test: "TestRefusedPositionEndsAWait",
		text: "case err == nil && pos.Refused != nil:", instead: "case err == nil && pos.Refused != nil && !first.Wait:",
	},
	{
		what: "two steps of a name go together", file: "batch.go", test: "TestBatch",
		text: "if names[one.name] || len(together)", instead: "if len(together)",
	},
}

// TestMutants breaks the engine in one way at a time, and wants the suite or a test of this package to fail.
func TestMutants(t *testing.T) {
	t.Parallel()
	for _, m := range mutants {
		t.Run(strings.ReplaceAll(m.what, " ", "-"), func(t *testing.T) {
			source, err := os.ReadFile(m.file)
			if err != nil {
				t.Fatal(err)
			}
			if n := strings.Count(string(source), m.text); n != 1 {
				t.Fatalf("%s has the text %q %d times, want once", m.file, m.text, n)
			}
			testtier.Only(t)
			out := m.run(t, strings.Replace(string(source), m.text, m.instead, 1))
			for _, id := range strings.Fields(m.clauses) {
				if !strings.Contains(out, "failed: "+id+" ") {
					t.Errorf("clause %s does not fail:\n%s", id, out)
				}
			}
			if m.test != "" && !strings.Contains(out, "--- FAIL: "+m.test) {
				t.Errorf("%s does not fail:\n%s", m.test, out)
			}
		})
	}
}

// run runs the suite on the in-process driver, or the test, with the file replaced.
func (m mutant) run(t *testing.T, source string) string {
	dir := t.TempDir()
	path, err := filepath.Abs(m.file)
	if err != nil {
		t.Fatal(err)
	}
	broken, overlay := filepath.Join(dir, m.file), filepath.Join(dir, "overlay.json")
	text, err := json.Marshal(map[string]map[string]string{"Replace": {path: broken}})
	if err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string][]byte{broken: []byte(source), overlay: text} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run, pkg := "^TestMemory$", "../../conformance"
	if m.test != "" {
		run, pkg = "^"+m.test+"$", "."
	}
	out, err := exec.CommandContext(t.Context(),
		"go", "test", "-short", "-count=1", "-v", "-overlay", overlay, "-run", run, pkg).CombinedOutput()
	if err == nil {
		t.Errorf("this mutant survives")
	}
	return string(out)
}
