package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// sessions is a binding of one lock whose holds live on sessions.
type sessions struct {
	service
	rtt time.Duration // of Prove

	mu     sync.Mutex // protects the following fields
	opened int
	ended  int
	prove  error
	leave  error
	late   []string // attempts that Leave was given
	left   int
}

type testSession time.Duration

func (s *testSession) TTL() time.Duration { return time.Duration(*s) }

func (s *sessions) Open(_ context.Context, ttl time.Duration) (engine.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opened++
	own := testSession(ttl)
	return &own, nil
}

func (s *sessions) Prove(ctx context.Context, _ engine.Session) error {
	select {
	case <-time.After(s.rtt):
	case <-ctx.Done():
		return ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.prove
}

func (s *sessions) End(context.Context, engine.Session) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended++
	return nil
}

func (s *sessions) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	s.mu.Lock()
	s.late = append(s.late, l.Late...)
	s.left++
	err := s.leave
	s.mu.Unlock()
	if err != nil {
		return engine.Left{}, err
	}
	return s.service.Leave(ctx, l)
}

func (s *sessions) counts() (opened, ended int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opened, s.ended
}

// A service that takes more than a third of the TTL for a proof is proved all the same, and a renewal counts from the
// sending of the proof.
func TestSlowProof(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sessions{rtt: 800 * time.Millisecond}
		d, r := engine.New(s), request("x")
		r.TTL = 2 * time.Second
		g, err := d.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			time.Sleep(700 * time.Millisecond)
			called := backend.GoClock().Now()
			renewal := d.Renew(within(t, 2*time.Second), []backend.Grant{g})[0]
			now := backend.GoClock().Now()
			if renewal.Err != nil || now.Sub(called) > 2*s.rtt {
				t.Fatalf("Renew = %v after %v", renewal.Err, now.Sub(called))
			}
			if age := now.Sub(renewal.SentAt); age < s.rtt && renewal.SentAt > called {
				t.Errorf("a proof that takes %v is %v old when it is answered", s.rtt, age)
			}
			if now.Sub(g.SentAt) > r.TTL {
				t.Errorf("the hold has expired: it was proved %v ago", now.Sub(g.SentAt))
			}
			g.SentAt = renewal.SentAt
		}
		closed(t, d)
		if opened, ended := s.counts(); opened != 1 || ended != 1 {
			t.Errorf("%d sessions were opened and %d ended, want one", opened, ended)
		}
	})
}

// Holds of one TTL share a session, whose end is a loss of each.
func TestSessionIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sessions{}
		d, r := engine.New(s), request("x")
		lost := make(chan backend.Loss, 1)
		r.Lost = func(l backend.Loss) { lost <- l }
		g, err := d.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		other := request("y")
		other.Wait = false
		if _, err := d.Acquire(t.Context(), other); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("Acquire of what is held = %v", err)
		}
		if opened, _ := s.counts(); opened != 1 {
			t.Errorf("%d sessions for one TTL", opened)
		}
		s.mu.Lock()
		s.prove = engine.ErrNoSession
		s.mu.Unlock()
		time.Sleep(r.TTL)
		if len(lost) == 0 {
			t.Fatal("no loss within a TTL")
		}
		if l := <-lost; l.Reason != backend.ReasonSessionExpired {
			t.Errorf("the loss says %v", l)
		}
		if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("Renew after the end of the session = %v", err)
		}
		closed(t, d)
	})
}

// A hold moves to another session when its own is outgrown, and that one ends.
func TestOutgrownSessionIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sessions{}
		d, r := engine.New(s), request("x")
		g, err := d.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		s.mu.Lock()
		s.prove = engine.ErrOutgrown
		s.mu.Unlock()
		time.Sleep(r.TTL / 2)
		s.mu.Lock()
		s.prove = nil
		s.mu.Unlock()
		if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
			t.Errorf("Renew = %v", err)
		}
		time.Sleep(2 * r.TTL)
		if opened, ended := s.counts(); opened != 2 || ended != 1 {
			t.Errorf("%d sessions were opened and %d ended, want 2 and 1", opened, ended)
		}
		if err := d.Release(t.Context(), g); err != nil {
			t.Errorf("Release = %v", err)
		}
		closed(t, d)
	})
}

// queueing is sessions with places for waiters.
type queueing struct{ sessions }

func (q *queueing) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	p, err := q.sessions.Enter(ctx, r)
	p.Placed = err == nil
	return p, err
}

