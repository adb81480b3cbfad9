package main

import (
	"context"
	"crypto/rand"
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
)

// tellOn runs the story with a database, SQLite if postgres is empty.
func tellOn(t *testing.T, o *story.Options, postgres string) string {
	t.Helper()
	return storytest.Tell(t, o, func(ctx context.Context, s *story.Story) error { return tell(ctx, s, postgres) })
}

func expectBalance(t *testing.T, o *story.Options, want int) {
	t.Helper()
	if got := storytest.Query(t, o, `SELECT balance FROM story_accounts`); got != want {
		t.Errorf("the balance is %d; want %d", got, want)
	}
}

func TestStaleWriteIsRefused(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &story.Options{Backend: backend}
			text := tellOn(t, o, "")
			storytest.ExpectInOrder(t, text, "bob takes the lock", "ann gets the lock",
				"bob wakes up and writes 40", "is stale")
			expectBalance(t, o, 1030)
		})
	}
}

func TestUnsafeLosesADeposit(t *testing.T) {
	t.Parallel()
	o := &story.Options{Unsafe: true}
	storytest.ExpectInOrder(t, tellOn(t, o, ""), "bob takes the lock", "ann gets the lock", "nothing stops this write")
	expectBalance(t, o, 40)
}

// TestPostgres expects of PostgreSQL what SQLite does. The story itself looks at the balance.
func TestPostgres(t *testing.T) {
	t.Parallel()
	url := containers.Postgres(t).URL()
	for range 2 { // the second finds nothing of the first
		storytest.ExpectInOrder(t, tellOn(t, &story.Options{}, url), "is stale", "the balance is 1030")
	}
	storytest.ExpectInOrder(t, tellOn(t, &story.Options{Unsafe: true}, url),
		"nothing stops this write", "the balance is 40")
}
