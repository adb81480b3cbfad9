package engine_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/internal/mutate"
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/internal/testtier"
)

// mutant is one way to break the engine: a text that occurs once in a file, and what stands there instead.
type mutant struct {
	what, file, text, instead string
	clauses                   string            // of the suite, each of which fails on the in-process driver
	on                        map[string]string // by package of a binding: clauses that fail there, against servers
	test                      string            // of this package, which fails
}

var mutants = []mutant{
	{
		what: "a push does not wake its waiter", file: "wait.go", clauses: "W1",
		text: "if w := d.waiters[p.RequestID]; w != nil {", instead: "if w := d.waiters[p.RequestID]; false {",
		on: map[string]string{"redis": "W1", "redlock": "W1", "postgres": "W1", "builtin": "W1"},
	},
	{
		what: "a watch does not wake its waiter", file: "wait.go",
		text: "func() { wake(w.woken) }", instead: "func() {}",
		on: map[string]string{"etcd": "W1", "zookeeper": "W1"},
	},
	{
		what: "a push wakes every waiter", file: "wait.go", test: "TestWakeReachesOneWaiter",
		text: "wake(w.woken)\n\t\t}\n\tcase PushTurns:", instead: "for _, w = range d.waiters {\nwake(w.woken)\n}\n}\n\tcase PushTurns:",
		on: map[string]string{"redis": "W12", "redlock": "W12", "postgres": "W12", "builtin": "W12"},
	},
	{
		what: "a watch wakes every waiter", file: "wait.go",
		text: "func() { wake(w.woken) }", instead: "func() { w.d.notify(Push{What: PushGap}) }",
		on: map[string]string{"etcd": "W12", "zookeeper": "W12"},
	},
	{
		what: "a waiter that is not woken does not poll", file: "wait.go", clauses: "W6 W10 W11",
		text: "return w.sleepOn(ctx, s, pause*3/4+", instead: "return w.sleepOn(ctx, s, 1000*pause+",
	},
	{
		what: "a pushed loss is not reported", file: "wait.go", clauses: "P7",
		text: "\t\tlost(p.Loss)\n", instead: "\t\t_ = lost\n",
		on: map[string]string{"etcd": "P7", "postgres": "P7", "zookeeper": "P7", "builtin": "P7"},
	},
	{
		what: "a refused Enter clears an earlier doubt", file: "acquire.go", test: "TestDoubtSurvivesRefusals",
		text: "a.doubt = a.doubt || class", instead: "a.doubt = class",
	},
	{
		what: "SentAt of a grant is read when the answer arrives", file: "acquire.go", clauses: "L7",
		text: "pos.Incarnation, sent\n", instead: "pos.Incarnation, a.d.clock.Now()\n",
		on: map[string]string{"redis": "L7", "redlock": "L7", "etcd": "L7", "postgres": "L7", "zookeeper": "L7", "builtin": "L7"},
	},
	{
		what: "SentAt of a renewal is read when the answer arrives", file: "renew.go", clauses: "L7",
		text: "\t\tout[i] = backend.Renewal{SentAt: sent,", instead: "\t\tsent = d.clock.Now()\n\t\tout[i] = backend.Renewal{SentAt: sent,",
		on: map[string]string{"redis": "L7", "redlock": "L7", "etcd": "L7", "postgres": "L7", "zookeeper": "L7", "builtin": "L7"},
	},
	{
		what: "an attempt that ends keeps its place in the queue", file: "acquire.go", clauses: "C3 M2 K1 K2",
		text: "len(rs) > 0 && !a.doubt {", instead: "false && len(rs) > 0 {",
		on: map[string]string{"redis": "C3", "redlock": "C3 K2", "etcd": "K2", "postgres": "C3 K2", "zookeeper": "C3 K2", "builtin": "C3 M2 K2"},
	},
	{
		what: "each attempt removes the entry that all share", file: "acquire.go", test: "TestLastAttemptRemovesTheEntry",
		text: "free := f.running == 0", instead: "free := true",
	},
	{
		what: "an attempt that ends removes another one's hold", file: "acquire.go", test: "TestLastAttemptRemovesTheEntry",
		text: "free && known && h.incarnation != \"\" {", instead: "free && known && h.incarnation == \"never\" {",
	},
	{
		what: "a repeated cleanup ends the hold of a later attempt", file: "acquire.go", test: "TestCleanupSparesALaterAttempt",
		text: "if d.oneEntry && !d.beginRemoval(g) {", instead: "if d.oneEntry && n == 1 && !d.beginRemoval(g) {",
	},
	{
		what: "every exchange ends after two seconds", file: "driver.go", test: "TestPatience",
		text: "d.timeout = patient.Patience()", instead: "_ = patient",
	},
	{
		what: "a feed that nothing wakes is read once a second", file: "inspect.go", test: "TestPolledFeed",
		text: "every = polled.Every()", instead: "_ = polled",
	},
	{
		what: "each list begins at the first name", file: "inspect.go", test: "TestListAfter",
		text: "after := first; ; {", instead: "after := first[:0]; ; {",
	},
	{
		what: "a refusal by the service ends a wait", file: "acquire.go", test: "TestRefusedAttempt",
		text: "class == NotDone && !first.Wait && a.tries", instead: "class == NotDone && a.tries",
	},
	{
		what: "the rest of a Leave is not retried", file: "renew.go", test: "TestRestOfALeave",
		text: "case done || d.clock", instead: "case true || done || d.clock",
	},
	{
		what: "the rest of a Leave is retried after the TTL", file: "renew.go", test: "TestRestOfALeave",
		text: "Sub(began) > g.TTL:", instead: "Sub(began) > 100*g.TTL:",
	},
	{
		what: "the rest of a Leave is not sent at Close", file: "renew.go", test: "TestRestOfALeave",
		text: "				rest(closing)\n", instead: "",
	},
	{
		what: "a waiter that no push reaches is checked but does not poll", file: "wait.go", test: "TestPlacedWaiterPolls",
		text: "ok && pos.Placed && !pos.Poll {", instead: "ok && pos.Placed {",
	},
	{
		what: "a Leave overtakes an Enter", file: "renew.go", test: "TestLeaveDoesNotOvertakeEnter",
		text: "if err := d.awaitLanding(ctx, g.RequestID); err != nil {", instead: "if err := ctx.Err(); err != nil {",
	},
	{
		what: "a renewal of a lost hold is confirmed", file: "renew.go", clauses: "O1 L4 E1",
		text: "if outcomes[n].Gone {", instead: "if false {",
		on: map[string]string{"redis": "O1 L4 E1", "redlock": "O1 L4 E1", "etcd": "O1 E1", "postgres": "O1 E1", "zookeeper": "O1 E1", "builtin": "O1 E1"},
	},
	{
		what: "a step does not return when its context ends", file: "exchange.go", clauses: "C5 D14",
		text: "\tcase <-ctx.Done():\n\t\thow = Ended\n", instead: "",
	},
	{
		what: "an exchange does not return when its context ends", file: "exchange.go",
		test: "TestLeaveDoesNotOvertakeEnter",
		text: "\tcase <-ctx.Done():\n\tcase <-closing:\n", instead: "\tcase <-closing:\n",
	},
	{
		what: "an abandoned step counts as finished", file: "exchange.go", test: "TestLeaveWaitsForLateStep",
		text: "\t\tdefer landed()\n", instead: "\t\tlanded()\n",
	},
	{
		what: "a step without an answer does not return", file: "exchange.go", test: "TestUnansweredStepEnds",
		text: "\t\tlate = timer.C\n", instead: "",
	},
	{
		what: "Close does not wait for exchanges", file: "driver.go", test: "TestCloseWaitsForExchanges",
		text: "err := d.gate.Wait(ctx)", instead: "err := ctx.Err()",
	},
	{
		what: "a proof is dated when its answer arrives", file: "session.go", test: "TestSlowProof",
		text: "if err == nil && r.sent > s.proved {", instead: "if r.sent = all.d.clock.Now(); err == nil {",
	},
	{
		what: "a proof of any age is accepted", file: "session.go", test: "TestSlowProof",
		text: "case all.d.clock.Now().Sub(s.proved) <= age:", instead: "case age > 0:",
	},
	{
		what: "the end of a session is not reported as a loss", file: "session.go", test: "TestSessionIsShared",
		text: "\tfor _, id := range lost {\n", instead: "\tfor _, id := range lost[:0] {\n",
	},
	{
		what: "each TTL has its own session", file: "session.go", test: "TestSimilarTTLsShareASession",
		text: "exact || len(all.table.Live()) < maxExact", instead: "true || exact",
	},
	{
		what: "a session is longer than the service's maximum TTL", file: "session.go",
		test: "TestSimilarTTLsShareASession",
		text: "if d.MaxTTL > 0 {", instead: "if false {",
	},
	{
		what: "an outgrown session is kept", file: "session.go", test: "TestOutgrownSessionIsReplaced",
		text: "\t\tall.table.Abandon(s)\n\t\ts.outgrow()\n", instead: "\t\treturn nil\n",
	},
	{
		what: "a release does not name requests that may arrive late", file: "renew.go",
		test: "TestDoubtEndsBesideALivingHold",
		text: "h.s.binding(), h.late, g", instead: "h.s.binding(), nil, g",
	},
	{
		what: "the old session of a place may end before the place has moved", file: "acquire.go",
		test: "TestPlaceKeepsItsSession",
		text: "a.past = append(a.past, a.s)", instead: "a.s.Leave(1)",
	},
	{
		what: "a session to which a hold may have moved ends", file: "renew.go", test: "TestUnansweredMoveKeepsItsSession",
		text: "d.sessions.stay(s)", instead: "",
	},
	{
		what: "an answer without a caller leaves its step recorded as late", file: "acquire.go",
		test: "TestAnswerWithoutACallerLeavesNothingLate",
		text: "d.sessions.answered(rs, e.Attempt)", instead: "",
	},
	{
		what: "a place that cannot be removed stays on its session", file: "acquire.go",
		test: "TestPlaceThatCannotBeRemovedEndsWithItsSession",
		text: "a.d.sessions.keepPlaces(rs, a.s)", instead: "",
	},
	{
		what: "requests in doubt stay on their session", file: "session.go", test: "TestDoubtEndsBesideALivingHold",
		text: "doubts && all.abandonDoubts(s); doubts", instead: "false; doubts",
	},
	{
		what: "a lost hold that may come back is forgotten", file: "wait.go", test: "TestLostHoldThatMayComeBack",
		text: "if !d.sessions.doubtLate(g) {", instead: "if true {",
	},
	{
		what: "small exchanges are not sent concurrently", file: "batch.go", test: "TestBatchOfFewSteps",
		text: "return max(1, b.most/b.fewer)", instead: "return 1",
	},
	{
		what: "a step waits for an endpoint that does not answer", file: "hedge.go", test: "TestSilentEndpointIsPassedBy",
		text: "if sent < maxSendings && sending < maxUnanswered {", instead: "if false {",
	},
	{
		what: "a step refused by one endpoint is sent to the next too late", file: "hedge.go",
		test: "TestSilentEndpointIsPassedBy",
		text: "timer.Reset(hedgeRetry)", instead: "",
	},
	{
		what: "an unused session is not discarded", file: "session.go", test: "TestSilentEndpointIsPassedBy",
		text: "all.discard(another)\n", instead: "\n",
	},
	{
		what: "a release does not name steps that an endpoint may execute late", file: "acquire.go",
		test: "TestSilentEndpointIsPassedBy",
		text: "s != nil && (late || class", instead: "s != nil && (class",
	},
	{
		what: "a hedged release reports its own effect as a loss", file: "renew.go", test: "TestSilentEndpointIsPassedBy",
		text: "if late && err == nil && l.Known && left", instead: "if late && false && left",
	},
	{
		what: "a loss of an earlier hold ends the request's current hold", file: "wait.go", test: "TestSessionIsFollowed",
		text: "d.sessions.holdsAnother(of) {", instead: "of.Name != \"\" {",
	},
	{
		what: "a hold that was released while it moved is kept", file: "holds.go", test: "TestReleaseOvertakesARenewal",
		text: "return !stands || all", instead: "return stands && false || all",
	},
	{
		what: "a waiter watches only the first of its places", file: "wait.go", test: "TestWaiterWatchesItsPlace",
		text: "pos.Place != \"\" && pos.Place != w.place:", instead: "pos.Place != \"\" && w.place == \"\":",
	},
	{
		what: "a waiter watches its place without delay", file: "wait.go", test: "TestWaiterWatchesItsPlace",
		text: "case w.timeouts > 0 && pos.Place", instead: "case pos.Place",
	},
	{
		what: "PromptEnters is ignored", file: "driver.go", test: "TestPromptEnters",
		text: "d.enters = d.enters || d.prompt", instead: "d.enters = d.prompt",
	},
	{
		what: "the Leave of an abandoned attempt does not name its place", file: "renew.go",
		test: "TestAbandonedAttemptNamesItsPlace",
		text: "l := Leaving{Grant: g, Place: place}", instead: "l := Leaving{Grant: g}",
	},
	{
		what: "an attempt that ends does not remove its crossed Enters", file: "acquire.go",
		test: "TestCrossedEntersAreRemovedByRequest",
		text: "place, crossed := a.place, a.crossed", instead: "place, crossed := a.place, false",
	},
	{
		what: "the removal of crossed Enters ends the hold of another attempt", file: "renew.go",
		test: "TestCrossedEntersSpareTheHoldOfAnotherAttempt",
		text: "if crossed && !d.granted(g.RequestID) {", instead: "if crossed {",
	},
	{
		what: "an Enter that returns no place clears the place", file: "acquire.go", test: "TestPlaceOutlastsAPoll",
		text: "|| p.Held || !p.Poll {", instead: "|| p.Held || true {",
	},
	{
		what: "an attempt does not know that it shares its request", file: "acquire.go",
		test: "TestAttemptKnowsThatItSharesItsRequest",
		text: "f.shared = f.shared || f.attempts > 1", instead: "",
	},
	{
		what: "a ping has the timeout of other exchanges", file: "exchange.go", test: "TestPingOfASlowService",
		text: "return max(d.timeout, time.Until(at))", instead: "return min(d.timeout, time.Until(at))",
	},
	{
		what: "each call makes its own probe", file: "driver.go", test: "TestProbeIsShared",
		text: "probes > before &&", instead: "probes < before &&",
	},
	{
		what: "a refused Enter is retried as if it had been sent", file: "acquire.go",
		test: "TestAbandonedAttemptNamesItsPlace",
		text: "(err == nil || late || class != NotDone)", instead: "(class != NotDone || true)",
	},
	{
		what: "granted attempts are not reused", file: "acquire.go", test: "TestGrantedAttemptsAreUsedAgain",
		text: "\t\td.free.Put(a)\n", instead: "",
	},
	{
		what: "an unknown outcome has no reason", file: "acquire.go", test: "TestUnknownOutcomeHasAReason",
		text: "\t\t\t\ta.failed = err\n", instead: "",
	},
	{
		what: "an attempt is reused that a watch may yet wake", file: "acquire.go", test: "TestLateWatchWakesNoLaterAttempt",
		text: " && a.waiter.watching == nil {", instead: " {",
	},
	{
		what: "only Prove proves a session", file: "session.go", test: "TestOtherExchangesProveASession",
		text: "s.proved = max(s.proved, s.proofs.Proved(s.own))", instead: "_ = s.proofs.Proved",
	},
	{
		what: "a renewal proves its session twice", file: "renew.go", test: "TestOtherExchangesProveASession",
		text: "age = shortest // Extend proves it", instead: "age = 0",
	},
	{
		what: "a grant outlasts its maximum", file: "acquire.go", test: "TestHoldWithAMaximum",
		text: "if !pos.Last.IsZero() {", instead: "if false {",
	},
	{
		what: "a renewal outlasts the maximum", file: "renew.go", test: "TestHoldWithAMaximum",
		text: "!last.IsZero() && last.Sub(sent) < ttl {", instead: "false {",
	},
	{
		what: "a renewal that finds the end of its session does not report it", file: "renew.go",
		test: "TestRenewalFindsTheEndOfTheSession",
		text: "backend.ErrUnavailable, err); r.holds[n].Known {", instead: "backend.ErrUnavailable, err); false {",
	},
	{
		what: "the reason of a pushed loss is forgotten", file: "holds.go", test: "TestReasonOfAPushedLossIsKept",
		text: "\t\th.loss = loss\n", instead: "\t\t_ = h\n",
	},
	{
		what: "a hold whose loss was pushed keeps its session", file: "holds.go", test: "TestLostHoldLeavesItsSession",
		text: "\t\t\tif !all.doubtLate(g) {\n", instead: "\t\t\tif false {\n",
	},
	{
		what: "a denied cleanup is not repeated", file: "acquire.go", test: "TestDeniedCleanupIsRepeated",
		text: "kit.Classified(err) && !refused", instead: "(kit.Classified(err) || refused)",
	},
	{
		what: "Close waits for cleanup as long as for an exchange", file: "driver.go", test: "TestCloseBoundsCleanup",
		text: "func() { close(d.late) }", instead: "func() {}",
	},
	{
		what: "a session is not proved immediately when its follower ends", file: "session.go",
		test: "TestSessionIsFollowed",
		text: "_ = all.prove(ctx, s, -1)", instead: "continue",
	},
	{
		what: "waiters are not checked", file: "check.go", test: "TestWaitersAreCheckedTogether",
		text: "d.checking = d.gate.Go(func(context.Context) { d.check() })", instead: "d.checking = true",
		on: map[string]string{"redis": "W10", "redlock": "W10", "postgres": "W10"},
	},
	{
		what: "every check is a full check", file: "check.go", test: "TestWaitersAreCheckedTogether",
		text: "Quick: !full,", instead: "Quick: false,",
	},
	{
		what: "a failed check is not retried in time", file: "check.go", test: "TestWaitersAreCheckedTogether",
		text: "q.due = d.clock.Now().Add(d.spread(checkAgain))", instead: "q.due = d.clock.Now().Add(time.Hour)",
	},
	{
		what: "a check wakes no waiter", file: "check.go", test: "TestWaitersAreCheckedTogether",
		text: "\t\t\t\twake(one.woken)\n", instead: "_ = one\n",
	},
	{
		what: "a hand-over is settled only once", file: "check.go", test: "TestExpire",
		text: "if again > 0 && !d.gate.Closed() {", instead: "if false {",
	},
	{
		what: "a full check waits for the next quick check", file: "check.go", test: "TestFullChecksAreMadeWhenDue",
		text: "soonest = min(soonest, q.due)", instead: "_ = q.due",
	},
	{
		what: "an expired hold is not forgotten and its name is not settled", file: "renew.go", test: "TestExpire",
		text: "d.forget(g)\n\td.settleIn(g.Name, left.Settle)", instead: "",
	},
	{
		what: "a waiter without a place does not poll faster", file: "wait.go", test: "TestWaiterWithoutAPlacePolls",
		text: "if pos.Poll {", instead: "if false {",
	},
	{
		what: "a waiter does not poll at the end of the hold", file: "wait.go", test: "TestWaiterWithoutAPlacePolls",
		text: "h != nil && h.RetryAfter > 0 {", instead: "h != nil && false {",
	},
	{
		what: "the place of a refused Enter is not removed", file: "acquire.go", test: "TestRefusalEndsAWait",
		text: "if final && len(all) > 0 && all[0].Placed {", instead: "if false {",
	},
	{
		what: "a refusal does not end a wait", file: "driver.go", test: "TestRefusalEndsAWait",
		text: "return NotDone, true\n\tcase errors.Is(err, backend.ErrUnknown)", instead: "return NotDone, false\n\tcase errors.Is(err, backend.ErrUnknown)",
	},
	{
		what: "steps that wait for an exchange are never sent", file: "batch.go", test: "TestBatch",
		text: "for b.sending--; b", instead: "for ; b",
		on: map[string]string{"etcd": "Q9"},
	},
	{
		what: "an exchange carries only one step", file: "batch.go", test: "TestBatch",
		text: "|| len(together) == b.fewer", instead: "|| len(together) > 0",
	},
	{
		what: "an exchange carries two steps of one name", file: "batch.go", test: "TestBatch",
		text: "if names[one.name] || len(together)", instead: "if len(together)",
	},
}

