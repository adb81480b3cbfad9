package engine_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// checked is a binding that checks the waiters of each name together, and pushes nothing unless a test does.
type checked struct {
	notify func(engine.Push)

	mu      sync.Mutex // protects the following fields
	holders map[string]string
	enters  int
	checks  []string      // the checked names, with a question mark after each quick check
	fail    int           // checks that fail
	again   time.Duration // between checks that are all full; 0: some are quick
	settled int
	left    int // holds that have ended by a call
}

func (s *checked) Describe() backend.Description {
	return backend.Description{Name: "test", Clock: backend.GoClock(), TTLGranularity: 1}
}

func (s *checked) Prompt()                           {}
func (s *checked) Classify(error) engine.Class       { return engine.NotDone }
func (s *checked) Ping(context.Context) error        { return nil }
func (s *checked) Close(context.Context) error       { return nil }
func (s *checked) Listen(notify func(p engine.Push)) { s.notify = notify }
func (s *checked) Chance() float64                   { return 0.5 }

func (s *checked) Extend(_ context.Context, _ engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	return make([]engine.Outcome, len(holds)), nil
}

func (s *checked) Enter(_ context.Context, r engine.Entering) (engine.Position, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.enters++
	if holder := s.holders[r.Name]; holder != "" && holder != r.RequestID {
		return engine.Position{Placed: true, Place: strconv.Itoa(s.enters)}, nil
	}
	s.holders[r.Name] = r.RequestID
	return engine.Position{Held: true, Incarnation: "1"}, nil
}

func (s *checked) Leave(_ context.Context, l engine.Leaving) (engine.Left, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.holders[l.Name] == l.RequestID
	if was {
		s.left++
		delete(s.holders, l.Name)
	}
	return engine.Left{Was: was, Settle: time.Second}, nil
}

// Expire ends a hold as Leave does.
func (s *checked) Expire(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	return s.Leave(ctx, l)
}

// Settle finds twice that a waiter has not answered.
func (s *checked) Settle(context.Context, string) (time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.settled++; s.settled < 2 {
		return time.Second, nil
	}
	return 0, nil
}

func (s *checked) Check(_ context.Context, all []engine.Waiters, queues int) ([]engine.Found, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail > 0 {
		s.fail--
		return nil, errRefused
	}
	out := make([]engine.Found, len(all))
	for i, w := range all {
		what := w.Name
		if w.Quick {
			what += "?"
		}
		s.checks = append(s.checks, what)
		if w.Quick && s.holders[w.Name] != "" {
			continue
		}
		out[i] = engine.Found{Again: time.Duration(queues) * 10 * time.Second, Quick: true}
		if s.again > 0 {
			out[i] = engine.Found{Again: s.again}
		}
		if s.holders[w.Name] == "" {
			out[i].Turns = []int{0}
		}
	}
	return out, nil
}

func (s *checked) asked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.checks
	s.checks = nil
	slices.Sort(out)
	return out
}

// of returns the value of a field.
func of[T any](s *checked, field *T) T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *field
}

