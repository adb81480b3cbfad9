package etcd

import (
	"context"
	"errors"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// The validity of holds. A hold is valid for the TTL from the instant before the last confirmed keepalive was sent,
// and this file confirms keepalives. Acquires and renewals call prove: it makes sure that the proof is young enough,
// and lets concurrent callers share one keepalive. prolong is one keepalive with its confirmation; its comment argues
// why that proves the lease. outgrow and alone handle a change of the raft term.
//
// Two faults shaped it, both found by the cluster fault leader-pause and each reproduced by a test: a leader that
// stood still while another was elected answers keepalives without effect (overlap of 55 ms,
// TestOvertakenLeaderProvesNothing), and when it goes on it has leases revoked that its successor prolonged (overlap
// of 14 ms, TestOvertakenLeaderEndsNoHold). A safety margin cannot replace either check: a frozen process does not
// know how long it was frozen.

// errOutgrown: the lease is older than the raft term, so that no keepalive can prove it. It is no loss: keys stand as
// long as the lease is kept alive, and holds and waiters move to the session that takes this one's place.
var errOutgrown = fmt.Errorf("%w: the etcd lease was granted by an earlier leader", backend.ErrUnavailable)

// provedAt returns the instant from which the validity of every hold of the session counts: just before the last
// confirmed keepalive, or the request for the lease, was sent.
func (s *session) provedAt() backend.Instant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proved
}

