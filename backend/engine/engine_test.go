package engine_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// service is a binding of one lock, for tests in which steps overtake each other: the in-process service cannot do
// that.
type service struct {
	mu    sync.Mutex // protects the following fields
	owner string     // the request id of the holder
	token int
	enter func(ctx context.Context, n int) error // before the n-th Enter is carried out
	count int
}

func (s *service) Describe() backend.Description {
	return backend.Description{Name: "test", Clock: backend.GoClock(), TTLGranularity: 1}
}

var errRefused = errors.New("refused")

func (s *service) Classify(err error) engine.Class {
	if errors.Is(err, errRefused) {
		return engine.NotDone
	}
	return engine.Unknown
}

func (s *service) Ping(context.Context) error { return nil }

func (s *service) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	s.mu.Lock()
	s.count++
	n := s.count
	s.mu.Unlock()
	if s.enter != nil {
		if err := s.enter(ctx, n); err != nil {
			return engine.Position{}, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owner != "" && s.owner != r.RequestID {
		return engine.Position{}, nil
	}
	if s.owner == "" {
		s.owner = r.RequestID
		s.token++
	}
	return engine.Position{Held: true, Incarnation: strconv.Itoa(s.token)}, nil
}

func (s *service) Leave(_ context.Context, g engine.Leaving) (engine.Left, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owner != g.RequestID {
		return engine.Left{}, nil
	}
	s.owner = ""
	return engine.Left{Was: true}, nil
}

func (s *service) Extend(_ context.Context, _ engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	return make([]engine.Outcome, len(holds)), nil
}

func (s *service) Close(context.Context) error { return nil }

func (s *service) holder() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.owner
}

func request(name string) backend.Request {
	return backend.Request{Name: name, RequestID: backend.NewRequestID(), TTL: 10 * time.Second}
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func closed(t *testing.T, d backend.Driver) {
	t.Helper()
	if err := d.Close(t.Context()); err != nil {
		t.Errorf("Close = %v", err)
	}
}

// The core releases an attempt in doubt: the release waits for the Enter in progress.
func TestLeaveDoesNotOvertakeEnter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &service{enter: func(context.Context, int) error {
			time.Sleep(1500 * time.Millisecond)
			return nil
		}}
		d, r := engine.New(s), request("x")
		if _, err := d.Acquire(within(t, time.Second), r); !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("Acquire = %v, want ErrUnknown", err)
		}
		if err := d.Release(t.Context(), r.Grant()); err != nil {
			t.Errorf("Release = %v", err)
		}
		if holder := s.holder(); holder != "" {
			t.Error("the request holds after its release")
		}
		closed(t, d)
	})
}

// A release waits for the Enter that its service has not carried out yet, although the call that sent it has returned.
func TestLeaveWaitsForLateStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		d, r := store.Driver(), request("x")
		d.Network().Delay(memory.Requests, time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		if _, err := d.Acquire(ctx, r); !errors.Is(err, backend.ErrUnknown) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Acquire = %v, want ErrUnknown and the context's error", err)
		}
		sent := d.Network().Seen(memory.Requests)
		released := make(chan error, 1)
		go func() { released <- d.Release(t.Context(), r.Grant()) }()
		if synctest.Wait(); d.Network().Seen(memory.Requests) != sent {
			t.Error("a release is sent before the Enter has landed")
		}
		if err := <-released; err != nil || store.Names() > 0 {
			t.Errorf("Release = %v, and %d names are held", err, store.Names())
		}
		closed(t, d)
	})
}

// A step that the service does not answer ends, and is repeated until it is answered.
func TestUnansweredStepEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		d, r := store.Driver(), request("x")
		store.Pause()
		if _, err := d.Look(t.Context(), "x"); !errors.Is(err, backend.ErrUnavailable) {
			t.Errorf("Look = %v, want ErrUnavailable", err)
		}
		time.AfterFunc(5*time.Second, store.Resume)
		if _, err := d.Acquire(within(t, time.Minute), r); err != nil {
			t.Errorf("Acquire = %v", err)
		}
		closed(t, d)
	})
}

