package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
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

// patient is a binding with exchanges of up to five seconds.
type patient struct{ service }

func (*patient) Patience() time.Duration { return 5 * time.Second }

// A service may have exchanges that last longer than others: none is repeated before its time is over.
func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &patient{}
		s.enter = func(ctx context.Context, n int) error {
			if n > 1 {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}
		d, r, began := engine.New(s), request("x"), time.Now()
		r.Wait = true
		if _, err := d.Acquire(t.Context(), r); err != nil || s.count != 2 {
			t.Errorf("Acquire = %v after %d Enters, want 2", err, s.count)
		}
		if took := time.Since(began); took < 5*time.Second || took > 7*time.Second {
			t.Errorf("the second Enter was sent after %v, want about 5 s", took)
		}
		closed(t, d)
	})
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

// refusing is a binding whose sessions or Enters are refused. An Enter may leave a place.
type refusing struct {
	sessions
	opens, placed bool
	refused       int
}

func (s *refusing) Open(ctx context.Context, ttl time.Duration) (engine.Session, error) {
	if s.opens {
		return s.sessions.Open(ctx, ttl)
	}
	return nil, s.refuse()
}

func (s *refusing) Enter(context.Context, engine.Entering) (engine.Position, error) {
	return engine.Position{Placed: s.placed, Place: "its place"}, s.refuse()
}

func (s *refusing) refuse() error {
	s.refused++
	return &engine.Refusal{Err: fmt.Errorf("%w: %w", backend.ErrUnavailable, errRefused)}
}

// A refusal ends an attempt, also when it waits: of a session, and of an Enter. A place that the Enter left is removed.
func TestRefusalEndsAWait(t *testing.T) {
	for what, s := range map[string]*refusing{
		"a session": {}, "an Enter": {opens: true}, "an Enter with a place": {opens: true, placed: true},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, r := engine.New(s), request("a")
				r.Wait = true
				_, err := d.Acquire(within(t, time.Hour), r)
				if !errors.Is(err, errRefused) || !errors.Is(err, backend.ErrUnavailable) || errors.Is(err, backend.ErrUnknown) ||
					errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Acquire = %v, want the refusal", err)
				}
				if s.refused != 1 || (s.left > 0) != s.placed {
					t.Errorf("%d were refused, want 1; %d Leaves", s.refused, s.left)
				}
				closed(t, d)
			})
		})
	}
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

// promptly is service with steps on their callers' goroutines, that notes what it is sent.
type promptly struct {
	service
	entering []engine.Entering
	leaving  []engine.Leaving
	wait     bool // Enter answers with a place
}

func (*promptly) Prompt() {}

func (s *promptly) Enter(ctx context.Context, e engine.Entering) (engine.Position, error) {
	if s.wait {
		s.entering = append(s.entering, e)
		if len(s.entering) == 1 {
			return engine.Position{}, errRefused
		}
		return engine.Position{Placed: true, Place: strconv.Itoa(len(s.entering))}, nil
	}
	return s.service.Enter(ctx, e)
}

func (s *promptly) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	if s.wait {
		s.leaving = append(s.leaving, l)
	}
	return s.service.Leave(ctx, l)
}

// An Enter that was refused is no reason to look for an earlier one. An attempt that was abandoned removes its own place
// only, and a release by request whatever the request has.
func TestAbandonedAttemptNamesItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &promptly{wait: true}
		d, r := engine.New(s), request("x")
		r.Wait = true
		if _, err := d.Acquire(within(t, 5*time.Second), r); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Acquire = %v, want the end of its context", err)
		}
		if len(s.entering) < 2 || s.entering[1].Again || len(s.leaving) != 1 || s.leaving[0].Place == "" {
			t.Fatalf("Enters = %+v, Leaves = %+v", s.entering, s.leaving)
		}
		_ = d.Release(t.Context(), r.Grant())
		if place := s.leaving[1].Place; place != "" {
			t.Errorf("Release names the place %q", place)
		}
		closed(t, d)
	})
}

