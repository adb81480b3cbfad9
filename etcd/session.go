package etcd

import (
	"context"
	"errors"
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
	d       *Driver
	id      clientv3.LeaseID
	ttl     time.Duration // as granted
	seconds int64         // as asked for: the key in Driver.sessions

	keepAlives *keepAlives

	granter uint64        // the member that granted the lease, or handed the request on
	term    atomic.Uint64 // the lease was granted in this raft term, or a later one; or nobody else has led since: see alone

	lost     chan struct{} // closed when etcd said that the lease is gone
	outgrown chan struct{} // closed when the lease can no longer be proved

	mu      sync.Mutex      // protects the following fields; taken after Driver.mu, never before
	proved  backend.Instant // just before the last confirmed request was sent
	proving chan struct{}   // not nil while a keepalive is in flight; closed when it ends
	result  error           // of the last keepalive
	users   int             // holds and waiters
	idle    backend.Instant // since when there are none
	ended   bool

	doubtful bool          // a request was not answered: see sweep
	doubted  chan struct{} // wakes the loop when that happens
}

// errSessionLost: the lease is gone, and with it every key on it.
var errSessionLost = errors.New("the etcd lease is gone")

// attemptTime bounds one request that is not bounded more tightly: long enough for an election, short enough to reach
// the next endpoint within a lease. What it cut off is asked again with the same key, which makes that harmless.
const attemptTime = 3 * time.Second

// sessionFor returns the session for ttl, or makes one, and counts one more user of it.
func (d *Driver) sessionFor(ctx context.Context, ttl time.Duration) (*session, error) {
	seconds := int64(ttl / time.Second)
	for {
		if err := d.history.err(); err != nil {
			return nil, err
		}
		d.mu.Lock()
		s := d.sessions[seconds]
		creator := s == nil
		if creator {
			s = &session{d: d, seconds: seconds, keepAlives: newKeepAlives(d), lost: make(chan struct{}), outgrown: make(chan struct{}),
				proving: make(chan struct{}), doubted: make(chan struct{}, 1)}
			d.sessions[seconds] = s
		}
		d.mu.Unlock()
		if creator {
			if err := d.enter(); err != nil {
				return nil, err
			}
			go s.create()
		}
		err := s.join(ctx)
		if err == nil {
			return s, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !errors.Is(err, errSessionLost) {
			return nil, err
		}
		// It has just ended: make a new one.
	}
}

// create asks for the lease, in the background: the end of one caller's context must not fail the others that wait in
// join. The lease's id is our own choice, so that one which was granted without our hearing of it can be revoked.
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
		s.d.forget(s)
	}
	s.mu.Lock()
	if err == nil && s.ended { // with the cluster's history
		err = errSessionLost
	}
	s.result = err
	if err == nil {
		s.id, s.ttl, s.proved, s.idle = id, time.Duration(resp.TTL)*time.Second, sent, sent
	} else if !s.ended {
		s.ended = true
		close(s.lost)
	}
	close(s.proving)
	s.proving = nil
	s.mu.Unlock()
	defer s.keepAlives.stop()
	if err == nil {
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
		if err == nil || !transient(err) || errors.Is(rpctypes.Error(err), rpctypes.ErrLeaseNotFound) {
			return
		}
		if kit.Sleep(d.ctx, kit.RetryPause(attemptTime)) != nil {
			return
		}
	}
}

// join adds a user, once the lease exists. If it does not come to exist, the error is etcd's; if it has ended since,
// errSessionLost.
func (s *session) join(ctx context.Context) error {
	s.mu.Lock()
	wait := s.proving
	making := s.id == 0 && !s.ended
	s.mu.Unlock()
	if making {
		select {
		case <-wait:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.ended:
		s.users++
		return nil
	case s.id == 0 && making:
		return s.result
	}
	return errSessionLost
}

// asked is the TTL that was asked for. The server may have granted more.
func (s *session) asked() time.Duration { return time.Duration(s.seconds) * time.Second }

// joinMore adds n users beside one that is there.
func (s *session) joinMore(n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return errSessionLost
	}
	s.users += n
	return nil
}

// leave takes a user away.
func (s *session) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users--; s.users == 0 {
		s.idle = s.d.clock.Now()
	}
}

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
		case <-s.lost:
			return
		case <-s.d.ctx.Done():
			return // Close revokes
		}
		if s.retire() {
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

// retire ends the session if nobody has used it for one TTL.
func (s *session) retire() bool {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.users > 0 || s.d.clock.Now().Sub(s.idle) < s.ttl {
		return false
	}
	s.ended = true
	close(s.lost)
	s.d.removeLocked(s)
	return true
}

// removeLocked takes a session out of the driver.
func (d *Driver) removeLocked(s *session) {
	delete(d.older, s)
	if d.sessions[s.seconds] == s {
		delete(d.sessions, s.seconds)
	}
}

// end declares the lease gone and tells every holder on it.
func (s *session) end(reason backend.Reason) {
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return
	}
	s.ended = true
	close(s.lost)
	s.mu.Unlock()
	for _, lost := range s.d.forget(s) {
		lost(reason)
	}
}

// forget takes a session and its holds out of the driver, and returns the functions that tell the holders.
func (d *Driver) forget(s *session) []func(backend.Reason) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.removeLocked(s)
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

// takeSessions empties the driver for Close.
func (d *Driver) takeSessions() []*session {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []*session
	for _, s := range d.sessions {
		all = append(all, s)
	}
	for s := range d.older {
		all = append(all, s)
	}
	clear(d.sessions)
	clear(d.older)
	for key, p := range d.places {
		p.hold = nil
		d.tidyLocked(key)
	}
	return all
}

// revoke ends the lease in etcd; every key on it goes with it.
func (s *session) revoke(ctx context.Context) error {
	if s.id == 0 {
		return nil
	}
	_, err := s.d.client.Revoke(ctx, s.id)
	if errors.Is(rpctypes.Error(err), rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return err
}
