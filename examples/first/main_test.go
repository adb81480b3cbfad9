package main

import (
	"os"
	"strings"
	"testing"
)

func TestProgramIsInTheGuide(t *testing.T) {
	program, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	guide, err := os.ReadFile("../../docs/GUIDE.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(guide), "```go\n"+string(program)+"```\n") {
		t.Error("docs/GUIDE.md does not show examples/first/main.go as it is")
	}
}

func TestRuns(t *testing.T) {
	t.Chdir(t.TempDir())
	out, err := os.Create("out")
	if err != nil {
		t.Fatal(err)
	}
	stdout := os.Stdout
	os.Stdout = out
	main()
	os.Stdout = stdout
	if got, err := os.ReadFile("out"); err != nil || string(got) != "alone with accounts/42 - it has a token: true\n" {
		t.Errorf("%q, %v", got, err)
	}
}
