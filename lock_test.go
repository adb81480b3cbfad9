package fencelock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

func TestAcquireExcludesAndHandsOver(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		a, _ := b.client(fencelock.Options{})
		c, _ := b.client(fencelock.Options{Observer: &seen})
		first := mustAcquire(t, a, "orders/7")

		_, err := c.TryAcquire(t.Context(), "orders/7")
		wantErr(t, err, fencelock.ErrHeld)
		held := (*fencelock.HeldError)(nil)
		if !errors.As(err, &held) || held.Holder != first.Owner() {
			t.Errorf("error %v does not name the holder %s", err, first.Owner())
		}

		go func() {
			time.Sleep(time.Second)
			if err := first.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}()
		second := mustAcquire(t, c, "orders/7")
		if second.Token() <= first.Token() {
			t.Errorf("token %v after %v does not increase", second.Token(), first.Token())
		}
		delivered()
		got := seen.of(fencelock.EventAcquired)
		if len(got) != 1 || !got[0].Contended || got[0].Wait < time.Second {
			t.Errorf("observed %+v, want one contended acquire after a second", got)
		}
		if len(seen.of(fencelock.EventContended)) != 1 {
			t.Errorf("the failed try was not observed: %+v", seen.events)
		}
		if err := second.Release(t.Context()); err != nil {
			t.Error(err)
		}
		wantErr(t, second.Release(t.Context()), fencelock.ErrNotHeld)
	})
}

func TestAcquireContextBoundsTheWaitNotTheHold(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		a, _ := b.client(fencelock.Options{TTL: time.Second})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		lease, err := a.Acquire(ctx, "x")
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		time.Sleep(10 * time.Second)
		if err := lease.Err(); err != nil {
			t.Errorf("the lease ended with the context of its acquire: %v", err)
		}

		c, _ := b.client(fencelock.Options{})
		ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = c.Acquire(ctx, "x")
		wantErr(t, err, context.DeadlineExceeded, fencelock.ErrHeld)
		if held := (*fencelock.HeldError)(nil); !errors.As(err, &held) || held.Holder != lease.Owner() {
			t.Errorf("%v does not name the holder", err)
		}
	})
}

func TestAcquireWithEndedContextSendsNoRequest(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c := b.over(&scripted{Driver: b.store.Driver(),
			acquire: func(context.Context, backend.Request) (backend.Grant, error) {
				t.Error("the driver was asked")
				return backend.Grant{}, backend.ErrHeld
			}}, fencelock.Options{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := c.Acquire(ctx, "x")
		wantErr(t, err, context.Canceled)
	})
}

func TestWaitAtMost(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		a, _ := b.client(fencelock.Options{})
		c, _ := b.client(fencelock.Options{})
		holder := mustAcquire(t, a, "x")
		began := time.Now()
		_, err := c.Acquire(t.Context(), "x", fencelock.WaitAtMost(3*time.Second))
		wantErr(t, err, fencelock.ErrHeld)
		if errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v: the caller's context has not ended", err)
		}
		if held := (*fencelock.HeldError)(nil); !errors.As(err, &held) || held.Holder != holder.Owner() {
			t.Errorf("%v does not name the holder", err)
		}
		if waited := time.Since(began); waited < 3*time.Second || waited > 4*time.Second {
			t.Errorf("waited %v, want 3s", waited)
		}
	})
}

func TestUnknownAcquireIsCleanedUp(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		d := b.store.Driver()
		c := b.over(d, fencelock.Options{TTL: time.Minute})
		d.Network().Drop(memory.Replies)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Acquire(ctx, "x")
		wantErr(t, err, fencelock.ErrUnknown, context.DeadlineExceeded)
		d.Network().Pass()

		rival, _ := b.client(fencelock.Options{})
		began := time.Now()
		mustAcquire(t, rival, "x")
		if waited := time.Since(began); waited > 15*time.Second {
			t.Errorf("the entry that nobody knew of closed the name for %v", waited)
		}
	})
}

