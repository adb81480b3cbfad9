package engine_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// replicated is a service of several endpoints. It does not answer the first sendings of a step that silent names.
type replicated struct {
	sessions
	silent string
	dead   int // how many sendings; 0: one
	refuse int // how many sendings after these fail at once

	mu    sync.Mutex // protects the following field
	asked map[string]int
}

func (*replicated) Endpoints() int { return 3 }

// ask blocks the first sendings of a step, as a step of an endpoint that does not answer.
func (s *replicated) ask(ctx context.Context, step string) error {
	s.mu.Lock()
	if s.asked == nil {
		s.asked = map[string]int{}
	}
	s.asked[step]++
	n, dead := s.asked[step], max(s.dead, 1)
	s.mu.Unlock()
	switch {
	case s.silent != step || n > dead+s.refuse:
		return nil
	case n > dead:
		return backend.ErrUnavailable
	}
	<-ctx.Done()
	return ctx.Err()
}

func (s *replicated) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	if err := s.ask(ctx, "enter"); err != nil {
		return engine.Position{}, err
	}
	return s.sessions.Enter(ctx, r)
}

// Open is carried out before the answer is lost.
func (s *replicated) Open(ctx context.Context, ttl time.Duration) (engine.Session, error) {
	own, err := s.sessions.Open(ctx, ttl)
	return own, errors.Join(err, s.ask(ctx, "open"))
}

func (s *replicated) Prove(ctx context.Context, own engine.Session) error {
	if err := s.ask(ctx, "prove"); err != nil {
		return err
	}
	return s.sessions.Prove(ctx, own)
}

// Leave is carried out before the answer is lost.
func (s *replicated) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	left, err := s.sessions.Leave(ctx, l)
	return left, errors.Join(err, s.ask(ctx, "leave"))
}

func (s *replicated) Extend(
	ctx context.Context, own engine.Session, holds []engine.Holding,
) ([]engine.Outcome, error) {
	if err := s.ask(ctx, "extend"); err != nil {
		return nil, err
	}
	return s.sessions.Extend(ctx, own, holds)
}

// Each sending without an answer delays a step by half a second at most, and the release names the attempts that it may carry
// out late.
func TestSilentEndpointIsPassedBy(t *testing.T) {
	steps := []string{"enter", "prove", "extend", "leave", "open"}
	for i, silent := range slices.Repeat(steps, 3) {
		synctest.Test(t, func(t *testing.T) {
			s, most := &replicated{silent: silent, dead: 1}, 600*time.Millisecond
			switch i / len(steps) {
			case 1:
				s.dead, most = 2, 1100*time.Millisecond
			case 2: // no leader yet
				s.refuse, most = 3, 900*time.Millisecond
			}
			d, r := engine.New(s), request("x")
			began := time.Now()
			g, err := d.Acquire(t.Context(), r)
			if err != nil {
				t.Fatalf("%s: Acquire = %v", silent, err)
			}
			time.Sleep(r.TTL/3 - time.Since(began)) // what was proved is old
			if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
				t.Errorf("%s: Renew = %v", silent, err)
			}
			if err := d.Release(t.Context(), g); err != nil {
				t.Errorf("%s: Release = %v", silent, err)
			}
			if took := time.Since(began); took > r.TTL/3+most {
				t.Errorf("%s: the calls took %v after %d lost and %d refused sendings", silent, took, s.dead, s.refuse)
			}
			s.sessions.mu.Lock()
			late := len(s.late)
			s.sessions.mu.Unlock()
			if want := silent == "enter"; (late > 0) != want {
				t.Errorf("%s: the release names %d late attempts", silent, late)
			}
			if s.holder() != "" {
				t.Errorf("%s: the name is held after the release", silent)
			}
			closed(t, d)
			if opened, ended := s.counts(); opened != ended {
				t.Errorf("%s: %d sessions were opened, and %d ended", silent, opened, ended)
			}
		})
	}
}

