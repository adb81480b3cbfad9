package redlock_test

import (
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/mutate"
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/internal/testtier"
)

// TestMutants breaks the driver in one way at a time, and requires that a test fails.
func TestMutants(t *testing.T) {
	t.Parallel()
	for _, m := range []struct {
		what, file, text, instead string
		test                      string
	}{
		{
			what: "a single vote grants a hold", file: "enter.go",
			text: "v := a.vote(ctx)\n\t\tif v.yes >= s.quorum {", instead: "v := a.vote(ctx)\n\t\tif v.yes > 0 {",
			test: "TestFiveServers",
		},
		{
			what: "a single vote confirms a renewal", file: "leave.go",
			text: "case h.yes >= s.quorum:", instead: "case h.yes > 0:", test: "TestFiveServers",
		},
		{
			what: "one server without the hold is reported as a loss", file: "leave.go",
			text: "case h.no >= s.quorum:", instead: "case h.no > 0:", test: "TestFiveServers",
		},
		{
			what: "a renewal does not restore the hold on servers that lack it", file: "leave.go",
			text: "s.nodeTimeout(g.TTL)).to(h.lacking, redisscript.Set,", instead: "s.nodeTimeout(g.TTL)).to(0, redisscript.Set,",
			test: "TestFiveServers",
		},
		{
			what: "a hold is not sent to the remaining servers", file: "later.go",
			text: "\ts.round(l.keys, s.nodeTimeout(l.ttl)).to(l.nodes, ", instead: "\ts.round(l.keys, s.nodeTimeout(l.ttl)).to(0, ",
			test: "TestVotesFollow",
		},
		{
			what: "a hold that has ended is sent to the remaining servers", file: "later.go",
			text: "if l == nil || s.clock.Now() >= l.until {", instead: "if l == nil {", test: "TestNoVoteForAnEndedHold",
		},
		{
			what: "a hold is sent to the remaining servers after its release", file: "later.go",
			text: "\tl.timer.Stop()\n\tdelete(o.holds, request)\n", instead: "", test: "TestNoVoteBehindARelease",
		},
		{
			what: "a release is sent to all servers", file: "leave.go",
			text: "asked := s.all() &^ s.cancelLater(l.RequestID, e.start)", instead: "asked := s.all() | 0*s.cancelLater(l.RequestID, e.start)",
			test: "TestReleaseOfAFirstMajority",
		},
		{
			what: "an acquire waits for a hung server of the first majority", file: "enter.go",
			text: "v.ask(v.s.all() &^ v.asked)\n\treturn false\n}\n\nfunc (n *node) putAside()", instead: "return false\n}\n\nfunc (n *node) putAside()",
			test: "TestHungFirstMajority",
		},
		{
			what: "WaitForAll asks only a majority", file: "enter.go",
			text: "if v.again || s.o.WaitForAll {", instead: "if v.again {", test: "TestWaitForAll",
		},
		{
			what: "steps on different connections overtake each other", file: "node.go",
			text: "Ordered:  true,", instead: "Ordered:  false,", test: "TestReleaseBehindALateVote",
		},
		{
			what: "a repeated request creates another hold", file: "enter.go",
			text: "case count(v.holders) >= s.quorum:\n", instead: "case count(v.holders) > len(s.nodes):\n",
			test: "TestRepeatSharesTheHold",
		},
		{
			what: "the removal of an attempt ends a shared hold", file: "enter.go",
			text:    "redisscript.TryAgain, a.value, a.px, a.r.RequestID, redisscript.KeepsShared)",
			instead: "redisscript.TryAgain, a.value, a.px, a.r.RequestID, redisscript.KeepsAny)",
			test:    "TestRepeatSharesTheHold",
		},
		{
			what: "a caller that leaves sends only the short release", file: "leave.go",
			text: "\te.ask(short)\n", instead: "", test: "TestCloseSendsAbandonedReleases",
		},
		{
			what: "a restarted server votes immediately", file: "node.go",
			text: "if !server.Durable && s.quarantine &&", instead: "if false &&", test: "TestQuarantineEnds",
		},
		{
			what: "a server that is listed twice votes twice", file: "node.go",
			text: "if other != n && other.runID == server.RunID {", instead: "if false {", test: "TestUnfit",
		},
		{
			what: "a new connection is not checked", file: "node.go",
			text: "if n.s.o.AssumeVersion != \"\" {", instead: "if true {", test: "TestLateUnfitServer",
		},
		{
			what: "the servers' settings are checked only once", file: "service.go",
			text: "case errors.Is(err, backend.ErrMisconfigured):\n", instead: "case false:\n", test: "TestEvictionPolicies",
		},
	} {
		t.Run(strings.ReplaceAll(m.what, " ", "-"), func(t *testing.T) {
			source := mutate.Source(t, m.file, m.text, m.instead)
			testtier.Only(t)
			if out := mutate.Test(t, m.file, source, ".", "-run", "^"+m.test+"$"); !strings.Contains(out, "--- FAIL: "+m.test) {
				t.Fatalf("%s does not fail:\n%s", m.test, out)
			}
			testfindings.Write(t, testfindings.Mutant{What: "redlock: " + m.what, Killers: m.test})
		})
	}
}
