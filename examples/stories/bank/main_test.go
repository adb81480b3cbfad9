package main

import (
	"os"
	"testing"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
)

// TestMain is main if the story started the test binary as its child.
func TestMain(m *testing.M) {
	if os.Args[len(os.Args)-1] == "-child" {
		main()
		return
	}
	os.Exit(m.Run())
}

// expect runs the story and compares the balances.
func expect(t *testing.T, unsafe bool, ann, bob, cat int) {
	t.Helper()
	o := &story.Options{Unsafe: unsafe}
	text := storytest.Tell(t, o, tell)
	storytest.ExpectInOrder(t, text, "have 100 each", "hangs between the two", "kill -9",
		"another process has the locks")
	for name, want := range map[string]int{"ann": ann, "bob": bob, "cat": cat} {
		if got := storytest.Query(t, o, `SELECT balance FROM accounts WHERE name = '`+name+`'`); got != want {
			t.Errorf("%s has %d; want %d", name, got, want)
		}
	}
}

func TestKillConservesMoney(t *testing.T) {
	t.Parallel()
	expect(t, false, 50, 150, 100)
}

func TestUnsafeLosesMoney(t *testing.T) {
	t.Parallel()
	expect(t, true, 0, 150, 100)
}
