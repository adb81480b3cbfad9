// Package tiercheck holds the test that the compiler enforces the tiers.
package tiercheck

import (
	"os/exec"
	"strings"
	"testing"
)

// The programs under testdata are what callers would write. Those that hand a driver without the fencing promise to
// ForCorrectness must not compile, and the compiler's message must name the missing promise.
func TestTheCompilerEnforcesTheTiers(t *testing.T) {
	for program, compiles := range map[string]bool{"accepted": true, "refused": false, "wrapped": false} {
		t.Run(program, func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), "go", "vet", "./testdata/"+program).CombinedOutput()
			if compiles && err != nil {
				t.Fatalf("does not compile: %v\n%s", err, out)
			}
			if !compiles && err == nil {
				t.Fatal("compiles, although its driver does not promise fencing")
			}
			const missing = "missing method IssuesFencingTokens"
			if !compiles && !strings.Contains(string(out), missing) {
				t.Errorf("want the compiler to say %q, got:\n%s", missing, out)
			}
		})
	}
}