// prove makes sure that the lease was confirmed by a request that was sent at most age ago, and sends a keepalive if
// it was not. Callers that come while a keepalive is under way wait for it, and check again. It fails with
// errSessionLost, errOutgrown, ctx's error, or the error that kept the keepalive from being confirmed.
//
// The caller that sends does so under its own context, not in the background: only its deadline counts. If
// it stops, the others are woken, and one of them sends the next keepalive after a pause.
func (s *session) prove(ctx context.Context, age time.Duration) error {
	for {
		s.mu.Lock()
		if s.Ended() {
			s.mu.Unlock()
			return errSessionLost
		}
		// Before the look at outgrown: a proof of the old term is worth its full time, since the leader that gave it
		// ends the lease no earlier than a TTL after it, and every later leader gives the leases that it finds a full
		// TTL.
		if s.d.clock.Now().Sub(s.proved) <= age {
			s.mu.Unlock()
			return nil
		}
		if s.isOutgrown() {
			s.mu.Unlock()
			return errOutgrown
		}
		// The first one sends, and makes the channel by which the others wait for it.
		wait, mine := s.proving, false
		if wait == nil {
			wait, mine = make(chan struct{}), true
			s.proving = wait
		}
		s.mu.Unlock()
		if mine {
			if err := s.keepAliveOnce(ctx, wait); err != nil {
				return err
			}
			continue
		}
		select {
		case <-wait:
			s.mu.Lock()
			err := s.result
			s.mu.Unlock()
			if err != nil && ctx.Err() == nil && !errors.Is(err, errSessionLost) && !errors.Is(err, errOutgrown) {
				// The other caller's context may have ended, whatever the state of the lease; the pause avoids
				// hammering.
				if err := kit.Sleep(ctx, kit.RetryPause(s.ttl)); err != nil {
					return err
				}
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// keepAliveOnce sends one keepalive for all callers in prove, and waits for its proof. done is s.proving, which
// the caller has just made: it is closed here, after the result was stored, and by nobody else.
//
// It takes at most a sixth of the TTL, but at least 1 s and at most callTime: a keepalive that hangs must leave time
// for another.
func (s *session) keepAliveOnce(ctx context.Context, done chan struct{}) error {
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), min(max(s.ttl/6, time.Second), callTime))
	defer cancel()
	var sent backend.Instant
	// Twice, because the first keepalive after an election may be answered by a member that has not yet applied an
	// entry of the new term, while the read that follows waits until it has.
	err := errOvertaken
	for range 2 {
		sent = s.d.clock.Now()
		if err = s.prolong(ctx); !errors.Is(err, errOvertaken) {
			break
		}
	}
	if errors.Is(err, errOutgrown) {
		s.d.outgrow(s)
	}
	s.mu.Lock()
	s.result = err
	s.proving = nil
	close(done)
	// The instant before the keepalive was sent; proved never falls.
	if err == nil && sent > s.proved {
		s.proved = sent
	}
	s.mu.Unlock()
	if err != nil {
		s.d.trouble()
	} else {
		s.d.followMembers()
	}
	return err
}

// errOvertaken: the leader that answered a keepalive may have been overtaken by another one before that. The
// lease may live or not. One more try follows immediately: a member that has not yet applied an entry of the new
// term answers the first keepalive after an election like this, too.
var errOvertaken = fmt.Errorf("%w: a leader that may have been overtaken has answered", backend.ErrUnavailable)

// prolong restarts the lease's TTL and returns nil if that is proved. Otherwise it returns the reason:
// errSessionLost, after it has ended the session; errOutgrown; errOvertaken; the loss of the cluster's past; or that
// nobody answered.
//
// The answer to a keepalive alone is no proof. A leader gives it without asking anybody, even if it stood still
// while another one was elected and has not heard of that yet. By then the lease may have ended by the other's time,
// and a lease that the other has granted is not known here. So a linearizable read follows, and both answers must be of
// one term. A header bears the term of the last entry that its server had applied. The keepalive's is read before the
// lease is looked up, so it is not above the term of the leader that looked. The read's is read afterwards, so it is
// not below the term of the leader that confirmed the read with a majority. If they are equal, so are those two
// terms, and the leader that answered for the lease led when it did. The read's key is the token space, which shows
// at no extra cost whether this is still the store in which the hold was granted.
//
// Nor is it certain that a lease lives on when its term is over. A leader that stood still ends, when it goes on, the
// leases that ran out by its own clock meanwhile: etcd 3.7.3 asks it only whether it ticks, and it hands the
// revocations on to the leader of the time. It knows the leases of its term and of earlier terms. So a proof must be
// of the term in which the lease was granted: then it came from the only leader that could do this, and that one will
// not before a TTL has passed since. What stands on a lease of an earlier term moves to another lease, which that
// leader has never heard of. Where nobody else can have led, the lease goes on: see alone.
//
// Watching the holder's own key is no alternative: the watch notifies the holder after its rival may hold.
func (s *session) prolong(ctx context.Context) error {
	defer s.d.conns.expectAnswer()()
	answer, err := s.keepAlives.ask(ctx, s.id)
	if err != nil {
		return err
	}
	if err := s.d.hear(answer.Header, nil); err != nil {
		return err
	}
	read, err := s.d.get(ctx, s.d.spaceKey())
	if err != nil {
		return err
	}
	if err := s.d.checkSpace(read.Kvs); err != nil {
		return err
	}
	switch {
	case read.Header.GetRaftTerm() != answer.GetHeader().GetRaftTerm():
		return errOvertaken
	case answer.GetTTL() <= 0:
		s.end(backend.ReasonSessionExpired)
		return errSessionLost
	case read.Header.GetRaftTerm() == s.term.Load():
	case s.alone(ctx, answer.Header, read.Header):
		s.term.Store(read.Header.GetRaftTerm())
	default:
		return errOutgrown
	}
	return nil
}

// alone reports whether the member that granted the lease is the only voter, and gave these answers. Such
// a member elects itself when it restarts, and in no other case; the process before it has ended by then, since
// it keeps the data locked. So no leader of an earlier term is left that could end the lease, and the lease need not
// move. That matters because moving takes writes, and a server whose quota is used up refuses them
// (TestFullServerKeepsHolds).
//
// An error counts as no: the hold then moves, which is always right.
func (s *session) alone(ctx context.Context, answers ...*pb.ResponseHeader) bool {
	for _, header := range answers {
		if header.GetMemberId() != s.granter {
			return false
		}
	}
	resp, err := s.d.client.MemberList(ctx)
	if err != nil || s.d.hear(resp.Header, nil) != nil {
		return false
	}
	vote := voters(resp)
	return len(vote) == 1 && vote[0].ID == s.granter
}

// missing is called when etcd refused a write because it does not know the lease. It ends the session, unless the
// cluster has lost its past: then all sessions end, for that reason.
func (s *session) missing(ctx context.Context) error {
	if _, err := s.d.get(ctx, s.d.spaceKey()); errors.Is(err, backend.ErrHistoryLost) {
		return err
	}
	s.end(backend.ReasonSessionExpired)
	return errSessionLost
}

// isOutgrown reports whether another session has replaced s, or will with the next acquire.
func (s *session) isOutgrown() bool {
	select {
	case <-s.outgrown:
		return true
	default:
		return false
	}
}

// outgrow lets another session replace s: the next caller with this TTL makes it. s lives on, unproved, until all
// have moved and its loop finds it unused.
func (d *Driver) outgrow(s *session) {
	if d.sessions.Replace(s) {
		s.outgrow()
	}
}

// outgrow makes the holds and waiters of s move to its successor.
func (s *session) outgrow() { s.outgrowing.Do(func() { close(s.outgrown) }) }

// keep is the keepalive of the session's own loop. An outgrown lease is prolonged too, and the result does not count as
// a proof: the keys on it must stay until they have moved, and in a cluster that refuses writes they stay for as long
// as it does.
func (s *session) keep(ctx context.Context) error {
	if !s.isOutgrown() {
		return s.prove(ctx, s.ttl/3-s.ttl/20)
	}
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), callTime)
	defer cancel()
	return s.prolong(ctx)
}
