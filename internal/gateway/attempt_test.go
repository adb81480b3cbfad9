package gateway

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// failing is a driver that acquires a lock and then returns an error. It refuses releases for a while.
type failing struct {
	*memory.Driver
	err      error
	refuses  time.Time // until then
	releases atomic.Int32
}

func (f *failing) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if _, err := f.Driver.Acquire(ctx, r); err != nil {
		return backend.Grant{}, err
	}
	return backend.Grant{}, f.err
}

func (f *failing) Release(ctx context.Context, g backend.Grant) error {
	f.releases.Add(1)
	if time.Now().Before(f.refuses) {
		return backend.ErrUnavailable
	}
	return f.Driver.Release(ctx, g)
}

// A hold that a failed acquire may have left is released, even if the driver's error is outside of the contract. The
// gateway repeats a refused release more and more slowly.
func TestLeftoverOfAnErrorIsReleased(t *testing.T) {
	for _, c := range []struct {
		err    error
		status int
		code   string
	}{{backend.ErrUnknown, 504, codeUnknown}, {errors.New("other"), 500, codeInternal}} {
		synctest.Test(t, func(t *testing.T) {
			f := &failing{
				Driver: memory.New(&memory.Options{Clock: backend.GoClock()}), err: c.err,
				refuses: time.Now().Add(time.Minute),
			}
			d := newDoor(t, f)
			d.refuses(d.post(acquireX, `{"ownerId":"a","ttlMillis":600000}`), c.status, c.code)
			time.Sleep(50 * time.Second)
			synctest.Wait()
			if got := d.get("/v1/locks/x"); got.status != http.StatusOK || f.releases.Load() > 15 {
				t.Errorf("%d refused releases, and the lock is %s", f.releases.Load(), got.text)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			d.is(d.get("/v1/locks/x"), 404, `{"locked":false}`)
			d.g.Close(t.Context())
			if err := f.Driver.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