// crossing is a binding whose first Enter stays under way until it lands, while later ones are answered with pos.
type crossing struct {
	promptly
	pos  engine.Position
	land chan struct{}
}

func (s *crossing) Enter(_ context.Context, e engine.Entering) (engine.Position, error) {
	s.entering = append(s.entering, e)
	if len(s.entering) == 1 {
		return engine.Position{}, &engine.Unanswered{Landed: func(context.Context) { <-s.land }}
	}
	return s.pos, nil
}

// An attempt with an answer may have another entry by an earlier Enter that has not landed: both are removed, after it
// has landed, for the error says that the attempt has nothing.
func TestCrossedEntersAreRemovedByRequest(t *testing.T) {
	for _, wait := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := &crossing{land: make(chan struct{})}
			s.promptly.wait, s.pos.Placed, s.pos.Place = true, wait, "the second"
			d, r := engine.New(s), request("x")
			r.Wait = wait
			_, err := d.Acquire(within(t, 3*time.Second), r)
			if errors.Is(err, backend.ErrUnknown) || errors.Is(err, backend.ErrHeld) == wait {
				t.Errorf("Wait=%v: Acquire = %v", wait, err)
			}
			if synctest.Wait(); len(s.leaving) > 0 {
				t.Errorf("Wait=%v: a Leave is sent before the Enter has landed", wait)
			}
			close(s.land)
			if synctest.Wait(); len(s.leaving) != 1 || s.leaving[0].Place != "" {
				t.Errorf("Wait=%v: Leaves = %+v, want one by request", wait, s.leaving)
			}
			closed(t, d)
		})
	}
}

// crossingBeside is a crossing binding on which the attempt after the first one is granted.
type crossingBeside struct {
	crossing
	first string // the first attempt
}

func (s *crossingBeside) Enter(ctx context.Context, e engine.Entering) (engine.Position, error) {
	if s.first == "" {
		s.first = e.Attempt
	}
	if e.Attempt != s.first {
		return engine.Position{Held: true, Incarnation: "another attempt's"}, nil
	}
	return s.crossing.Enter(ctx, e)
}

// The removal of an attempt whose Enters have crossed spares the hold that another attempt of its request got meanwhile.
func TestCrossedEntersSpareTheHoldOfAnotherAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &crossingBeside{crossing: crossing{land: make(chan struct{}), pos: engine.Position{Placed: true, Place: "the second"}}}
		s.promptly.wait = true
		d, r := engine.New(s), request("x")
		r.Wait = true
		if _, err := d.Acquire(within(t, 3*time.Second), r); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Acquire = %v, want the end of its context", err)
		}
		if _, err := d.Acquire(t.Context(), r); err != nil {
			t.Fatalf("Acquire of another attempt = %v", err)
		}
		close(s.land)
		if synctest.Wait(); len(s.leaving) != 1 || s.leaving[0].Place != "the second" {
			t.Errorf("Leaves = %+v, want one of the place", s.leaving)
		}
		closed(t, d)
	})
}

// unsubscribed is a binding that gives the first Enter a place and the later ones none, as without a subscription.
type unsubscribed struct{ promptly }

func (s *unsubscribed) Enter(_ context.Context, e engine.Entering) (engine.Position, error) {
	if s.entering = append(s.entering, e); len(s.entering) > 1 {
		return engine.Position{Poll: true}, nil
	}
	return engine.Position{Placed: true, Place: "the first"}, nil
}

// An Enter without a place does not make the attempt forget the place that it has.
func TestPlaceOutlastsAPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &unsubscribed{promptly{wait: true}}
		d, r := engine.New(s), request("x")
		r.Wait = true
		if _, err := d.Acquire(within(t, 5*time.Second), r); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Acquire = %v, want the end of its context", err)
		}
		if len(s.entering) < 2 || len(s.leaving) != 1 || s.leaving[0].Place != "the first" {
			t.Errorf("%d Enters, Leaves = %+v, want one of the first place", len(s.entering), s.leaving)
		}
		closed(t, d)
	})
}

