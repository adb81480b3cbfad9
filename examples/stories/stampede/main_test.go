package main

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func expectBuilds(t *testing.T, o *story.Options, text string, want int) {
	t.Helper()
	if got := storytest.Query(t, o, `SELECT count(*) FROM builds`); got != want ||
		strings.Count(text, "builds the page") != want {
		t.Errorf("the page was built %d times; want %d:\n%s", got, want, text)
	}
}

func TestOneReaderBuilds(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &story.Options{Backend: backend}
			expectBuilds(t, o, storytest.Tell(t, o, tell), 1)
		})
	}
}

func TestUnsafeAllBuild(t *testing.T) {
	t.Parallel()
	o := &story.Options{Unsafe: true}
	expectBuilds(t, o, storytest.Tell(t, o, tell), readers)
}

// TestWithoutLocks: a reader that cannot have the lock builds the page all the same.
func TestWithoutLocks(t *testing.T) {
	t.Parallel()
	o := &story.Options{Backend: "memory://" + rand.Text()}
	text := storytest.Tell(t, o, func(ctx context.Context, s *story.Story) error {
		db, err := open(ctx, s)
		if err != nil {
			return err
		}
		locks, err := s.Open(ctx, fencelock.Efficiency, "reader")
		if err != nil {
			return err
		}
		if err := locks.Close(ctx); err != nil {
			return err
		}
		page, err := (&reader{story: s, locks: locks, db: db}).page(ctx, func() {})
		if err == nil && page != content {
			t.Errorf("the page is %q", page)
		}
		return err
	})
	storytest.ExpectInOrder(t, text, "goes without the lock", "builds the page")
	expectBuilds(t, o, text, 1)
}