// The context of an acquire ends when its first sending would be repeated: the sending may be carried out, and the error
// says so, or the acquire removes it, unless the repetition is granted in time.
func TestAcquireEndsAsItIsRepeated(t *testing.T) {
	for range 50 { // which comes first is random
		synctest.Test(t, func(t *testing.T) {
			s := &replicated{silent: "enter"}
			d := engine.New(s)
			r := request("x")
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			_, err := d.Acquire(ctx, r)
			s.sessions.mu.Lock()
			removed := s.left > 0
			s.sessions.mu.Unlock()
			if err != nil && !errors.Is(err, backend.ErrUnknown) && !removed {
				t.Errorf("Acquire = %v, and nothing removes what was sent", err)
			}
			closed(t, d)
		})
	}
}

// The release of a hold that the driver does not have returns ErrNotHeld, also beside a silent endpoint.
func TestReleaseOfNothingBesideASilentEndpoint(t *testing.T) {
	for _, incarnation := range []string{"", "of another request"} {
		synctest.Test(t, func(t *testing.T) {
			d, g := engine.New(&replicated{silent: "leave"}), request("x").Grant()
			g.Incarnation = incarnation
			if err := d.Release(t.Context(), g); !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("Release = %v, want ErrNotHeld", err)
			}
			closed(t, d)
		})
	}
}

// followed is a service that notifies of what becomes of a session.
type followed struct {
	sessions
	pushes chan engine.Push // a PushGap ends Follow
}

func (s *followed) Follow(ctx context.Context, _ engine.Session, notify func(engine.Push)) error {
	for {
		select {
		case p := <-s.pushes:
			if p.What == engine.PushGap {
				return nil
			}
			notify(p)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// A loss that the service notifies of reaches the hold that it is about, and so does the end of the session.
func TestSessionIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &followed{pushes: make(chan engine.Push)}
		d := engine.New(s)
		lost := make(chan backend.Loss, 2)
		for _, end := range []func() backend.Reason{
			func() backend.Reason {
				loss := backend.Loss{Reason: backend.ReasonForceReleased}
				s.pushes <- engine.Push{RequestID: "the-one-request-id", Incarnation: "1", What: engine.PushLost, Loss: loss}
				return loss.Reason
			},
			func() backend.Reason {
				s.sessions.mu.Lock()
				s.prove = engine.ErrNoSession
				s.sessions.mu.Unlock()
				s.pushes <- engine.Push{What: engine.PushGap}
				return backend.ReasonSessionExpired
			},
		} {
			r := request("x")
			r.RequestID, r.Lost = "the-one-request-id", func(l backend.Loss) { lost <- l }
			g, err := d.Acquire(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			s.pushes <- engine.Push{RequestID: "the-one-request-id", Incarnation: "another", What: engine.PushLost}
			synctest.Wait()
			if len(lost) > 0 {
				t.Fatalf("the loss of another hold: %+v", <-lost)
			}
			began, want := time.Now(), end()
			if l := <-lost; l.Reason != want || time.Since(began) > time.Second {
				t.Errorf("the loss says %v after %v, want %v", l, time.Since(began), want)
			}
			_ = d.Release(t.Context(), g)
		}
		closed(t, d)
	})
}

// The release of a hold during a renewal that moves it to another session leaves neither session alive.
func TestReleaseOvertakesARenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &slowMoves{moves: make(chan struct{})}
		d, r := engine.New(s), request("x")
		g, err := d.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		moved := g
		moved.TTL = 2 * r.TTL
		renewed := make(chan error)
		go func() { renewed <- d.Renew(t.Context(), []backend.Grant{moved})[0].Err }()
		synctest.Wait()
		if err := d.Release(t.Context(), g); err != nil {
			t.Errorf("Release = %v", err)
		}
		close(s.moves)
		<-renewed
		time.Sleep(3 * moved.TTL)
		if opened, ended := s.counts(); opened != 2 || ended != 2 {
			t.Errorf("%d sessions were opened and %d have ended, want 2 and 2", opened, ended)
		}
		closed(t, d)
	})
}

// slowMoves is a service that answers no move until the test closes moves.
type slowMoves struct {
	sessions
	moves chan struct{}
}

func (s *slowMoves) Extend(
	ctx context.Context, own engine.Session, holds []engine.Holding,
) ([]engine.Outcome, error) {
	<-s.moves
	return s.sessions.Extend(ctx, own, holds)
}

// misconfigured is a service whose options are wrong.
type misconfigured struct{ sessions }

func (*misconfigured) Unfit() error { return backend.ErrInvalidOption }