// sharing is a binding that places the first attempt, and notes of the others whether they share the request.
type sharing struct {
	promptly
	shared []bool
	hold   chan struct{} // the cleanup waits for it
}

func (s *sharing) Enter(_ context.Context, e engine.Entering) (engine.Position, error) {
	s.shared = append(s.shared, e.Shared)
	return engine.Position{Placed: true, Place: "a place"}, nil
}

func (s *sharing) Leave(context.Context, engine.Leaving) (engine.Left, error) {
	<-s.hold
	return engine.Left{Was: true}, nil
}

// An attempt knows that an earlier one of its request may yet remove its place, until that one's cleanup has ended.
func TestAttemptKnowsThatItSharesItsRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sharing{hold: make(chan struct{})}
		d, r := engine.New(s), request("x")
		for range 3 {
			if _, err := d.Acquire(t.Context(), r); !errors.Is(err, backend.ErrHeld) {
				t.Fatalf("Acquire = %v, want ErrHeld", err)
			}
			if len(s.shared) == 2 {
				close(s.hold)
				synctest.Wait()
			}
		}
		if want := []bool{false, true, false}; !slices.Equal(s.shared, want) {
			t.Errorf("shared: %v, want %v", s.shared, want)
		}
		closed(t, d)
	})
}

// slow is a binding with looks that take some time and fail with err.
type slow struct {
	service
	takes time.Duration
	err   error
	looks atomic.Int32
}

func (s *slow) Ping(ctx context.Context) error {
	s.looks.Add(1)
	select {
	case <-time.After(s.takes):
		return s.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *slow) Probe(ctx context.Context) error { return s.Ping(ctx) }

// A ping may take as long as its caller's deadline allows, and otherwise as long as another exchange. It makes the probe
// superfluous.
func TestPingOfASlowService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &slow{takes: 5 * time.Second}
		d := engine.New(s)
		err := d.Ping(t.Context())
		if !errors.Is(err, backend.ErrUnavailable) || strings.Contains(err.Error(), backend.ErrUnknown.Error()) {
			t.Errorf("Ping without a deadline = %v, want ErrUnavailable alone", err)
		}
		if err := d.Ping(within(t, 10*time.Second)); err != nil {
			t.Errorf("Ping with a deadline = %v", err)
		}
		if _, err := d.Acquire(t.Context(), request("x")); err != nil || s.looks.Load() != 2 {
			t.Errorf("Acquire = %v after %d looks", err, s.looks.Load())
		}
		closed(t, d)
	})
}

// Calls that wait for a probe share its outcome.
func TestProbeIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &slow{takes: time.Second, err: errRefused}
		d, r, began := engine.New(s), request("x"), time.Now()
		var calls sync.WaitGroup
		for range 5 {
			calls.Go(func() {
				if err := d.Renew(t.Context(), []backend.Grant{r.Grant()})[0].Err; !errors.Is(err, errRefused) {
					t.Errorf("Renew = %v, want the error of the probe", err)
				}
			})
		}
		calls.Wait()
		if took := time.Since(began); took != time.Second || s.looks.Load() != 1 {
			t.Errorf("%d probes in %v, want one", s.looks.Load(), took)
		}
		s.err = nil
		if _, err := d.Acquire(t.Context(), r); err != nil {
			t.Errorf("Acquire = %v after the service has recovered", err)
		}
		closed(t, d)
	})
}

// What an acquire and a release of a prompt service cost does not show in their memory: an attempt is used again.
func TestGrantedAttemptsAreUsedAgain(t *testing.T) {
	d, r := engine.New(&promptly{}), request("x")
	defer closed(t, d)
	most := 3.0 // the names of attempts, the contexts of steps, and the needs of the service itself
	if got := testing.AllocsPerRun(100, func() {
		g, err := d.Acquire(t.Context(), r)
		if err == nil {
			err = d.Release(t.Context(), g)
		}
		if err != nil {
			t.Fatal(err)
		}
	}); got > most {
		t.Errorf("%.0f allocations, want at most %.0f", got, most)
	}
}