// The request is delivered after the first cleanup has found no hold.
func TestLateAcquireIsCleanedUp(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		d := b.store.Driver()
		var late backend.Request
		s := &scripted{Driver: d, acquire: func(_ context.Context, r backend.Request) (backend.Grant, error) {
			late = r
			return backend.Grant{}, backend.ErrUnknown
		}}
		c := b.over(s, fencelock.Options{TTL: time.Minute})
		_, err := c.Acquire(t.Context(), "x")
		wantErr(t, err, fencelock.ErrUnknown)
		time.Sleep(2 * time.Second)
		late.Lost = nil
		if _, err := d.Acquire(t.Context(), late); err != nil { // here it arrives
			t.Fatal(err)
		}
		rival, _ := b.client(fencelock.Options{})
		began := time.Now()
		mustAcquire(t, rival, "x")
		if waited := time.Since(began); waited > 10*time.Second {
			t.Errorf("the late request closed the name for %v", waited)
		}
	})
}

// A grant that arrives after the end of its validity, since the process was paused, is not returned.
func TestLateGrantIsNotReturned(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		d := b.store.Driver()
		s := &scripted{Driver: d}
		c := b.over(s, fencelock.Options{TTL: time.Second})
		slow := 1
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := d.Acquire(ctx, r)
			if slow > 0 {
				slow--
				time.Sleep(5 * time.Second)
			}
			return g, err
		}
		lease := mustAcquire(t, c, "x") // waits for it
		if err := lease.Err(); err != nil {
			t.Error(err)
		}
		slow = 1
		_, err := c.TryAcquire(t.Context(), "y")
		wantErr(t, err, fencelock.ErrLost)
	})
}

func TestDo(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, d := b.client(fencelock.Options{TTL: time.Second})
		boom := errors.New("boom")

		t.Log("fn's error comes back, and the lock is free")
		err := c.Do(t.Context(), "x", func(context.Context, *fencelock.Lease) error { return boom })
		if !errors.Is(err, boom) {
			t.Errorf("got %v, want fn's error", err)
		}
		t.Log("the lock is released when fn panics")
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was swallowed")
				}
			}()
			_ = c.Do(t.Context(), "x", func(context.Context, *fencelock.Lease) error { panic("out") })
		}()
		if n := b.store.Names(); n != 0 {
			t.Errorf("%d names are still in use", n)
		}

		t.Log("ctx bounds the run")
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		err = c.Do(ctx, "x", func(ctx context.Context, _ *fencelock.Lease) error {
			<-ctx.Done()
			return ctx.Err()
		})
		wantErr(t, err, context.DeadlineExceeded)

		t.Log("a loss ends the run, and is reported once")
		err = c.Do(t.Context(), "x", func(ctx context.Context, lease *fencelock.Lease) error {
			d.Network().Drop(memory.Both)
			<-ctx.Done()
			return context.Cause(ctx)
		})
		wantErr(t, err, fencelock.ErrLost)
		if n := strings.Count(err.Error(), "was lost"); n != 1 {
			t.Errorf("%q reports the loss %d times", err, n)
		}
		d.Network().Pass()

		t.Log("a loss that fn ignores is reported")
		err = c.Do(t.Context(), "x", func(ctx context.Context, lease *fencelock.Lease) error {
			d.Network().Drop(memory.Both)
			<-ctx.Done()
			return nil
		})
		wantErr(t, err, fencelock.ErrLost)
		d.Network().Pass()
	})
}

func TestCloseCleansUp(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		other, _ := b.client(fencelock.Options{})
		lease := mustAcquire(t, c, "x")
		mustAcquire(t, other, "y")
		waited := make(chan error)
		go func() {
			_, err := c.Acquire(t.Context(), "y")
			waited <- err
		}()
		synctest.Wait()
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		wantErr(t, <-waited, fencelock.ErrClosed)
		wantErr(t, context.Cause(lease.Context()), fencelock.ErrLost)
		wantErr(t, lease.Release(t.Context()), fencelock.ErrLost)
		_, err := c.Acquire(t.Context(), "z")
		wantErr(t, err, fencelock.ErrClosed)
		if err := c.Close(t.Context()); err != nil {
			t.Errorf("a second Close: %v", err)
		}
		if n := b.store.Names(); n != 1 {
			t.Errorf("%d names are in use, want only the other client's", n)
		}
	})
}

func TestCloseReportsUnreleasedLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := memory.New(&memory.Options{Clock: backend.GoClock()})
		c, err := fencelock.ForCorrectness(d, &fencelock.Options{})
		if err != nil {
			t.Fatal(err)
		}
		mustAcquire(t, c, "x")
		d.Store().Pause()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantErr(t, c.Close(ctx), fencelock.ErrUnknown, context.DeadlineExceeded)
		d.Store().Resume()
	})
}

func TestTierGate(t *testing.T) {
	type plain struct{ backend.Driver } // a wrapper without the promise of tokens
	_, err := fencelock.New(plain{memory.New(nil)}, fencelock.Correctness, nil)
	wantErr(t, err, fencelock.ErrTier)
	capability := (*fencelock.CapabilityError)(nil)
	if !errors.As(err, &capability) || capability.Driver != "memory" || capability.Tier != fencelock.Correctness {
		t.Errorf("%v does not name driver and tier", err)
	}
	if _, err = fencelock.New(plain{memory.New(nil)}, fencelock.Efficiency, nil); err != nil {
		t.Errorf("the efficiency tier takes any driver: %v", err)
	}
	_, err = fencelock.New(memory.New(nil), 0, nil)
	wantErr(t, err, fencelock.ErrInvalidOption)
	_, err = fencelock.New(nil, fencelock.Efficiency, nil)
	wantErr(t, err, fencelock.ErrInvalidOption)
	_, err = fencelock.ForCorrectness(nil, nil)
	wantErr(t, err, fencelock.ErrInvalidOption)
	_, err = fencelock.Open(t.Context(), "nosuch://here", fencelock.Efficiency, nil)
	wantErr(t, err, fencelock.ErrInvalidOption)
	_, err = fencelock.Open(t.Context(), "no scheme", fencelock.Efficiency, nil)
	wantErr(t, err, fencelock.ErrInvalidOption)
}

// forgetful promises tokens and issues none.
type forgetful struct{ *memory.Driver }

func (f forgetful) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	g, err := f.Driver.Acquire(ctx, r)
	g.Token = 0
	return g, err
}

