package main

import (
	"crypto/rand"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// expect runs the story and compares the remaining and the sold items.
func expect(t *testing.T, o *story.Options, left, sold int) {
	t.Helper()
	storytest.ExpectInOrder(t, storytest.Tell(t, o, tell), "3 lamps are left", "reserved one", "lamps are sold")
	if got := storytest.Query(t, o, `SELECT remaining FROM lamps`); got != left {
		t.Errorf("%d lamps are left; want %d", got, left)
	}
	if got := storytest.Query(t, o, `SELECT count(DISTINCT customer) FROM reservations`); got != sold {
		t.Errorf("%d customers have a lamp; want %d", got, sold)
	}
}

func TestStockIsNeverNegative(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			expect(t, &story.Options{Backend: backend}, 0, 3)
		})
	}
}

func TestUnsafeOversells(t *testing.T) {
	t.Parallel()
	expect(t, &story.Options{Unsafe: true}, -2, 5)
}
