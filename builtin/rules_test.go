package builtin_test

import (
	"errors"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// A waiter that new rules deny returns ErrDenied, and the holder keeps its lock.
func TestNewRulesEndWaits(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d, waiter := opened(t, n), opened(t, n)
	g := take(t, d, request("a/1", time.Minute))
	ended := make(chan error, 1)
	go func() {
		r := request("a/1", time.Minute)
		r.Wait = true
		_, err := waiter.Acquire(t.Context(), r)
		ended <- err
	}()
	eventually(t, "the waiter waits", func() bool {
		s, err := d.Look(t.Context(), "a/1")
		return err == nil && s.Waiters == 1
	})
	if _, err := adminOf(t, n).SetRules(t.Context(), "allow * read \"\"\nallow * acquire b\n"); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, backend.ErrDenied) {
			t.Errorf("the waiter returns %v", err)
		}
	case <-time.After(patience):
		t.Error("the waiter waits on")
	}
	if s, err := d.Look(t.Context(), "a/1"); err != nil || len(s.Holders) != 1 || s.Holders[0].Token != g.Token {
		t.Errorf("the holder: %+v, %v", s, err)
	}
}