func TestEveryCallReturnsInvalidOptions(t *testing.T) {
	d, r := engine.New(&misconfigured{}), request("x")
	_, acquire := d.Acquire(t.Context(), r)
	_, look := d.Look(t.Context(), "x")
	for call, err := range map[string]error{
		"Acquire": acquire, "Renew": d.Renew(t.Context(), []backend.Grant{r.Grant()})[0].Err,
		"Release": d.Release(t.Context(), r.Grant()), "Ping": d.Ping(t.Context()),
	} {
		if !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%s = %v, want ErrInvalidOption", call, err)
		}
	}
	if !errors.Is(look, backend.ErrUnsupported) {
		t.Errorf("Look = %v, want ErrUnsupported", look)
	}
	closed(t, d)
	if err := d.Ping(t.Context()); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Ping after Close = %v", err)
	}
}

// watched is a service whose waiters watch. The place of a waiter is lost after the fourth Enter, which gets another
// one.
type watched struct {
	sessions

	mu      sync.Mutex // protects the following fields
	entered int
	watches []string
}

func (s *watched) Enter(context.Context, engine.Entering) (engine.Position, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entered++
	place := "first"
	if s.entered > 4 {
		place = "second"
	}
	return engine.Position{Placed: true, Behind: "holder", Place: place}, nil
}

func (s *watched) Watch(ctx context.Context, what string, wake func()) error {
	s.mu.Lock()
	s.watches = append(s.watches, what)
	s.mu.Unlock()
	wake()
	<-ctx.Done()
	return ctx.Err()
}

// A waiter watches its predecessor and, if that takes long, its place, also when its place changes.
func TestWaiterWatchesItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &watched{}
		d, r := engine.New(s), request("x")
		r.Wait = true
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := d.Acquire(ctx, r)
			done <- err
		}()
		wants := func(what ...string) {
			s.mu.Lock()
			defer s.mu.Unlock()
			if !slices.Equal(s.watches, what) {
				t.Errorf("it watches %q, want %q", s.watches, what)
			}
		}
		synctest.Wait() // the watch has woken it
		wants("holder")
		time.Sleep(5 * time.Minute)
		wants("holder", "first", "second")
		cancel()
		<-done
		closed(t, d)
	})
}

// taken is a service that grants every name, and has taken y away.
type taken struct{ replicated }

func (s *taken) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	if err := s.ask(ctx, "enter "+r.Name); err != nil {
		return engine.Position{}, err
	}
	return engine.Position{Held: true, Incarnation: r.Name}, nil
}

func (*taken) Extend(_ context.Context, _ engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	out := make([]engine.Outcome, len(holds))
	for i, h := range holds {
		out[i].Gone = h.Name == "y"
	}
	return out, nil
}

func (s *taken) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	_, err := s.sessions.Leave(ctx, l)
	return engine.Left{}, err
}

// A hold is lost, and an endpoint that did not answer may bring it back. A release names that attempt. Without a
// release its session ends within a TTL and a half, although another hold of the session is renewed.
func TestLostHoldThatMayComeBack(t *testing.T) {
	for _, release := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			s := &taken{replicated{silent: "enter y"}}
			d, living := engine.New(s), request("x")
			g, err := d.Acquire(t.Context(), living)
			if err != nil {
				t.Fatal(err)
			}
			lost, err := d.Acquire(t.Context(), request("y"))
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Renew(t.Context(), []backend.Grant{lost})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("Renew = %v, want ErrNotHeld", err)
			}
			if release {
				if err := d.Release(t.Context(), lost); !errors.Is(err, backend.ErrNotHeld) {
					t.Errorf("Release = %v, want ErrNotHeld", err)
				}
			}
			for began := time.Now(); time.Since(began) < living.TTL*3/2; time.Sleep(living.TTL / 4) {
				if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
					t.Fatalf("Renew = %v", err)
				}
			}
			opened, ended := s.counts()
			s.sessions.mu.Lock()
			late := len(s.late)
			s.sessions.mu.Unlock()
			if release && (late != 1 || opened != 1) || !release && (opened != 2 || ended != 1) {
				t.Errorf("released: %v, %d late attempts named, %d sessions opened, %d ended", release, late, opened, ended)
			}
			closed(t, d)
		})
	}
}
