package engine_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// spread is a binding of several servers: each Leave has a rest.
type spread struct {
	service
	rest func(ctx context.Context, n int) (done bool) // the n-th call of it
}

func (s *spread) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	left, err := s.service.Leave(ctx, l)
	n := 0
	left.Rest = func(ctx context.Context) bool {
		n++
		return s.rest(ctx, n)
	}
	return left, err
}

// The rest of a Leave delays no caller. It is repeated until it is done, the TTL has passed, or the driver closes.
func TestRestOfALeave(t *testing.T) {
	for _, c := range []struct {
		what  string
		after int           // calls until it is done; 0: never
		calls int           // at least
		until time.Duration // by then it has ended
		close bool
	}{
		{what: "done at first", after: 1, calls: 1, until: time.Millisecond},
		{what: "done later", after: 4, calls: 4, until: 3 * time.Second},
		{what: "never done", calls: 15, until: 12 * time.Second}, // a pause is half a TTL's twentieth at least
		{what: "cut short by Close", calls: 2, until: time.Millisecond, close: true},
	} {
		synctest.Test(t, func(t *testing.T) {
			var calls atomic.Int64
			var ended atomic.Bool // the context of the last call
			s := &spread{rest: func(ctx context.Context, n int) bool {
				calls.Store(int64(n))
				ended.Store(ctx.Err() != nil)
				return n == c.after
			}}
			d, r := engine.New(s), request("a")
			g, err := d.Acquire(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if err := d.Release(t.Context(), g); err != nil || time.Since(began) > 0 {
				t.Errorf("%s: Release took %v, %v", c.what, time.Since(began), err)
			}
			synctest.Wait()
			if !c.close {
				time.Sleep(c.until)
			}
			before := calls.Load()
			if !c.close {
				time.Sleep(time.Minute)
				if calls.Load() != before {
					t.Errorf("%s: it is repeated after %v", c.what, c.until)
				}
			}
			closed(t, d)
			if n := int(calls.Load()); n < c.calls || c.after > 0 && n > c.after {
				t.Errorf("%s: %d calls, want %d", c.what, n, c.calls)
			}
			if ended.Load() != c.close {
				t.Errorf("%s: the context of the last call has ended: %v", c.what, ended.Load())
			}
		})
	}
}

// placed is a binding with checks.
type placed struct {
	polled
}

func (*placed) Check(_ context.Context, all []engine.Waiters, _ int) ([]engine.Found, error) {
	return make([]engine.Found, len(all)), nil
}

// A waiter with a place but without a push for its turn repeats Enter, although the service has checks.
func TestPlacedWaiterPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &placed{polled{pos: engine.Position{Placed: true, Poll: true}}}
		d, r := engine.New(s), request("a")
		r.Wait = true
		if _, err := d.Acquire(within(t, 1900*time.Millisecond), r); err == nil {
			t.Error("the attempt was granted")
		}
		if s.count != 6 { // at 0, 50, 150, 350, 750 and 1550 ms
			t.Errorf("it has entered %d times, want 6", s.count)
		}
		closed(t, d)
	})
}

// watching is a prompt service. Each other Enter holds, and its first watch wakes when it has ended.
type watching struct {
	service
	enters int
	wake   func()
}

func (*watching) Prompt() {}

func (s *watching) Enter(context.Context, engine.Entering) (engine.Position, error) {
	if s.enters++; s.enters%2 == 0 {
		return engine.Position{Held: true}, nil
	}
	return engine.Position{Placed: true, Behind: "holder"}, nil
}

func (s *watching) Watch(ctx context.Context, _ string, wake func()) error {
	if s.wake == nil {
		s.wake = wake
		wake()
	}
	<-ctx.Done()
	return ctx.Err()
}

// A watch that ends late wakes no attempt but its own.
func TestLateWatchWakesNoLaterAttempt(t *testing.T) {
	for range 20 { // a pool may forget
		synctest.Test(t, func(t *testing.T) {
			s := &watching{}
			d, r := engine.New(s), request("x")
			r.Wait = true
			if _, err := d.Acquire(t.Context(), r); err != nil || s.enters != 2 {
				t.Fatalf("Acquire = %v after %d Enters", err, s.enters)
			}
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				synctest.Wait()
				s.wake()
				synctest.Wait()
				cancel()
			}()
			r.RequestID += "2"
			if _, err := d.Acquire(ctx, r); !errors.Is(err, context.Canceled) || s.enters != 3 {
				t.Errorf("Acquire = %v after %d Enters, want 3: the watch of another attempt wakes this one", err, s.enters)
			}
			closed(t, d)
		})
	}
}

// failing fails once with a reason, and then does not answer.
type failing struct {
	service
	enters int
}

func (s *failing) Enter(ctx context.Context, _ engine.Entering) (engine.Position, error) {
	if s.enters++; s.enters == 1 {
		return engine.Position{}, errors.New("the disk is full")
	}
	<-ctx.Done()
	return engine.Position{}, &engine.Unanswered{}
}

func TestUnknownOutcomeHasAReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := engine.New(&failing{})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := d.Acquire(ctx, request("x"))
		if !errors.Is(err, backend.ErrUnknown) || !errors.Is(err, context.DeadlineExceeded) ||
			!strings.Contains(err.Error(), "the disk is full") {
			t.Errorf("Acquire = %v, want the reason of the failure", err)
		}
		closed(t, d)
	})
}
