package main

import (
	"crypto/rand"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func expectBooked(t *testing.T, o *story.Options, want int) {
	t.Helper()
	if got := storytest.Query(t, o, `SELECT sum(amount) FROM ledger WHERE account = 'ann'`); got != want {
		t.Errorf("ann has %d; want %d", got, want)
	}
	if got := storytest.Query(t, o, `SELECT sum(amount) FROM ledger`); got != 0 {
		t.Errorf("the ledger does not balance: %d", got)
	}
}

func TestPaymentIsBookedOnce(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &story.Options{Backend: backend}
			storytest.ExpectInOrder(t, storytest.Tell(t, o, tell),
				"replica 1 answers 503", "replica 0 answers 200: booked", "replica 1 answers 200: was booked before")
			expectBooked(t, o, 50)
		})
	}
}

func TestUnsafeBooksTwice(t *testing.T) {
	t.Parallel()
	o := &story.Options{Unsafe: true}
	storytest.ExpectInOrder(t, storytest.Tell(t, o, tell),
		"replica 1 answers 200: booked", "replica 0 answers 200: booked", "replica 1 answers 200: was booked before")
	expectBooked(t, o, 100)
}
