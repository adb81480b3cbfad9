package memory_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// A store that was wiped is another store: who knew the old one learns so, whatever it had there, and stays out.
func TestWipeIsNoticed(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		d, other := s.Driver(), s.Driver()
		told := make(chan backend.Reason, 1)
		r := request("x", time.Minute)
		r.Lost = func(loss backend.Loss) { told <- loss.Reason }
		g := acquire(t, d, r)
		closed := request("closed", time.Second)
		closed.MinHold = time.Hour
		if err := d.Release(t.Context(), acquire(t, d, closed)); err != nil {
			t.Fatal(err)
		}
		waits := make(chan error, 1)
		go func() {
			_, err := other.Acquire(t.Context(), waiting(request("x", time.Minute)))
			waits <- err
		}()
		synctest.Wait()
		s.Wipe()
		if n := s.Names(); n != 0 {
			t.Errorf("%d names are left", n)
		}
		if reason := <-told; reason != backend.ReasonHistoryLost {
			t.Errorf("the holder was notified of %q, want %q", reason, backend.ReasonHistoryLost)
		}
		if err := <-waits; !errors.Is(err, backend.ErrHistoryLost) {
			t.Errorf("the waiter = %v, want ErrHistoryLost", err)
		}
		var gone *backend.NotHeldError
		err := d.Renew(t.Context(), []backend.Grant{g})[0].Err
		if !errors.As(err, &gone) || gone.Reason != backend.ReasonHistoryLost {
			t.Errorf("renewal = %v, want a *NotHeldError with %q", err, backend.ReasonHistoryLost)
		}
		if err := d.Release(t.Context(), g); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("release = %v, want ErrNotHeld", err)
		}
		var lost *backend.HistoryError
		if _, err := d.Acquire(t.Context(), request("y", time.Minute)); !errors.As(err, &lost) {
			t.Errorf("acquire = %v, want a *HistoryError", err)
		}
		fresh := s.Driver()
		next := acquire(t, fresh, request("x", time.Minute))
		before, now := d.Describe().TokenSpace, fresh.Describe().TokenSpace
		if before == now || lost.Was != before || lost.Now != now {
			t.Errorf("tokens of the spaces %q and %q, and the error has %+v", before, now, lost)
		}
		acquire(t, fresh, request("closed", time.Minute))
		// A clean-up of before meets nothing of after, whatever it names.
		if err := d.Release(t.Context(), next); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("release of a later hold by a driver from before = %v, want ErrNotHeld", err)
		}
	})
}
