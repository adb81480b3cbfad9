package main

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
)

// expectSent runs the story and compares who sent what.
func expectSent(t *testing.T, o *story.Options, want ...string) {
	t.Helper()
	storytest.Tell(t, o, tell)
	sent, err := os.ReadFile(filepath.Join(o.Dir, "sent.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(sent)); got != strings.Join(want, "\n") {
		t.Errorf("sent:\n%s\nwant:\n%s", got, strings.Join(want, "\n"))
	}
}

func TestEveryReportIsSentOnce(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			expectSent(t, &story.Options{Backend: backend}, "03:00:00 by replica 0", "03:01:00 by replica 0")
		})
	}
}

func TestUnsafeSendsThemOverAndOver(t *testing.T) {
	t.Parallel()
	expectSent(t, &story.Options{Unsafe: true},
		"03:00:00 by replica 0", "03:00:00 by replica 1", "03:00:00 by replica 2",
		"03:01:00 by replica 0", "03:01:00 by replica 1", "03:01:00 by replica 2")
}
