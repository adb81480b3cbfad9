package main

import (
	"fmt"
	"strings"
	"testing"
)

// line is one event of go test -json.
func line(action, test, output string) string {
	return fmt.Sprintf("{\"Action\":%q,\"Package\":\"p\",\"Test\":%q,\"Output\":%q}\n", action, test, output)
}

// skip is a test that is skipped for a reason.
func skip(test, reason string) string {
	return line("run", test, "") + line("output", test, "    x_test.go:7: "+reason+"\n") + line("skip", test, "")
}

func TestRead(t *testing.T) {
	pass := strings.Repeat(line("pass", "TestA", ""), 150)
	vague := skip("TestV", "INCONCLUSIVE  it took 2s")
	for what, c := range map[string]struct {
		in    string
		asked string
		ok    bool
		says  []string
	}{
		"nothing":     {"", "", false, []string{"no test ended"}},
		"no JSON":     {"go: no such tool\n", "", false, []string{"go: no such tool"}},
		"all is well": {pass, "noskip", true, []string{"150 tests ended, 0 of them without a verdict"}},
		"a failure": {
			pass + line("output", "TestB", "    b_test.go:1: wrong\n") + line("fail", "TestB", ""), "", false,
			[]string{"FAILED p TestB", "b_test.go:1: wrong"},
		},
		"a failure in lines": {
			pass + line("output", "TestB", "    b_test.go:1: it says:\n") + strings.Repeat(line("output", "TestB", "        much\n"), 50) +
				line("output", "TestB", "        last\n") + line("output", "TestB", "    other\n") + line("fail", "TestB", ""), "", false,
			[]string{"FAILED p TestB\n    b_test.go:1: it says:\n        much\n", "        much\n        last\n"},
		},
		"left out":  {pass + skip("TestC", "left out: -short"), "noskip", true, []string{"SKIPPED 1, left out: -short:\n  p TestC"}},
		"no server": {pass + skip("TestC", "install it"), "", true, []string{"SKIPPED 1, install it:\n  p TestC"}},
		"must be":   {pass + skip("TestC", "install it"), "noskip", false, []string{"FENCELOCK_REQUIRE=all"}},
		"one vague": {vague, "noskip", true, []string{"SKIPPED 1, INCONCLUSIVE: ", "1 tests ended, 1 of them"}},
		"two vague": {pass + vague + vague, "", false, []string{"SKIPPED 2, INCONCLUSIVE: ", "too many"}},
		"packages":  {pass + line("output", "", "ok  \tp\t1s\n"), "packages", true, []string{"ok  \tp\t1s\n"}},
	} {
		var out strings.Builder
		ok, err := read(strings.NewReader(c.in), &out, strings.Fields(c.asked))
		if err != nil || ok != c.ok {
			t.Errorf("%s: %v, %v, want %v\n%s", what, ok, err, c.ok, &out)
		}
		for _, text := range c.says {
			if !strings.Contains(out.String(), text) {
				t.Errorf("%s: %q is missing in\n%s", what, text, &out)
			}
		}
	}
}