// An Enter that went unanswered stays in doubt, although the service refuses all that follow.
func TestDoubtSurvivesRefusals(t *testing.T) {
	for _, wait := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := &service{enter: func(ctx context.Context, n int) error {
				if n > 1 {
					return errRefused
				}
				<-ctx.Done()
				return ctx.Err()
			}}
			d, r := engine.New(s), request("x")
			r.Wait = wait
			_, err := d.Acquire(within(t, 5*time.Second), r)
			if !errors.Is(err, backend.ErrUnknown) || errors.Is(err, backend.ErrUnavailable) {
				t.Errorf("Wait=%v: Acquire = %v, want ErrUnknown and not ErrUnavailable", wait, err)
			}
			closed(t, d)
		})
	}
}

// A service that refuses ends an attempt without Wait after a few tries, and one with Wait at the end of its context.
func TestRefusedAttempt(t *testing.T) {
	for _, wait := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := &service{enter: func(context.Context, int) error { return errRefused }}
			d, r := engine.New(s), request("x")
			r.Wait = wait
			began := time.Now()
			_, err := d.Acquire(within(t, time.Minute), r)
			took := time.Since(began)
			if !errors.Is(err, backend.ErrUnavailable) || errors.Is(err, backend.ErrUnknown) ||
				errors.Is(err, context.DeadlineExceeded) != wait || took == time.Minute != wait {
				t.Errorf("Wait=%v: Acquire = %v after %v", wait, err, took)
			}
			closed(t, d)
		})
	}
}

// A service that comes back ends the wait with a grant.
func TestWaitOutlastsAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		d, r := store.Driver(), request("x")
		r.Wait = true
		store.Stop()
		time.AfterFunc(5*time.Second, store.Start)
		if _, err := d.Acquire(within(t, time.Minute), r); err != nil {
			t.Errorf("Acquire = %v", err)
		}
		closed(t, d)
	})
}

// Close returns when no exchange of the driver runs, unless its context ends first.
func TestCloseWaitsForExchanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended atomic.Bool
		s := &service{enter: func(ctx context.Context, _ int) error {
			<-ctx.Done()
			time.Sleep(time.Second)
			ended.Store(true)
			return ctx.Err()
		}}
		d := engine.New(s)
		if _, err := d.Acquire(within(t, time.Second), request("x")); !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("Acquire = %v, want ErrUnknown", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := d.Close(ctx); !errors.Is(err, context.Canceled) || ended.Load() {
			t.Errorf("Close with an ended context = %v, want its error", err)
		}
		closed(t, d)
		if !ended.Load() {
			t.Error("an exchange runs after Close")
		}
	})
}

// A release wakes the waiter whose turn has come, and no other one of the same client.
func TestWakeReachesOneWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		holder, waiters := store.Driver(), store.Driver()
		const n = 10
		got := make(chan backend.Grant, n)
		held, err := holder.Acquire(t.Context(), request("x"))
		if err != nil {
			t.Fatal(err)
		}
		for range n {
			r := request("x")
			r.Wait, r.TTL = true, time.Hour
			go func() {
				g, err := waiters.Acquire(t.Context(), r)
				if err != nil {
					t.Error(err)
				}
				got <- g
			}()
			synctest.Wait()
		}
		sent := waiters.Network().Seen(memory.Requests)
		if err := holder.Release(t.Context(), held); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if sent = waiters.Network().Seen(memory.Requests) - sent; sent != 1 {
			t.Errorf("a release made the client of %d waiters send %d requests, want 1", n, sent)
		}
		for range n {
			if err := waiters.Release(t.Context(), <-got); err != nil {
				t.Error(err)
			}
		}
		closed(t, holder)
		closed(t, waiters)
	})
}

// polled is a binding whose answer to every Enter is pos.
type polled struct {
	service
	pos engine.Position
}

