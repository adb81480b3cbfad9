package main

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// expect runs the story, reads all results, and counts how often each file was converted.
func expect(t *testing.T, o *story.Options, times int) (text string) {
	t.Helper()
	text = storytest.Tell(t, o, tell)
	out := filepath.Join(o.Dir, "out")
	if entries, err := os.ReadDir(out); err != nil || len(entries) != files {
		t.Errorf("there are %d results, %v; want %d", len(entries), err, files)
	}
	for i := range files {
		name := fmt.Sprintf("order-%d", i)
		if got, err := os.ReadFile(filepath.Join(out, name)); err != nil ||
			string(got) != strings.ToUpper("the text of "+name) {
			t.Errorf("%s became %q, %v", name, got, err)
		}
		if n := strings.Count(text, "converted "+name+"\n"); n != times {
			t.Errorf("%s was converted %d times; want %d:\n%s", name, n, times, text)
		}
	}
	return text
}

func TestEachFileOnce(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text := expect(t, &story.Options{Backend: backend}, 1)
			storytest.ExpectInOrder(t, text, "taken order-0, and hangs", "converted order-0",
				"looks at its lease, and stops")
		})
	}
}

func TestUnsafeConvertsOverAndOver(t *testing.T) {
	t.Parallel()
	expect(t, &story.Options{Unsafe: true}, workers)
}
