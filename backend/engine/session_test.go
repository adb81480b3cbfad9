package engine_test

import (
	"context"
	"errors"
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
	s.mu.Unlock()
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

// A release names the attempts that may arrive late. What nobody releases ends with its session within a TTL and a
// half, although another hold of the session is renewed.
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
				t.Errorf("released: %v, %d late attempts named, %d sessions opened, %d ended", release, late, opened, ended)
			}
			closed(t, d)
		})
	}
}
