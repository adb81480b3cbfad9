package etcd

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// session is one etcd lease with a keepalive loop of our own. All holds and waiters with one TTL share it, until the
// cluster has another raft term than the one in which the lease was granted: then it is outgrown, see prolong, and they
// move to another.
//
// The client library's own loop (KeepAlive, concurrency.Session) will not do: it counts the lease from the receipt of
// an answer and looks once a second, so it tells of the end after a rival has got the lock. Its KeepAliveOnce repeats
// without a pause while the server is away.
type session struct {
	kit.Session
	d       *Driver
	id      clientv3.LeaseID
	ttl     time.Duration // as granted
	seconds int64         // as asked for: the key in Driver.sessions

	keepAlives *keepAlives

	granter uint64        // the member that granted the lease, or handed the request on
	term    atomic.Uint64 // the lease was granted in this raft term, or a later one; or nobody else has led since: see alone

	outgrown chan struct{} // closed when the lease can no longer be proved

	mu      sync.Mutex      // protects the following fields; taken after Driver.mu, never before
	proved  backend.Instant // just before the last confirmed request was sent
	proving chan struct{}   // not nil while a keepalive is in flight; closed when it ends
	result  error           // of the last keepalive

	doubtful bool          // a request was not answered: see sweep
	doubted  chan struct{} // wakes the loop when that happens
}

// errSessionLost: the lease is gone, and with it every key on it.
var errSessionLost = fmt.Errorf("%w: the etcd lease is gone", backend.ErrUnavailable)

// attemptTime bounds one request that is not bounded more tightly: long enough for an election, short enough to reach
// the next endpoint within a lease. What it cut off is asked again with the same key, which makes that harmless.
const attemptTime = 3 * time.Second

// sessionFor returns the session for ttl, or makes one, and counts one more user of it.
func (d *Driver) sessionFor(ctx context.Context, ttl time.Duration) (*session, error) {
	seconds := int64(ttl / time.Second)
	return d.sessions.Join(ctx, seconds, func() *session {
		return &session{
			Session: d.sessions.New(), d: d, seconds: seconds, keepAlives: newKeepAlives(d),
			outgrown: make(chan struct{}), doubted: make(chan struct{}, 1),
		}
	}, func(s *session) {
		err := d.history.err()
		if err == nil {
			err = d.enter()
		}
		if err != nil {
			s.keepAlives.stop()
			d.sessions.Opened(s, err)
			return
		}
		go s.create()
	})
}

// create asks for the lease, in the background: the end of one caller's context must not fail the others. The lease's id
// is our own choice, so that one which was granted without our hearing of it can be revoked.
func (s *session) create() {
	sent := s.d.clock.Now()
	s.term.Store(s.d.history.greatestTerm())
	since := s.d.history.mark()
	id := clientv3.LeaseID(1 + rand.Int64N(math.MaxInt64))
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(s.d.ctx), attemptTime)
	resp, err := pb.NewLeaseClient(s.d.client.ActiveConnection()).LeaseGrant(ctx, &pb.LeaseGrantRequest{TTL: s.seconds, ID: int64(id)})
	cancel()
	granted := err == nil
	if granted {
		s.granter = resp.Header.GetMemberId()
		err = s.d.hear(resp.Header, since)
	}
	if err != nil {
		err = clientv3.ContextError(ctx, err)
	} else {
		s.id, s.ttl, s.proved = id, time.Duration(resp.TTL)*time.Second, sent
	}
	defer s.keepAlives.stop()
	if s.d.sessions.Opened(s, err) {
		s.keepAlive()
		return
	}
	defer s.d.gate.Leave()
	s.d.trouble()
	if granted || !unsent(err) && !refused(err) {
		// Close does not wait for this: a lease without keys hurts nobody, and ends by itself.
		s.d.discard(id)
	}
}

// discard revokes a lease that may have been granted, until that is known or the driver is closed.
func (d *Driver) discard(id clientv3.LeaseID) {
	for {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(d.ctx), attemptTime)
		_, err := d.client.Revoke(ctx, id)
		cancel()
		if err == nil || !transient(err) || isOneOf(err, rpctypes.ErrLeaseNotFound) {
			return
		}
		if kit.Sleep(d.ctx, kit.RetryPause(attemptTime)) != nil {
			return
		}
	}
}

// asked is the TTL that was asked for. The server may have granted more.
func (s *session) asked() time.Duration { return time.Duration(s.seconds) * time.Second }

// keepAlive runs while the session lives. A session without users is given up after one TTL.
func (s *session) keepAlive() {
	defer s.d.gate.Leave()
	timer := time.NewTimer(s.ttl / 3)
	defer timer.Stop()
	look, wait := time.NewTimer(time.Hour), time.Hour
	look.Stop()
	defer look.Stop()
	for {
		select {
		case <-timer.C:
		case <-s.doubted:
			wait = firstSweep
			look.Reset(wait)
			continue
		case <-look.C:
			s.sweep()
			if wait *= 2; wait < s.ttl/3 {
				look.Reset(wait)
			}
			continue
		case <-s.Over():
			return
		case <-s.d.ctx.Done():
			return // Close revokes
		}
		if s.d.sessions.Retire(s, s.ttl) {
			ctx, cancel := context.WithTimeout(s.d.ctx, attemptTime)
			_ = s.revoke(ctx) // without users and keepalives it ends by itself
			cancel()
			return
		}
		err := s.keep(s.d.ctx)
		switch {
		case err == nil:
			s.sweep()
			timer.Reset(max(s.ttl/3-s.d.clock.Now().Sub(s.provedAt()), s.ttl/20))
		case errors.Is(err, errOutgrown):
			s.sweep()
			timer.Reset(s.ttl / 3)
		case errors.Is(err, errSessionLost):
			return
		default:
			// Also beyond the TTL: a cluster that had no leader for long prolongs its leases, and waiters keep their
			// places.
			timer.Reset(kit.RetryPause(s.ttl))
		}
	}
}

// end declares the lease gone and tells every holder on it.
func (s *session) end(reason backend.Reason) {
	if !s.d.sessions.End(s) {
		return
	}
	for _, lost := range s.d.forget(s) {
		lost(reason)
	}
}

// forget takes the holds of a session that has ended out of the driver, and returns the functions that tell the holders.
func (d *Driver) forget(s *session) []func(backend.Reason) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var tell []func(backend.Reason)
	for key, p := range d.places {
		if p.hold != nil && p.hold.session == s {
			if p.hold.lost != nil {
				tell = append(tell, p.hold.lost)
			}
			p.hold = nil
		}
		delete(p.doubts, s) // what comes late finds no lease
		d.tidyLocked(key)
	}
	return tell
}

// dropHolds is for Close, which tells nobody.
func (d *Driver) dropHolds() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for key, p := range d.places {
		p.hold = nil
		d.tidyLocked(key)
	}
}

// revoke ends the lease in etcd; every key on it goes with it.
func (s *session) revoke(ctx context.Context) error {
	if s.id == 0 {
		return nil
	}
	_, err := s.d.client.Revoke(ctx, s.id)
	if isOneOf(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return err
}