func (s *polled) Enter(context.Context, engine.Entering) (engine.Position, error) {
	s.count++
	return s.pos, nil
}

func (s *polled) Chance() float64 { return 0.5 }

// A waiter without a place repeats Enter more often at first, and when the holder's time is over.
func TestWaiterWithoutAPlacePolls(t *testing.T) {
	for _, c := range []struct {
		what     string
		pos      engine.Position
		enters   int           // within the time
		duration time.Duration // at the average pause
	}{
		{"with a notification to come", engine.Position{}, 2, 1900 * time.Millisecond},
		{"without a place", engine.Position{Poll: true}, 6, 1900 * time.Millisecond}, // at 0, 50, 150, 350, 750 and 1550 ms
		{"whose holder expires", engine.Position{
			Poll: true, Holder: &backend.HeldError{RetryAfter: 90 * time.Millisecond},
		}, 20, 1900 * time.Millisecond}, // at 0, 50, and every 100 ms
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &polled{pos: c.pos}
			d, r := engine.New(s), request("a")
			r.Wait = true
			if _, err := d.Acquire(within(t, c.duration), r); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("a waiter %s: %v", c.what, err)
			}
			if s.count != c.enters {
				t.Errorf("a waiter %s has entered %d times, want %d", c.what, s.count, c.enters)
			}
			closed(t, d)
		})
	}
}

// A request with a permanent refusal ends, also when it waits, and leaves nothing behind.
func TestRefusedPositionEndsAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &polled{pos: engine.Position{Refused: errRefused}}
		d, r := engine.New(s), request("a")
		r.Wait = true
		if _, err := d.Acquire(within(t, time.Minute), r); !errors.Is(err, errRefused) ||
			!errors.Is(err, backend.ErrUnavailable) || errors.Is(err, backend.ErrUnknown) {
			t.Errorf("Acquire = %v, want why it was refused, and ErrUnavailable", err)
		}
		if s.count != 1 {
			t.Errorf("it was entered %d times", s.count)
		}
		closed(t, d)
	})
}

// A step that was sent and not answered says why, if the service knows.
func TestUnansweredStepSaysWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := engine.New(&broken{})
		_, err := d.Acquire(within(t, time.Second), request("x"))
		if !errors.Is(err, backend.ErrUnknown) || !errors.Is(err, errRefused) {
			t.Errorf("Acquire = %v, want ErrUnknown and the cause", err)
		}
		closed(t, d)
	})
}

// broken is a binding whose connection breaks with each Enter.
type broken struct{ service }

func (*broken) Prompt() {}

func (*broken) Enter(context.Context, engine.Entering) (engine.Position, error) {
	return engine.Position{}, &engine.Unanswered{Err: errRefused}
}

// valued is a service with acquires and releases that run on their callers' goroutines. It notes which steps have the
// values of their callers.
type valued struct {
	service
	enters, leaves, pings any
}

type valueKey struct{}

func (*valued) PromptEnters() {}

func (v *valued) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	v.enters = ctx.Value(valueKey{})
	return v.service.Enter(ctx, r)
}

func (v *valued) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	v.leaves = ctx.Value(valueKey{})
	return v.service.Leave(ctx, l)
}

func (v *valued) Ping(ctx context.Context) error {
	v.pings = ctx.Value(valueKey{})
	return nil
}

// Enter and Leave of a service that is prompt for them get the contexts of their callers; other steps do not.
func TestPromptEnters(t *testing.T) {
	v := &valued{}
	d, ctx := engine.New(v), context.WithValue(t.Context(), valueKey{}, "a value")
	g, err := d.Acquire(ctx, request("x"))
	if err == nil {
		err = errors.Join(d.Release(ctx, g), d.Ping(ctx))
	}
	if err != nil {
		t.Fatal(err)
	}
	if v.enters == nil || v.leaves == nil || v.pings != nil {
		t.Errorf("Enter has %v, Leave %v, Ping %v", v.enters, v.leaves, v.pings)
	}
	closed(t, d)
}
