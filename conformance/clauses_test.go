package conformance_test

import (
	"os"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance"
)

func TestClausesAreNumberedOnceAndDocumented(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, c := range conformance.Clauses() {
		if seen[c.ID] || seen[c.Group+"/"+c.Slug] {
			t.Errorf("%v is there twice", c)
		}
		seen[c.ID], seen[c.Group+"/"+c.Slug] = true, true
		if c.Rule == "" || strings.HasSuffix(c.Rule, ".") {
			t.Errorf("%v: rule %q, want words without a full stop", c, c.Rule)
		}
		if !strings.Contains(string(doc), "- "+c.ID+" "+c.Slug+"\n") {
			t.Errorf("%v is missing from the package comment", c)
		}
	}
}