// A waiter's place that cannot be removed for a TTL ends with its session, although the client holds another name.
func TestPlaceThatCannotBeRemovedEndsWithItsSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &queueing{}
		d, living := engine.New(s), request("x")
		g, err := d.Acquire(t.Context(), living)
		if err != nil {
			t.Fatal(err)
		}
		waits := request("x")
		waits.Wait = true
		s.mu.Lock()
		s.leave = errRefused
		s.mu.Unlock()
		if _, err := d.Acquire(within(t, time.Second), waits); errors.Is(err, backend.ErrUnknown) {
			t.Errorf("Acquire = %v, want a known place", err)
		}
		for began := time.Now(); time.Since(began) < 2*living.TTL; time.Sleep(living.TTL / 4) {
			if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
				t.Fatalf("Renew = %v", err)
			}
		}
		if opened, ended := s.counts(); opened != 2 || ended != 1 {
			t.Errorf("%d sessions were opened and %d ended, want the first to be replaced", opened, ended)
		}
		s.mu.Lock()
		s.leave = nil
		s.mu.Unlock()
		closed(t, d)
	})
}

// The session of a waiter's place does not end before the place has moved to the session that replaces it.
func TestPlaceKeepsItsSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sessions{service: service{owner: "rival"}}
		d, r := engine.New(s), request("x")
		r.Wait = true
		slow := false
		s.enter = func(context.Context, int) error {
			if opened, _ := s.counts(); opened == 2 && !slow {
				slow = true
				time.Sleep(1900 * time.Millisecond)
				if _, ended := s.counts(); ended > 0 {
					t.Errorf("%d sessions ended before the place had moved", ended)
				}
			}
			return nil
		}
		time.AfterFunc(r.TTL/3-time.Millisecond, func() { s.setProve(engine.ErrOutgrown) })
		time.AfterFunc(r.TTL/3+100*time.Millisecond, func() { s.setProve(nil) })
		ctx, cancel := context.WithTimeout(t.Context(), r.TTL)
		defer cancel()
		if _, err := d.Acquire(ctx, r); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Acquire = %v", err)
		}
		if opened, ended := s.counts(); !slow || opened != 2 || ended != 1 {
			t.Errorf("%d sessions were opened and %d ended, want 2 and 1", opened, ended)
		}
		closed(t, d)
	})
}

func (s *sessions) setProve(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.prove = err
}

// unheard is a binding whose answers to Extend and Leave are lost.
type unheard struct {
	sessions
	lost bool
}

func (s *unheard) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	left, err := s.sessions.Leave(ctx, l)
	if s.lost {
		err = backend.ErrUnknown
	}
	return left, err
}

func (s *unheard) Extend(
	ctx context.Context, own engine.Session, holds []engine.Holding,
) ([]engine.Outcome, error) {
	outcomes, err := s.sessions.Extend(ctx, own, holds)
	if s.lost {
		err = backend.ErrUnknown
	}
	return outcomes, err
}

// A session to which a renewal may have moved a hold does not end while the hold may be valid.
func TestUnansweredMoveKeepsItsSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &unheard{}
		d, r := engine.New(s), request("x")
		g, err := d.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		s.setProve(engine.ErrOutgrown)
		time.Sleep(r.TTL / 2)
		s.setProve(nil)
		s.lost = true
		if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("Renew = %v, want ErrUnknown", err)
		}
		s.service.mu.Lock()
		s.owner = "" // the service has one lock, and x is another one than y
		s.service.mu.Unlock()
		other, err := d.Acquire(t.Context(), request("y"))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Release(t.Context(), other); !errors.Is(err, backend.ErrUnknown) { // the others leave the session
			t.Errorf("Release = %v, want ErrUnknown", err)
		}
		time.Sleep(r.TTL / 2)
		if opened, ended := s.counts(); opened != 2 || ended != 0 {
			t.Errorf("%d sessions were opened and %d ended, want 2 and 0", opened, ended)
		}
		closed(t, d)
	})
}

