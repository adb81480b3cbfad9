package fencelock

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend/memory"
)

// A renewal round of a hundred thousand leases holds mutexes for milliseconds; Err of a held lease does not wait for
// them.
func TestErrTakesNoLock(t *testing.T) {
	c, err := ForCorrectness(memory.New(nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	lease, err := c.Acquire(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	lease.of.mu.Lock()
	c.heart.mu.Lock()
	answered := make(chan error, 1)
	go func() { answered <- lease.Err() }()
	select {
	case err := <-answered:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("Err waits for a lock")
	}
	c.heart.mu.Unlock()
	lease.of.mu.Unlock()
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
