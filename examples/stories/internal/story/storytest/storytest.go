// Package storytest runs the examples in their tests.
package storytest

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
)

// Tell runs a story, which must go as it should, and returns its output. Its data stay in o.Dir, a new folder
// unless it is given, until the test ends.
func Tell(t *testing.T, o *story.Options, tell func(context.Context, *story.Story) error) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	var out strings.Builder
	o.Out = &out
	if err := story.Run(ctx, *o, tell); err != nil {
		t.Fatalf("the story went otherwise: %v\n%s", err, &out)
	}
	return out.String()
}

// Query returns the one number that a query on the story's database answers, after the story has ended.
func Query(t *testing.T, o *story.Options, query string) int {
	t.Helper()
	db, err := sql.Open("sqlite", story.DSN(o.Dir))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }() // it was only read
	var n int
	if err := db.QueryRow(query).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// ExpectInOrder checks that text contains each of the parts, in order.
func ExpectInOrder(t *testing.T, text string, parts ...string) {
	t.Helper()
	rest := text
	for _, part := range parts {
		_, after, found := strings.Cut(rest, part)
		if !found {
			t.Fatalf("no %q in its place in:\n%s", part, text)
		}
		rest = after
	}
}