// A release names the attempts that may arrive late. Attempts that nobody releases end with their session within a TTL
// and a half, although another hold of the session is renewed.
func TestDoubtEndsBesideALivingHold(t *testing.T) {
	for _, release := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			s := &sessions{}
			s.enter = func(ctx context.Context, n int) error {
				if n > 1 {
					<-ctx.Done()
				}
				return ctx.Err()
			}
			d, living := engine.New(s), request("x")
			g, err := d.Acquire(t.Context(), living)
			if err != nil {
				t.Fatal(err)
			}
			r := request("y")
			if _, err := d.Acquire(within(t, time.Second), r); !errors.Is(err, backend.ErrUnknown) {
				t.Errorf("Acquire = %v, want ErrUnknown", err)
			}
			if release {
				_ = d.Release(t.Context(), r.Grant())
			}
			for began := time.Now(); time.Since(began) < living.TTL*3/2; time.Sleep(living.TTL / 4) {
				if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
					t.Fatalf("Renew = %v", err)
				}
			}
			opened, ended := s.counts()
			s.mu.Lock()
			late := len(s.late)
			s.mu.Unlock()
			if release && (late != 1 || opened != 1) || !release && (opened != 2 || ended != 1) {
				t.Errorf("released %v: %d late attempts named, %d sessions opened, %d ended", release, late, opened, ended)
			}
			closed(t, d)
		})
	}
}

// An Enter that is answered after its caller has left can arrive no later: its release names nothing.
func TestAnswerWithoutACallerLeavesNothingLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sessions{}
		s.enter = func(context.Context, int) error {
			time.Sleep(1500 * time.Millisecond)
			return nil
		}
		d, r := engine.New(s), request("x")
		if _, err := d.Acquire(within(t, time.Second), r); !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("Acquire = %v, want ErrUnknown", err)
		}
		if err := d.Release(t.Context(), r.Grant()); err != nil {
			t.Errorf("Release = %v", err)
		}
		s.mu.Lock()
		if len(s.late) > 0 {
			t.Errorf("the release names %d late attempts", len(s.late))
		}
		s.mu.Unlock()
		closed(t, d)
	})
}

// lasting is a binding whose sessions keep every name of which a test asks.
type lasting struct {
	sessions
	asked []time.Duration // by Open
}

func (s *lasting) Describe() backend.Description {
	d := s.sessions.Describe()
	d.MaxTTL, d.TTLGranularity = time.Minute, time.Second
	return d
}

func (s *lasting) Open(ctx context.Context, ttl time.Duration) (engine.Session, error) {
	s.mu.Lock()
	s.asked = append(s.asked, ttl)
	s.mu.Unlock()
	return s.sessions.Open(ctx, ttl)
}

func (*lasting) Enter(_ context.Context, r engine.Entering) (engine.Position, error) {
	return engine.Position{Held: true, Incarnation: r.RequestID}, nil
}

// The first eight TTLs of a client have sessions of their lengths. Similar TTLs share one session beyond that, which is
// at most a quarter longer and not longer than the service allows. A hold has the TTL that was requested, and stays on
// its session.
func TestSimilarTTLsShareASession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &lasting{}
		d := engine.New(s)
		var held []backend.Grant
		acquire := func(ttl time.Duration) {
			r := request("x")
			r.RequestID, r.TTL = fmt.Sprintf("request-%09d", ttl), ttl
			g, err := d.Acquire(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			if g.TTL != ttl {
				t.Errorf("a hold requested for %v has %v", ttl, g.TTL)
			}
			held = append(held, g)
		}
		for ttl := 10 * time.Second; ttl <= time.Minute; ttl += time.Second {
			acquire(ttl)
			if n := len(s.asked); len(held) <= 8 && (n != len(held) || s.asked[n-1] != ttl) {
				t.Errorf("sessions of %v for the first TTLs, which end with %v", s.asked, ttl)
			}
		}
		steps := s.asked[8:]
		if len(steps) > 8 {
			t.Errorf("%d TTLs have sessions of %v", len(held)-8, steps)
		}
		for i, g := range held[8:] {
			fits := func(ttl time.Duration) bool {
				return g.TTL <= ttl && ttl <= g.TTL*5/4+time.Second && ttl <= time.Minute
			}
			if !slices.ContainsFunc(s.asked, fits) {
				t.Errorf("hold %d of %v has no session: %v", i, g.TTL, s.asked)
			}
		}
		opened := len(s.asked)
		for range 30 {
			time.Sleep(3 * time.Second)
			called := backend.GoClock().Now()
			for i, renewal := range d.Renew(t.Context(), held) {
				if renewal.Err != nil || renewal.TTL != held[i].TTL || called.Sub(renewal.SentAt) > held[i].TTL/6 {
					t.Fatalf("Renew of a hold of %v = %+v", held[i].TTL, renewal)
				}
			}
		}
		if len(s.asked) != opened {
			t.Errorf("renewals opened sessions of %v", s.asked[opened:])
		}
		closed(t, d)
	})
}