// TestMutants breaks the engine in one way at a time, and wants the suite or a test of this package to fail.
func TestMutants(t *testing.T) {
	t.Parallel()
	for _, m := range mutants {
		t.Run(strings.ReplaceAll(m.what, " ", "-"), func(t *testing.T) {
			source := mutate.Source(t, m.file, m.text, m.instead)
			testtier.Only(t)
			if m.clauses == "" && m.test == "" {
				return // see TestMutantsOfBindings
			}
			out := m.run(t, source)
			killedBy(t, out, m.clauses)
			if m.test != "" && !strings.Contains(out, "--- FAIL: "+m.test) {
				t.Errorf("%s does not fail:\n%s", m.test, out)
			}
			testfindings.Write(t, testfindings.Mutant{What: m.what, Killers: strings.TrimSpace(m.clauses + " " + m.test)})
		})
	}
}

// TestMutantsOfBindings breaks the engine under its bindings, and wants the suite to fail against servers.
func TestMutantsOfBindings(t *testing.T) {
	t.Parallel()
	testtier.Only(t)
	for _, m := range mutants {
		for binding, clauses := range m.on {
			t.Run(strings.ReplaceAll(m.what, " ", "-")+"/"+binding, func(t *testing.T) {
				groups, slugs := map[string]bool{}, map[string]bool{}
				for _, c := range conformance.Clauses() {
					if slices.Contains(strings.Fields(clauses), c.ID) {
						groups[c.Group], slugs[c.Slug] = true, true
					}
				}
				out := mutate.Test(t, m.file, mutate.Source(t, m.file, m.text, m.instead), "../../"+binding,
					"-run", "^TestConformance$/^New$/"+anyOf(groups)+"/"+anyOf(slugs))
				killedBy(t, out, clauses)
				testfindings.Write(t, testfindings.Mutant{What: m.what + ", under " + binding, Killers: clauses})
			})
		}
	}
}

// killedBy wants each of the clauses to have failed in the output of a suite.
func killedBy(t *testing.T, out, clauses string) {
	t.Helper()
	for _, id := range strings.Fields(clauses) {
		if !strings.Contains(out, "failed: "+id+" ") {
			t.Errorf("clause %s does not fail:\n%s", id, out)
		}
	}
}

// anyOf is a pattern for any of some names.
func anyOf(names map[string]bool) string {
	return "^(" + strings.Join(slices.Sorted(maps.Keys(names)), "|") + ")$"
}

// run runs the suite on the in-process driver, or the test, with the file replaced.
func (m mutant) run(t *testing.T, source string) string {
	if m.test != "" {
		return mutate.Test(t, m.file, source, ".", "-short", "-run", "^"+m.test+"$")
	}
	return mutate.Test(t, m.file, source, "../../conformance", "-short", "-run", "^TestMemory$")
}
