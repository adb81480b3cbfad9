// Package locktest tests applications that use locks: a lock service in this process, contenders that share one
// clock, and faults on demand.
//
//	func TestStopsWithoutItsLock(t *testing.T) {
//		synctest.Test(t, func(t *testing.T) { // time is simulated: a TTL of 30 s passes at once
//			service := locktest.New(t, nil)
//			mine := service.Contender() // a fencelock.Locker, for the code under test
//			done := make(chan error, 1)
//			go func() { done <- nightly(t.Context(), mine) }()
//			synctest.Wait() // until it works under its lock
//
//			theirs := service.Steal("nightly") // as if it had slept past its TTL
//			defer theirs.Release(t.Context())
//			if err := <-done; !errors.Is(err, fencelock.ErrLost) {
//				t.Errorf("nightly = %v, want it to stop", err)
//			}
//		})
//	}
//
// The leases come from package fencelock, and the service from package backend/memory: FIFO queues, fencing tokens,
// TTLs, and lost answers. So tests see the same errors as programs in production. A test can cause these faults:
//
//   - Expire, Evict, Steal: the lease of a name ends, by its TTL, by a deletion, or because another contender has the
//     name.
//   - Contender.Cut, Refuse, Delay and Heal: the network of one contender.
//   - Service.Store: Pause, Stop, Restart and Wipe of the service.
//
// The package works in real time too; then a test has to wait for its TTLs. All contenders, and the service, use
// backend.GoClock, which package testing/synctest simulates. A Service and its contenders are safe for concurrent
// use.
package locktest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// Service is a lock service in memory.
type Service struct {
	tb      testing.TB
	store   *memory.Store
	options fencelock.Options

	mu    sync.Mutex // protects the following field
	thief *Contender // takes the locks for Steal
}

// New returns a service without holds. Contenders use o; nil means the defaults. The contenders and the service are
// closed when tb ends, or, under testing/synctest, the bubble's test.
func New(tb testing.TB, o *fencelock.Options) *Service {
	s := &Service{tb: tb, store: memory.NewStore(&memory.Options{Clock: backend.GoClock()})}
	if o != nil {
		s.options = *o
	}
	return s
}

// Store returns the server itself, to stop, pause, restart or wipe it.
func (s *Service) Store() *memory.Store { return s.store }

// Contender is a client of the service, in the correctness tier, with its own network. It is a fencelock.Locker.
type Contender struct {
	*fencelock.Client
	network *memory.Network
}

// Contender returns a new client, which stands for a separate process. It fails the test if the options of the
// service are invalid.
func (s *Service) Contender() *Contender {
	s.tb.Helper()
	d, o := s.store.Driver(), s.options
	c, err := fencelock.ForCorrectness(d, &o)
	if err != nil {
		s.tb.Fatalf("locktest: %v", err)
	}
	s.tb.Cleanup(func() {
		d.Network().Pass()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			s.tb.Errorf("locktest: %v", err)
		}
	})
	return &Contender{Client: c, network: d.Network()}
}

// Cut drops all messages in both directions, as a partition does. Calls wait until their contexts end; a lease is
// lost at its deadline.
func (c *Contender) Cut() { c.network.Drop(memory.Both) }

// Refuse breaks the connection and refuses others, as a crashed server does. Calls return fencelock.ErrUnavailable.
func (c *Contender) Refuse() { c.network.Refuse() }

// Delay makes each message take d, in either direction.
func (c *Contender) Delay(d time.Duration) { c.network.Delay(memory.Both, d) }

// Heal ends Cut, Refuse and Delay.
func (c *Contender) Heal() { c.network.Pass() }

// Expire ends the hold of name, as if its TTL had passed without a renewal: its lease is lost with
// fencelock.ReasonExpired, and the first waiter gets the name. It reports whether the name was held. Here and below
// names are as for Acquire, without Options.Namespace.
func (s *Service) Expire(name string) bool { return s.store.Expire(s.full(name)) }

// Evict deletes the hold of name, as a server that runs out of memory or a careless operator does: its lease is lost
// with fencelock.ReasonEvicted, and the first waiter gets the name. It reports whether the name was held.
func (s *Service) Evict(name string) bool { return s.store.Evict(s.full(name)) }

func (s *Service) full(name string) string {
	if s.options.Namespace == "" {
		return name
	}
	return s.options.Namespace + ":" + name
}

// Steal takes name for the test, with a greater token, from its holder: that lease is lost as by Expire. The test may
// release the returned lease; otherwise it is released when the test ends. Steal fails the test if a client waits for
// the name, since that client comes first.
func (s *Service) Steal(name string) *fencelock.Lease {
	s.tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.thief == nil {
		s.thief = s.Contender()
	}
	s.Expire(name)
	lease, err := s.thief.TryAcquire(context.Background(), name)
	if err != nil {
		s.tb.Fatalf("locktest: steal %q: %v", name, err)
	}
	return lease
}
