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
	"github.com/fencelock/fencelock/internal/notify"
)

// A session is an etcd lease with its keepalive loop. It is made for the first user of a TTL (sessionFor, create),
// kept alive (keepAlive; proof.go has the meaning of a keepalive), ended when nobody has used it for a TTL, and
// declared lost when etcd no longer knows it (end). Package kit counts its users and knows the current session of a
// TTL.
//
// All locks with one TTL share one lease, so that a renewal costs the same for one lock and for ten thousand: about
// four round trips in a renewal interval, with 1,000 holds (bench hold1k). A lease for each lock would cost a grant,
// a keepalive and a revocation each, all of them log entries of the cluster but the keepalives. The price: a key that
// a late request writes does not end with its caller, see sweep.go.

// session is one etcd lease with a keepalive loop of our own. All holds and waiters with one TTL share it, until the
// cluster has another raft term than the one in which the lease was granted. Then the session is outgrown (see
// prolong), and they move to its successor.
//
// It does not use the client library's own loop (KeepAlive, concurrency.Session): that counts the lease from the
// receipt of an answer and looks once a second, so it reports the end after a rival has got the lock;
// TestLossIsToldBeforeTheRivalHolds logs by how much. Its KeepAliveOnce repeats without a pause while the server is
// away.
type session struct {
	kit.Session
	d *Driver
	// Drawn by sessionFor, before the lease is asked for: see create.
	id clientv3.LeaseID
	// The requested TTL, which is the key in Driver.sessions, and the granted one, which is more for TTLs below one
	// and a half election timeouts.
	asked, ttl time.Duration

	// The stream that the keepalives go out on. create stops it when the loop has ended.
	keepAlives *keepAlives

	// The origin of the lease. A keepalive proves the lease in this term only, for the reasons given at prolong. term
	// rises where nobody but the granter can have led since.
	granter uint64        // the member that granted the lease, or handed the request on
	term    atomic.Uint64 // of the grant, or a later one

	// Closed by Driver.outgrow, at most once, when the lease can no longer be proved. Waiters select on it: they then
	// move to another session.
	outgrown   chan struct{}
	outgrowing sync.Once // closes it
	// Tells the loop that a request on this lease went unanswered, so that a key may appear on it that nobody knows:
	// see sweep. It has room for one signal and is never closed.
	doubted notify.Signal

	mu sync.Mutex // protects the following fields
	// Just before the last confirmed request was sent: the validity of every hold counts from it.
	proved backend.Instant
	// Not nil while a keepalive is in flight. keepAliveOnce closes it when that has ended, with its result below.
	proving chan struct{}
	result  error
}

// errSessionLost: the lease is gone, and with it every key on it. As an answer about a hold it is a loss; as the answer
// to a request that was to write on the lease it says that it had no effect, and another session may succeed.
var errSessionLost = fmt.Errorf("%w: the etcd lease is gone", backend.ErrUnavailable)

// callTime bounds a request without a tighter bound: long enough for an election, whose timeout is 1 s by default,
// and short enough to reach the next endpoint within a lease. A repetition uses the same key, which makes it
// harmless.
const callTime = 3 * time.Second

// sessionFor returns the session for ttl, in whole seconds, and adds a user to it; the caller removes it with Leave.
// A missing session is created, once for all callers that come meanwhile. Each waits for as long as its own ctx
// allows.
//
// No session is made after the cluster's past was lost, or after Close.
func (d *Driver) sessionFor(ctx context.Context, ttl time.Duration) (*session, error) {
	ttl = ttl.Truncate(time.Second)
	return d.sessions.Join(ctx, ttl, func() *session {
		return &session{
			Session: d.sessions.New(), d: d, id: clientv3.LeaseID(1 + rand.Int64N(math.MaxInt64)), asked: ttl,
			keepAlives: newKeepAlives(d), outgrown: make(chan struct{}), doubted: notify.New(),
		}
	}, func(s *session) {
		// Under no mutex, once for each session. If this fails, everybody who waits for the session gets the error;
		// it has no lease to revoke then.
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

// create asks for the lease, opens the session for its waiting callers, and goes on as its keepalive loop. It runs in
// the background because the end of one caller's context must not fail the others. It was counted in at the gate by
// sessionFor, and leaves when the loop has ended.
//
// The id of the lease is ours and not the server's, so that a lease whose grant was not answered can be revoked: a TTL
// may be 30 days, and every repetition would leave another one. The library's Grant has no parameter for it, so
// create builds the request itself. The validity counts from sent, which is read before the request leaves.
//
// The term is noted before the request is sent and not read from the answer, whose header bears the term that the
// member had applied when it answered: an election after the grant could have raised it, and the lease would be
// attributed to a later leader than its granter. A term that is too low only costs a move.
func (s *session) create() {
	defer s.d.gate.Leave()
	defer s.keepAlives.stop()
	sent := s.d.clock.Now()
	s.term.Store(s.d.history.greatestTerm())
	since := s.d.history.mark()
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(s.d.ctx), callTime)
	resp, err := pb.NewLeaseClient(s.d.client.ActiveConnection()).LeaseGrant(ctx,
		&pb.LeaseGrantRequest{TTL: int64(s.asked / time.Second), ID: int64(s.id)})
	cancel()
	granted := err == nil
	if granted {
		s.granter, s.ttl, s.proved = resp.Header.GetMemberId(), time.Duration(resp.TTL)*time.Second, sent
		err = s.d.hear(resp.Header, since)
	}
	err = clientv3.ContextError(ctx, err)
	if s.d.sessions.Opened(s, err) {
		s.keepAlive()
		return
	}
	s.d.trouble()
	if granted || !unsent(err) && !refused(err) {
		s.discard()
	}
}

// discard revokes a lease that may have been granted, and on which no key stands, until etcd says that it is gone or
// the driver closes. Close waits for the call under way only: such a lease is harmless, and expires.
func (s *session) discard() {
	for {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.d.ctx), callTime)
		err := s.revoke(ctx)
		cancel()
		if err == nil || !transient(err) || kit.Sleep(s.d.ctx, kit.RetryPause(callTime)) != nil {
			return
		}
	}
}