// Waiters of a client send nothing: one exchange a second asks for all their names, and asks fully only when a full
// check is due. A waiter Enters when a check finds its name free, or when a push names it. Without waiters the driver
// asks nothing.
func TestWaitersAreCheckedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &checked{holders: map[string]string{"a": "other", "b": "other"}}
		d := engine.New(s)
		got := make(chan backend.Grant, 5)
		for _, name := range []string{"a", "a", "a", "b", "b"} {
			r := request(name)
			r.Wait = true
			go func() {
				g, err := d.Acquire(t.Context(), r)
				if err != nil {
					t.Error(err)
				}
				got <- g
			}()
		}
		time.Sleep(200 * time.Millisecond)
		if asked := s.asked(); !slices.Equal(asked, []string{"a", "b"}) {
			t.Errorf("after the first places %v were checked, want both names", asked)
		}
		time.Sleep(4 * time.Second)
		if asked := s.asked(); len(asked) < 6 || len(asked) > 8 || slices.Contains(asked, "a") {
			t.Errorf("within 4 s %v were checked, want quick checks once a second", asked)
		}
		if of(s, &s.enters) != 5 {
			t.Errorf("5 waiters have entered %d times", of(s, &s.enters))
		}

		free := func(name string) {
			s.mu.Lock()
			defer s.mu.Unlock()
			delete(s.holders, name)
		}
		free("a")
		first := <-got
		time.Sleep(time.Second) // until the next quick check at most
		if s.asked(); of(s, &s.enters) != 6 {
			t.Errorf("a name that was found free made its waiters enter %d times, want one", of(s, &s.enters)-5)
		}
		s.mu.Lock()
		s.fail = 1
		s.mu.Unlock()
		s.notify(engine.Push{What: engine.PushTurns, Name: "a"})
		synctest.Wait()
		if time.Sleep(time.Second); !slices.Contains(s.asked(), "a") {
			t.Error("a check that failed was not made again")
		}
		s.notify(engine.Push{What: engine.PushGap})
		synctest.Wait()
		asked := slices.DeleteFunc(s.asked(), func(name string) bool { return strings.HasSuffix(name, "?") }) // due by chance
		if !slices.Equal(asked, []string{"a", "b"}) {
			t.Errorf("when pushes may have been lost %v were checked, want all names", asked)
		}
		free("b")
		s.notify(engine.Push{What: engine.PushTurns, Name: "b", After: 100 * time.Millisecond})
		began := time.Now()
		if g := <-got; g.Name != "b" || time.Since(began) > 200*time.Millisecond {
			t.Errorf("%s was granted %v after a push that named b and 100 ms", g.Name, time.Since(began))
		}
		for _, g := range []backend.Grant{first, {Name: "b"}} {
			if g.Name == "b" {
				free("b")
				continue
			}
			if err := d.Release(t.Context(), g); err != nil {
				t.Error(err)
			}
		}
		for range 3 {
			g := <-got
			if err := d.Release(t.Context(), g); err != nil {
				t.Error(err)
			}
		}
		s.asked()
		if time.Sleep(time.Minute); len(s.asked()) > 0 {
			t.Error("without waiters something is checked")
		}
		if of(s, &s.settled) < 2 || of(s, &s.settled) > 4 { // for two names, the first name twice; none after a minute
			t.Errorf("what was handed over was settled %d times, want until that says it is over", of(s, &s.settled))
		}
		closed(t, d)
	})
}

// A checked waiter leaves with its context and with Close.
func TestCheckedWaiterEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &checked{holders: map[string]string{"a": "other"}}
		d := engine.New(s)
		ends := make(chan error, 2)
		for _, ctx := range []context.Context{within(t, time.Second), t.Context()} {
			r := request("a")
			r.Wait = true
			go func() {
				_, err := d.Acquire(ctx, r)
				ends <- err
			}()
		}
		if err := <-ends; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a waiter whose context has ended: %v", err)
		}
		closed(t, d)
		if err := <-ends; !errors.Is(err, backend.ErrClosed) {
			t.Errorf("a waiter of a driver that closes: %v", err)
		}
	})
}

// While quick checks find nothing, the driver makes a full check when it is due, not up to a quick interval later.
func TestFullChecksAreMadeWhenDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &checked{holders: map[string]string{"a": "other"}, again: 1500 * time.Millisecond}
		d, ended := engine.New(s), make(chan struct{})
		r := request("a")
		r.Wait = true
		go func() {
			defer close(ended)
			_, _ = d.Acquire(t.Context(), r)
		}()
		time.Sleep(time.Second)
		s.asked()
		if time.Sleep(15 * time.Second); len(s.asked()) != 10 {
			t.Error("within 15 s there were not 10 checks, one every 1.5 s")
		}
		closed(t, d)
		<-ended
	})
}

// Expire ends a hold, whose name is settled then, and says when the hold is gone.
func TestExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &checked{holders: map[string]string{}}
		d := engine.New(s)
		g, err := d.Acquire(t.Context(), request("a"))
		if err != nil {
			t.Fatal(err)
		}
		if err := engine.Expire(t.Context(), d, g); err != nil || of(s, &s.left) != 1 {
			t.Errorf("Expire = %v, and %d holds have ended, want 1", err, of(s, &s.left))
		}
		if time.Sleep(time.Minute); of(s, &s.settled) != 2 {
			t.Errorf("the name was settled %d times, want until that says it is over", of(s, &s.settled))
		}
		if err := engine.Expire(t.Context(), d, g); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("Expire of a hold that is gone = %v, want ErrNotHeld", err)
		}
		closed(t, d)
		if err := engine.Expire(t.Context(), d, g); !errors.Is(err, backend.ErrClosed) {
			t.Errorf("Expire after Close = %v, want ErrClosed", err)
		}
		without := engine.New(&service{})
		if err := engine.Expire(t.Context(), without, g); !errors.Is(err, backend.ErrUnsupported) {
			t.Errorf("Expire over a service without it = %v, want ErrUnsupported", err)
		}
		closed(t, without)
	})
}