func TestCorrectnessRefusesAGrantWithoutToken(t *testing.T) {
	d := memory.New(nil)
	c, err := fencelock.ForCorrectness(forgetful{d}, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Acquire(t.Context(), "x")
	wantErr(t, err, fencelock.ErrTier)
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if n := d.Store().Names(); n != 0 {
		t.Errorf("%d names are still in use", n)
	}
}

func TestEfficiencyCarriesNoToken(t *testing.T) {
	c, err := fencelock.ForEfficiency(memory.New(nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	lease := mustAcquire(t, c, "x")
	if lease.Token() != 0 || lease.TokenSpace() != "" {
		t.Errorf("an efficiency lease carries token %v of space %q", lease.Token(), lease.TokenSpace())
	}
}

func TestBadInput(t *testing.T) {
	d := memory.New(nil)
	c, err := fencelock.ForCorrectness(d, &fencelock.Options{Namespace: "app"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	for what, call := range map[string]struct {
		name string
		opt  fencelock.AcquireOption
		want error
	}{
		"empty name":             {"", fencelock.NoRenew(), fencelock.ErrInvalidName},
		"long name":              {strings.Repeat("n", 513), fencelock.NoRenew(), fencelock.ErrInvalidName},
		"name with newline":      {"a\nb", fencelock.NoRenew(), fencelock.ErrInvalidName},
		"name with NUL":          {"a\x00b", fencelock.NoRenew(), fencelock.ErrInvalidName},
		"name not UTF-8":         {"a\xffb", fencelock.NoRenew(), fencelock.ErrInvalidName},
		"zero TTL":               {"x", fencelock.TTL(0), fencelock.ErrInvalidTTL},
		"negative TTL":           {"x", fencelock.TTL(-time.Second), fencelock.ErrInvalidTTL},
		"TTL below the minimum":  {"x", fencelock.TTL(time.Microsecond), fencelock.ErrInvalidTTL},
		"TTL above the maximum":  {"x", fencelock.TTL(1 << 62), fencelock.ErrInvalidTTL},
		"short request id":       {"x", fencelock.RequestID("worker-1"), fencelock.ErrInvalidOption},
		"request id with spaces": {"x", fencelock.RequestID("worker 1 worker 2"), fencelock.ErrInvalidOption},
		"zero hold":              {"x", fencelock.HoldAtLeast(0), fencelock.ErrInvalidOption},
		"zero wait":              {"x", fencelock.WaitAtMost(0), fencelock.ErrInvalidOption},
		"wait for a try":         {"x", fencelock.WaitAtMost(time.Second), fencelock.ErrInvalidOption},
		"metadata not UTF-8":     {"x", fencelock.Metadata(map[string]string{"k": "\xff"}), fencelock.ErrInvalidOption},
		"metadata too long": {
			"x", fencelock.Metadata(map[string]string{"k": strings.Repeat("v", 5000)}), fencelock.ErrInvalidOption,
		},
		"nil option": {"x", nil, fencelock.ErrInvalidOption},
	} {
		t.Run(what, func(t *testing.T) {
			_, err := c.TryAcquire(t.Context(), call.name, call.opt)
			wantErr(t, err, call.want)
			callError, invalid := (*fencelock.CallError)(nil), (*fencelock.InvalidError)(nil)
			if !errors.As(err, &callError) || callError.Call != "acquire" || callError.Name != call.name {
				t.Errorf("%v does not name the call", err)
			}
			if !errors.As(err, &invalid) || invalid.Value == "" || invalid.Why == "" {
				t.Errorf("%v does not contain the value and why", err)
			}
		})
	}
	if n := d.Store().Names(); n != 0 {
		t.Errorf("bad input left %d names in use", n)
	}
}

func TestBadOptions(t *testing.T) {
	for what, bad := range map[string]struct {
		o    fencelock.Options
		want error
	}{
		"TTL too short":       {fencelock.Options{TTL: time.Millisecond}, fencelock.ErrInvalidTTL},
		"negative TTL":        {fencelock.Options{TTL: -1}, fencelock.ErrInvalidTTL},
		"negative margin":     {fencelock.Options{StopEarly: -1}, fencelock.ErrInvalidOption},
		"margin above TTL":    {fencelock.Options{StopEarly: time.Minute}, fencelock.ErrInvalidTTL},
		"owner not UTF-8":     {fencelock.Options{Owner: "\xff"}, fencelock.ErrInvalidOption},
		"bad namespace":       {fencelock.Options{Namespace: "a\nb"}, fencelock.ErrInvalidName},
		"unknown requirement": {fencelock.Options{Require: 1 << 30}, fencelock.ErrUnsupported},
	} {
		t.Run(what, func(t *testing.T) {
			_, err := fencelock.ForEfficiency(memory.New(nil), &bad.o)
			wantErr(t, err, bad.want)
		})
	}
}

// A grant that arrives after its end is released before the call retries: the next request, which belongs to the same
// line of work, would wait for it, and be refused as a deadlock.
func TestLateGrantIsReleasedFirst(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		d := &scripted{Driver: b.store.Driver()}
		calls := 0
		d.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := d.Driver.Acquire(ctx, r)
			if calls++; calls == 1 {
				for range 4 { // the process is paused, while the hold stays alive in the service
					time.Sleep(fencelock.DefaultTTL / 3)
					d.Driver.Renew(ctx, []backend.Grant{g})
				}
			}
			return g, err
		}
		d.release = func(ctx context.Context, g backend.Grant) error {
			time.Sleep(time.Second)
			return d.Driver.Release(ctx, g)
		}
		lease := mustAcquire(t, b.over(d, fencelock.Options{}), "x")
		if calls != 2 || lease.Err() != nil {
			t.Errorf("%d calls, then a lease that is %v", calls, lease.Err())
		}
	})
}

// If its context has ended and its grant came too late, a waiting Acquire returns the context's error.
func TestAcquireGrantedTooLateReturnsContextError(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := s.Driver.Acquire(ctx, r)
			time.Sleep(time.Minute) // the process was paused
			return g, err
		}
		c := b.over(s, fencelock.Options{TTL: 10 * time.Second})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := c.Acquire(ctx, "x")
		wantErr(t, err, context.DeadlineExceeded)
	})
}

func (f forgetful) IssuesFencingTokens() backend.Driver { return f }