// keepAlive is the loop of an open session. It sends a keepalive a third of the TTL after the last confirmed one, and
// sooner after a failure; after each it sweeps, if a request is in doubt. It ends when the
// session has ended, when the driver closes (which revokes the lease), or when nobody has used the session for one TTL:
// then it revokes the lease itself, so that an idle client leaves the cluster alone.
//
// A keepalive that fails does not end the session, not even for longer than the TTL: only etcd's own answer does.
// Otherwise waiters would lose their places unnecessarily: a cluster without a leader prolongs its leases, and
// holders do not depend on it, since the core ends a hold at its deadline, whatever the session does.
func (s *session) keepAlive() {
	timer := time.NewTimer(s.ttl / 3)
	defer timer.Stop()
	// The pause until the next look for late keys; 0 until a request goes unanswered.
	var look time.Duration
	for {
		select {
		case <-timer.C:
		// A new doubt restarts the sweeps at their shortest interval. Many doubts do not postpone a sweep: the first
		// doubt after one sets the timer.
		case <-s.doubted:
			if look != firstSweep {
				look = firstSweep
				timer.Reset(look)
			}
			continue
		case <-s.Over():
			return
		case <-s.d.ctx.Done():
			return // Close revokes
		}
		// Nobody joins between the look at the users and the end: kit does both under its mutex. The revocation may
		// fail: without keepalives the lease expires.
		if s.d.sessions.Retire(s, s.ttl) {
			ctx, cancel := context.WithTimeout(s.d.ctx, callTime)
			_ = s.revoke(ctx)
			cancel()
			return
		}
		// Between keepalives, when only a sweep is due, it sends no keepalive: the proof is young enough.
		err := s.keep(s.d.ctx)
		next := s.ttl / 3
		switch {
		case err == nil:
			next = max(next-s.d.clock.Now().Sub(s.provedAt()), s.ttl/20)
		// The keys have to stand until they have moved.
		case errors.Is(err, errOutgrown):
		// prolong has ended the session.
		case errors.Is(err, errSessionLost):
			return
		default:
			// Even beyond the TTL: a cluster that had no leader for long prolongs its leases, and waiters keep their
			// places.
			timer.Reset(kit.RetryPause(s.ttl))
			continue
		}
		if look > 0 {
			s.sweep()
			look = min(2*look, s.ttl)
			next = min(next, look)
		}
		timer.Reset(next)
	}
}

// end declares the lease gone and notifies the holder of every hold on it, once, in the goroutine that found out. The
// core's functions do not block. They are called without any mutex, since a holder may call back into the driver.
func (s *session) end(reason backend.Reason) {
	if !s.d.sessions.End(s) {
		return
	}
	for _, lost := range s.d.forget(s) {
		lost(backend.Loss{Reason: reason})
	}
}

// forget removes the holds of an ended session from the driver, and returns the functions that notify the holders. It
// walks over all places; the alternative, a list of holds for each session, would cost every acquire and release.
// Places that were kept only because of a possible late write on this lease become free: the late write finds no
// lease.
func (d *Driver) forget(s *session) []func(backend.Loss) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var tell []func(backend.Loss)
	for key, p := range d.places {
		if p.hold != nil && p.hold.session == s {
			if p.hold.lost != nil {
				tell = append(tell, p.hold.lost)
			}
			p.hold = nil
		}
		delete(p.doubts, s) // a late write finds no lease
		d.tidyLocked(key)
	}
	return tell
}

// revoke ends the lease in etcd; its keys go with it. A lease that is gone already, or was never granted, is
// no error.
func (s *session) revoke(ctx context.Context) error {
	_, err := s.d.client.Revoke(ctx, s.id)
	if isOneOf(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return err
}
