package main

import (
	"crypto/rand"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/examples/internal/story"
	"github.com/fencelock/fencelock/examples/internal/story/storytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func expect(t *testing.T, o *story.Options, intents, sales, next int) {
	t.Helper()
	for query, want := range map[string]int{
		`SELECT count(*) FROM outbox WHERE sent`: intents, `SELECT count(*) FROM outbox`: intents,
		`SELECT sum(amount) FROM sales`: sales, `SELECT next FROM offsets`: next,
	} {
		if got := storytest.Query(t, o, query); got != want {
			t.Errorf("%s: %d; want %d", query, got, want)
		}
	}
}

func TestEverythingIsDoneOnce(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &story.Options{Backend: backend}
			storytest.ExpectInOrder(t, storytest.Tell(t, o, tell),
				"worker 0 wakes up, and is refused", "relay 0 wakes up, and is refused",
				"consumer 0 wakes up, and is refused", "mails sent: 1, events in the topic: 2, sales: 50")
			expect(t, o, 1, 50, 2)
		})
	}
}

func TestUnsafeDoesItAgain(t *testing.T) {
	t.Parallel()
	o := &story.Options{Unsafe: true}
	storytest.ExpectInOrder(t, storytest.Tell(t, o, tell),
		"worker 0 wakes up, and does it", "mails sent: 4, events in the topic: 4, sales: 400")
	expect(t, o, 2, 400, 4)
}
