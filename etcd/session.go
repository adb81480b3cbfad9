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
	"github.com/fencelock/fencelock/internal/bell"
)

// A session is an etcd lease with its keepalive loop, and everything that happens to it: it is made when somebody needs
// a lease of a TTL for which there is none (sessionFor, create), kept alive (keepAlive, and proof.go for what a
// keepalive proves), given up when nobody has used it for a TTL, and declared lost when etcd does not know it any more
// (end). Package kit counts its users and knows which session is the current one of a TTL.
//
// One lease for all locks with one TTL was chosen because it makes a renewal cost the same for one lock and for ten
// thousand: about four round trips in a renewal interval, with 1,000 holds (bench hold1k). A lease for each lock would
// cost a grant, a keepalive and a revocation each, all of them log entries of the cluster but the keepalives. The price
// is that a key which a late request writes does not end with its caller: see sweep.go.

// session is one etcd lease with a keepalive loop of our own. All holds and waiters with one TTL share it, until the
// cluster has another raft term than the one in which the lease was granted. Then the session is outgrown (see
// prolong), and they move to its successor.
//
// The client library's own loop (KeepAlive, concurrency.Session) was rejected: it counts the lease from the receipt of
// an answer and looks once a second, so it tells of the end after a rival has got the lock;
// TestLossIsToldBeforeTheRivalHolds logs by how much. Its KeepAliveOnce repeats without a pause while the server is
// away.
type session struct {
	kit.Session
	d *Driver
	// Drawn by sessionFor, before the lease is asked for: see create.
	id clientv3.LeaseID
	// As asked for, which is the key in Driver.sessions, and as granted, which is more for TTLs below one and a half
	// election timeouts.
	asked, ttl time.Duration

	// The stream that the keepalives go out on. create stops it when the loop has ended.
	keepAlives *keepAlives

	// Where the lease comes from. A keepalive proves the lease in this term only, for the reasons given at prolong.
	// term rises where nobody but the granter can have led since.
	granter uint64        // the member that granted the lease, or handed the request on
	term    atomic.Uint64 // of the grant, or a later one

	// Closed by Driver.outgrow, at most once, when the lease can no longer be proved. Waiters select on it: they move
	// to another session without being told by anybody else.
	outgrown chan struct{}
	// Tells the loop that a request on this lease went unanswered, so that a key may appear on it that nobody knows:
	// see sweep. It has room for one signal and is never closed.
	doubted bell.Bell

	mu sync.Mutex // protects the following fields
	// Just before the last confirmed request was sent: what the validity of every hold counts from.
	proved backend.Instant
	// Not nil while a keepalive is in flight. keepAliveOnce closes it when that has ended, with its result below.
	proving chan struct{}
	result  error
}

// errSessionLost: the lease is gone, and with it every key on it. As an answer about a hold it is a loss; as the answer
// to a request that was to write on the lease it says that nothing was done, and another session may do better.
var errSessionLost = fmt.Errorf("%w: the etcd lease is gone", backend.ErrUnavailable)

// callTime bounds one request that is not bounded more tightly: long enough for an election, whose timeout is 1 s by
// default, and short enough to reach the next endpoint within a lease. What it cut off is asked again with the same
// key, which makes that harmless.
const callTime = 3 * time.Second

