package main

import (
	"crypto/rand"
	"testing"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
)

// expect runs the story, which must have the parts in order, and counts the plans that were written.
func expect(t *testing.T, o *story.Options, plans, ofOldLeader int, parts ...string) {
	t.Helper()
	storytest.ExpectInOrder(t, storytest.Tell(t, o, tell), parts...)
	if n := storytest.Query(t, o, `SELECT count(*) FROM plans`); n != plans {
		t.Errorf("there are %d plans; want %d", n, plans)
	}
	if n := storytest.Query(t, o, `SELECT count(*) FROM plans WHERE author = 'node-1'`); n != ofOldLeader {
		t.Errorf("there are %d plans of node-1; want %d", n, ofOldLeader)
	}
}

func TestOnlyThePresentLeaderWrites(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			expect(t, &story.Options{Backend: backend}, 3, 1,
				"node-1 leads", "node-2 leads", "the database refuses it", "follows the plan of node-2",
				"was lost", "node-2 resigns; node-3 leads", "follows the plan of node-3")
		})
	}
}

func TestUnsafeFollowsAnOldLeader(t *testing.T) {
	t.Parallel()
	expect(t, &story.Options{Unsafe: true}, 4, 2,
		"node-1 leads", "node-2 leads", "nothing stops it", "follows the plan of node-1")
}
