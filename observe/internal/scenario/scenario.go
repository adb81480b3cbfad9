// Package scenario is a life of locks in which every type of event happens, for the tests of the observers.
package scenario

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// TTL is the lease length of the clients.
const TTL = 3 * time.Second

// Want has the readings of the instruments after Run: for a histogram the number of measurements. The first key is the
// instrument's name, and the second the value of that instrument's label. Missing ones are 0, or not exported.
var Want = map[[2]string]float64{
	{"acquire.duration", "acquired"}:  4,
	{"acquire.duration", "contended"}: 2,
	{"acquire.duration", "failed"}:    1,
	{"wait.duration", "acquired"}:     1,
	{"wait.duration", "contended"}:    2,
	{"hold.duration", "released"}:     2,
	{"hold.duration", "lost"}:         2,
	{"renew.duration", ""}:            4,
	{"losses", "expired"}:             1,
	{"losses", "force-released"}:      1,
	{"refusals", "held"}:              2,
	{"refusals", "deadlock"}:          1,
	{"suspects", ""}:                  1,
	{"forced_releases", "released"}:   1,
	{"forced_releases", "failed"}:     1,
	{"leases", ""}:                    0,
	{"waiters", ""}:                   0,
	{"leaders", ""}:                   0,
}

// Service is a lock service in the bubble of a synctest.Test.
type Service struct {
	t     *testing.T
	store *memory.Store
}

// New returns a service.
func New(t *testing.T) *Service {
	return &Service{t, memory.NewStore(&memory.Options{Clock: backend.GoClock()})}
}

// Client returns a client of the service, which is closed at the end of the test.
func (s *Service) Client(owner string, o fencelock.Observer) (*fencelock.Client, *memory.Driver) {
	s.t.Helper()
	d := s.store.Driver()
	c, err := fencelock.ForCorrectness(d, &fencelock.Options{Owner: owner, TTL: TTL, Observer: o})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil {
			s.t.Error(err)
		}
	})
	return c, d
}

// Run lets everything happen to a client with the observer, within the caller's context. It returns when all events
// have been delivered.
func (s *Service) Run(ctx context.Context, o fencelock.Observer) {
	t := s.t
	t.Helper()
	rival, _ := s.Client("rival", nil)
	c, d := s.Client("worker", o)
	want := func(err, target error) {
		t.Helper()
		if !errors.Is(err, target) {
			t.Errorf("error %v, want %v", err, target)
		}
	}
	// Waits: one ends without the lock, one with it. The hold is renewed once, and ends after two seconds.
	theirs := s.must(rival.Acquire(ctx, "orders/1"))
	_, err := c.TryAcquire(ctx, "orders/1")
	want(err, fencelock.ErrHeld)
	_, err = c.Acquire(ctx, "orders/1", fencelock.WaitAtMost(time.Second))
	want(err, fencelock.ErrHeld)
	time.AfterFunc(time.Second, func() { want(theirs.Release(ctx), nil) })
	ours := s.must(c.Acquire(ctx, "orders/1"))
	time.Sleep(1500 * time.Millisecond)
	_, err = c.Acquire(ours.Context(), "orders/1")
	want(err, fencelock.ErrDeadlock)
	time.Sleep(500 * time.Millisecond)
	want(ours.Release(ctx), nil)
	// An election, with a hold that is renewed and released.
	want(c.Lead(ctx, "orders/lead", func(context.Context, *fencelock.Lease) error {
		time.Sleep(2 * time.Second)
		return nil
	}), nil)
	// A forced release, and one without a hold.
	victim := s.must(c.Acquire(ctx, "orders/2"))
	want(c.ForceRelease(ctx, "orders/2", "its host is gone", fencelock.ForcedBy("Ann")), nil)
	<-victim.Context().Done()
	want(c.ForceRelease(ctx, "orders/2", "again"), fencelock.ErrNotHeld)
	// A loss, because the service cannot be reached.
	cut := s.must(c.Acquire(ctx, "orders/3"))
	d.Network().Refuse()
	<-cut.Context().Done()
	synctest.Wait()
	d.Network().Pass()
}

func (s *Service) must(l *fencelock.Lease, err error) *fencelock.Lease {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
	return l
}