// sessionFor returns the session for ttl, in whole seconds, and adds a user to it; the caller takes it away with Leave.
// If there is none it is created, once for all callers that come meanwhile. Each waits for as long as its own ctx
// allows.
//
// No session is made after the cluster's past was lost, or after Close.
func (d *Driver) sessionFor(ctx context.Context, ttl time.Duration) (*session, error) {
	ttl = ttl.Truncate(time.Second)
	return d.sessions.Join(ctx, ttl, func() *session {
		return &session{
			Session: d.sessions.New(), d: d, id: clientv3.LeaseID(1 + rand.Int64N(math.MaxInt64)), asked: ttl,
			keepAlives: newKeepAlives(d), outgrown: make(chan struct{}), doubted: bell.New(),
		}
	}, func(s *session) {
		// Under no mutex, once for each session. If this fails, everybody who waits for the session gets the error; it
		// then has no lease, and nothing to give back.
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

// create asks for the lease, lets in who waits for the session, and goes on as its keepalive loop. It runs in the
// background because the end of one caller's context must not fail the others. It was counted in at the gate by
// sessionFor, and leaves when the loop has ended.
//
// The id of the lease is ours and not the server's, so that a lease whose grant was not answered can be revoked: a TTL
// may be 30 days, and every repetition would leave another one. The library's Grant offers no such choice, hence the
// request by hand. The validity counts from sent, which is read before the request leaves.
//
// The term is noted before the request is sent and not read from the answer, whose header bears the term that the
// member had applied when it answered: an election after the grant could have raised it, and the lease would then be
// believed to be of a later leader than the one who granted it. A term that is too low only costs a move.
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
// the driver closes. Close waits for the call under way only: such a lease hurts nobody, and ends by itself.
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

// keepAlive is the loop of an open session. It sends a keepalive a third of the TTL after the last one that was
// confirmed, and sooner after one that failed; after each it sweeps, if there is anything in doubt. It ends when the
// session has ended, when the driver closes (which revokes the lease), or when nobody has used the session for one TTL:
// then it revokes the lease itself, so that an idle client leaves the cluster alone.
//
// A keepalive that fails does not end the session, not even for longer than the TTL: only etcd's own answer does.
// Waiters would lose their places for nothing, since a cluster without a leader prolongs its leases, and holders do not
// depend on it: the core stops believing in a hold at its deadline, whatever the session does.
func (s *session) keepAlive() {
	timer := time.NewTimer(s.ttl / 3)
	defer timer.Stop()
	// How long after the last look for late keys the next one follows; 0 until a request goes unanswered.
	var look time.Duration
	for {
		select {
		case <-timer.C:
		// A new doubt begins the looks anew, at their shortest distance. Many doubts put nothing off: the first one
		// after a look sets the timer.
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
		// fail: without keepalives the lease ends by itself.
		if s.d.sessions.Retire(s, s.ttl) {
			ctx, cancel := context.WithTimeout(s.d.ctx, callTime)
			_ = s.revoke(ctx)
			cancel()
			return
		}
		// Between keepalives, when only a look is due, it sends nothing: the proof is young enough.
		err := s.keep(s.d.ctx)
		next := s.ttl / 3
		switch {
		case err == nil:
			next = max(next-s.d.clock.Now().Sub(s.provedAt()), s.ttl/20)
		// Only to keep the keys standing until they have moved.
		case errors.Is(err, errOutgrown):
		// prolong has ended the session.
		case errors.Is(err, errSessionLost):
			return
		default:
			// Also beyond the TTL: a cluster that had no leader for long prolongs its leases, and waiters keep their
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

// end declares the lease gone and tells the holder of every hold on it, once, in the goroutine that found out. The
// functions of the core do not block. They are called without any mutex, since a holder may call back into the driver.
func (s *session) end(reason backend.Reason) {
	if !s.d.sessions.End(s) {
		return
	}
	for _, lost := range s.d.forget(s) {
		lost(reason)
	}
}

// forget takes the holds of a session that has ended out of the driver, and returns the functions that tell the
// holders. It walks over all places, which is the price of not keeping a list of holds for each session on the path of
// every acquire and release. Places that were kept only because a late write on this lease was possible become free:
// what comes late finds no lease.
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

// revoke ends the lease in etcd; every key on it goes with it. A lease that is gone already, or was never granted, is
// no error.
func (s *session) revoke(ctx context.Context) error {
	_, err := s.d.client.Revoke(ctx, s.id)
	if isOneOf(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return err
}
