package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

// A release that is refused for a while is repeated until it succeeds, however long that takes and whatever the
// service answers meanwhile. The observer gets an event every minute.
func TestRefusedReleaseIsRepeated(t *testing.T) {
	const ttl = 10 * time.Second
	for _, answer := range []error{backend.ErrMisconfigured, backend.ErrDenied, backend.ErrUnavailable, backend.ErrUnknown, errors.New("other")} {
		for _, refused := range []time.Duration{100 * time.Millisecond, 2 * time.Second, ttl, ttl + 2*time.Minute, time.Hour} {
			t.Run(fmt.Sprint(answer, refused), func(t *testing.T) {
				simulate(t, func(t *testing.T, b *bed) {
					var seen recorder
					var calls atomic.Int32
					passes, done := time.Now().Add(refused), make(chan time.Time, 1)
					s := &scripted{Driver: b.store.Driver()}
					s.release = func(context.Context, backend.Grant) error {
						calls.Add(1)
						if time.Now().Before(passes) {
							return answer
						}
						done <- time.Now()
						return nil
					}
					c := b.over(s, fencelock.Options{TTL: ttl, Observer: &seen})
					wantErr(t, mustAcquire(t, c, "x").Release(t.Context()), answer)
					if late := (<-done).Sub(passes); late > ttl/4 {
						t.Errorf("released %v after the service accepted it again, want within %v", late, ttl/4)
					}
					if n, most := int(calls.Load()), 9+int(refused/(ttl/4)); n > most {
						t.Errorf("%d calls, want at most %d", n, most)
					}
					want := int((refused + ttl/4) / time.Minute)
					if n := len(seen.of(fencelock.EventAbandoned)); n < want-1 || n > want {
						t.Errorf("%d abandoned events, want one a minute in %v", n, refused)
					}
				})
			})
		}
	}
}

// A release with a permanent answer is dropped, with one event.
func TestImpossibleReleaseIsDropped(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		var calls atomic.Int32
		s := &scripted{Driver: b.store.Driver()}
		s.release = func(context.Context, backend.Grant) error { calls.Add(1); return backend.ErrUnsupported }
		c := b.over(s, fencelock.Options{TTL: time.Second, Observer: &seen})
		for i := range 100 {
			_ = mustAcquire(t, c, fmt.Sprint("refused-", i)).Release(t.Context())
		}
		time.Sleep(time.Hour)
		if n := calls.Load(); n > 200 {
			t.Errorf("%d calls for 100 releases that cannot be, want 200 at most", n)
		}
		if n := len(seen.of(fencelock.EventAbandoned)); n != 100 {
			t.Errorf("%d abandoned events, want 100", n)
		}
	})
}

// Close does not wait for releases that the service refuses.
func TestCloseDropsRefusedReleases(t *testing.T) {
	for _, answer := range []error{backend.ErrMisconfigured, backend.ErrDenied} {
		simulate(t, func(t *testing.T, b *bed) {
			s := &scripted{Driver: b.store.Driver()}
			s.release = func(context.Context, backend.Grant) error { return answer }
			c := opened(t, s, fencelock.Options{TTL: time.Minute})
			wantErr(t, mustAcquire(t, c, "x").Release(t.Context()), answer)
			began := time.Now()
			if err := c.Close(context.Background()); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("Close took %v behind a release that is refused with %v, want at most 1s", took, answer)
			}
		})
	}
}
