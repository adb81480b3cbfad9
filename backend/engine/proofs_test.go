package engine_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// proving is a binding on which every answered exchange proves the session, and whose holds may have a maximum.
type proving struct {
	sessions
	rtt    time.Duration   // of Extend
	proofs atomic.Int64    // calls of Prove
	proved atomic.Int64    // the last instant
	last   backend.Instant // of every hold
	extend error
	notify func(engine.Push)
}

func (p *proving) Listen(notify func(engine.Push)) { p.notify = notify }

func (p *proving) Proved(engine.Session) backend.Instant { return backend.Instant(p.proved.Load()) }

func (p *proving) Prove(ctx context.Context, s engine.Session) error {
	p.proofs.Add(1)
	return p.sessions.Prove(ctx, s)
}

func (p *proving) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	p.proved.Store(int64(r.Sent))
	pos, err := p.sessions.Enter(ctx, r)
	pos.Last = p.last
	return pos, err
}

func (p *proving) Extend(_ context.Context, _ engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	sent := backend.GoClock().Now()
	time.Sleep(p.rtt)
	if p.extend != nil {
		return nil, p.extend
	}
	p.proved.Store(int64(sent))
	out := make([]engine.Outcome, len(holds))
	for i := range out {
		out[i].Last = p.last
	}
	return out, nil
}

// A session that other exchanges prove needs no proof of its own, and a renewal counts from the sending of its only
// exchange.
func TestOtherExchangesProveASession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &proving{rtt: 100 * time.Millisecond}
		d, r := engine.New(p), request("x")
		g, err := d.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			time.Sleep(r.TTL / 4)
			called := backend.GoClock().Now()
			if renewal := d.Renew(t.Context(), []backend.Grant{g})[0]; renewal.Err != nil || renewal.SentAt != called {
				t.Fatalf("Renew = %+v, want the instant of its call", renewal)
			}
		}
		if n := p.proofs.Load(); n != 0 {
			t.Errorf("%d proofs beside the renewals", n)
		}
		time.Sleep(r.TTL) // nothing proves it now
		if n := p.proofs.Load(); n == 0 {
			t.Error("no proof without another exchange")
		}
		closed(t, d)
	})
}

// A hold with a maximum ends by it, however often it is renewed.
func TestHoldWithAMaximum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &proving{}
		d, r := engine.New(p), request("x")
		now := backend.GoClock().Now()
		p.last = now.Add(r.TTL / 2)
		g, err := d.Acquire(t.Context(), r)
		if err != nil || g.SentAt.Add(g.TTL) != p.last {
			t.Fatalf("Acquire = %+v, %v; want the end of the maximum", g, err)
		}
		p.last = now.Add(2 * r.TTL)
		if renewal := d.Renew(t.Context(), []backend.Grant{g})[0]; renewal.Err != nil || renewal.TTL != r.TTL || renewal.Last {
			t.Errorf("Renew long before the maximum = %+v", renewal)
		}
		p.last = now.Add(r.TTL / 2)
		renewal := d.Renew(t.Context(), []backend.Grant{g})[0]
		if renewal.Err != nil || renewal.SentAt.Add(renewal.TTL) != p.last || !renewal.Last {
			t.Errorf("the last Renew = %+v", renewal)
		}
		time.Sleep(r.TTL / 2)
		var gone *backend.NotHeldError
		if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; !errors.As(err, &gone) || gone.Reason != backend.ReasonMaxHold {
			t.Errorf("Renew after the maximum = %v", err)
		}
		closed(t, d)
	})
}

// A renewal that finds the end of the session says so.
func TestRenewalFindsTheEndOfTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &proving{}
		d, r := engine.New(p), request("x")
		g, err := d.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		p.extend = engine.ErrNoSession
		var gone *backend.NotHeldError
		err = d.Renew(t.Context(), []backend.Grant{g})[0].Err
		if !errors.As(err, &gone) || gone.Reason != backend.ReasonSessionExpired {
			t.Errorf("Renew = %v", err)
		}
		closed(t, d)
	})
}

// The reason of a loss is pushed once. A later answer may not have it any more.
func TestReasonOfAPushedLossIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &proving{}
		d, r := engine.New(p), request("x")
		g, err := d.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		p.owner = ""
		p.notify(engine.Push{
			What: engine.PushLost, RequestID: g.RequestID, Incarnation: g.Incarnation,
			Loss: backend.Loss{Reason: backend.ReasonForceReleased, Text: "maintenance"},
		})
		var gone *backend.NotHeldError
		if err := d.Release(t.Context(), g); !errors.As(err, &gone) || gone.Reason != backend.ReasonForceReleased ||
			gone.Text != "maintenance" {
			t.Errorf("Release = %v", err)
		}
		closed(t, d)
	})
}

// A hold whose loss was pushed does not keep its session, although nobody releases it.
func TestLostHoldLeavesItsSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &proving{}
		d, r := engine.New(p), request("x")
		g, err := d.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		p.notify(engine.Push{
			What: engine.PushLost, RequestID: g.RequestID, Incarnation: g.Incarnation,
			Loss: backend.Loss{Reason: backend.ReasonEvicted},
		})
		time.Sleep(4 * r.TTL)
		if opened, ended := p.counts(); opened != 1 || ended != 1 {
			t.Errorf("%d sessions were opened and %d ended", opened, ended)
		}
		closed(t, d)
	})
}

// blocking is a patient binding whose Leave ends only with its context.
type blocking struct{ patient }

func (*blocking) Enter(context.Context, engine.Entering) (engine.Position, error) {
	return engine.Position{Placed: true}, nil
}

func (*blocking) Leave(ctx context.Context, _ engine.Leaving) (engine.Left, error) {
	<-ctx.Done()
	return engine.Left{}, ctx.Err()
}

// denying is a binding that denies the first Leaves.
type denying struct {
	blocking
	denied, left atomic.Int64
}

func (s *denying) Leave(context.Context, engine.Leaving) (engine.Left, error) {
	if s.left.Add(1) <= s.denied.Load() {
		return engine.Left{}, backend.ErrDenied
	}
	return engine.Left{Was: true}, nil
}

// The removal of a place that is denied is repeated: an operator may allow it.
func TestDeniedCleanupIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &denying{}
		s.denied.Store(3)
		d, r := engine.New(s), request("x")
		r.Wait = true
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := d.Acquire(ctx, r)
			done <- err
		}()
		synctest.Wait()
		cancel()
		<-done
		time.Sleep(r.TTL)
		if n := s.left.Load(); n != 4 {
			t.Errorf("%d tries, want one after the last refusal", n)
		}
		closed(t, d)
	})
}

// Close does not wait for a cleanup as long as for an exchange.
func TestCloseBoundsCleanup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, r := engine.New(&blocking{}), request("x")
		r.Wait = true
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := d.Acquire(ctx, r)
			done <- err
		}()
		synctest.Wait()
		cancel()
		<-done
		began := time.Now()
		closed(t, d)
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("Close took %v", took)
		}
	})
}
