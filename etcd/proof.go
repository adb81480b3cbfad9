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

// What makes a holder believe. A hold is valid for the TTL from the instant before the last keepalive was sent that was
// confirmed, and this file says what a confirmation is. prove is what acquires and renewals call: it makes sure that
// the proof is young enough, and lets all who ask at once share one keepalive. prolong is one keepalive with its
// confirmation, and holds the argument why it proves anything. outgrow and alone are what follows when the raft term
// has changed.
//
// Two faults shaped it, both found by the cluster fault leader-pause and reproduced each by a test of its own: a leader
// that stood still while another was elected answers keepalives that mean nothing (overlap of 55 ms,
// TestOvertakenLeaderProvesNothing), and when it goes on it has leases revoked that were prolonged by its successor
// (overlap of 14 ms, TestOvertakenLeaderEndsNoHold). A safety margin was rejected as the answer to either: a process
// that was frozen does not know for how long.

// errOutgrown: the lease is older than the raft term, so that no keepalive can prove it. It is no loss: keys stand as
// long as the lease is kept alive, and holds and waiters move to the session that takes this one's place.
var errOutgrown = fmt.Errorf("%w: the etcd lease was granted by an earlier leader", backend.ErrUnavailable)

// provedAt returns the instant on which the validity of every hold of the session rests: just before the last confirmed
// keepalive, or the request for the lease, was sent.
func (s *session) provedAt() backend.Instant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proved
}

// prove makes sure that the lease was confirmed by a request that was sent not more than age ago, and sends a keepalive
// if it was not. Callers that come while one is under way wait for that one, and look again. It fails with
// errSessionLost, errOutgrown, ctx's error, or what kept the keepalive from being confirmed.
//
// The caller that sends does so under its own context, not in the background: its deadline is the one that counts. If
// it gives up, the others are woken, and one of them sends the next one after a pause.
func (s *session) prove(ctx context.Context, age time.Duration) error {
	for {
		s.mu.Lock()
		if s.Ended() {
			s.mu.Unlock()
			return errSessionLost
		}
		// Before the look at outgrown: a proof of the old term is worth its full time, since the leader that gave it
		// ends the lease no earlier than a TTL after it, and every later one gives a lease that it finds a full TTL.
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
				// The other's context may have ended, which says nothing about the lease; but do not hammer either.
				if err := kit.Sleep(ctx, kit.RetryPause(s.ttl)); err != nil {
					return err
				}
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// keepAliveOnce sends one keepalive for everybody who waits in prove, and waits for its proof. done is s.proving, which
// the caller has just made: it is closed here, after the result was stored, and by nobody else.
//
// The time for it is a sixth of the TTL, at least 1 s and at most callTime: one that hangs must leave time for another.
func (s *session) keepAliveOnce(ctx context.Context, done chan struct{}) error {
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), min(max(s.ttl/6, time.Second), callTime))
	defer cancel()
	var sent backend.Instant
	// Twice, because the first keepalive after an election may be answered by a member that has not yet applied
	// anything of the new term, while the read that follows waits until it has.
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
	}
	return err
}

// errOvertaken: the leader that answered a keepalive may have been overtaken by another one before that. It says
// nothing about the lease. One more try follows at once, since it is also what the first keepalive after an election
// looks like on a member that has not yet applied an entry of the new term.
var errOvertaken = fmt.Errorf("%w: a leader that may have been overtaken has answered", backend.ErrUnavailable)

// prolong starts the lease's time anew and returns nil if that is proved, or says why it is not: errSessionLost, after
// it has ended the session; errOutgrown; errOvertaken; the loss of the cluster's past; or that nobody answered.
//
// The answer to a keepalive alone proves nothing. A leader gives it without asking anybody, also when it stood still
// while another one was elected and has not heard of that yet. By then the lease may have ended by the other's time,
// and a lease that the other has granted is not known here. So a linearizable read follows, and both answers must be of
// one term. A header bears the term of the last entry that its server had applied. The keepalive's is read before the
// lease is looked up, so it is not above the term of the leader that looked. The read's is read afterwards, so it is
// not below the term of the leader that confirmed the read with a majority. If they are equal, so are those two, and
// the one that answered for the lease led when it did. The key that is read is the token space, which tells for the
// same price whether this is still the store in which the hold was granted.
//
// Nor is it certain that a lease lives on when its term is over. A leader that stood still ends, when it goes on, the
// leases that ran out by its own clock meanwhile: etcd 3.7.3 asks it only whether it ticks, and it hands the
// revocations on to the leader of the time. It knows the leases of its own term and of those before. So a proof must be
// of the term in which the lease was granted: then it came from the only leader that could do this, and that one will
// not before a TTL has passed since. What stands on a lease of an earlier term moves to another lease, which that
// leader has never heard of. Where nobody else can have led, the lease goes on: see alone.
//
// Watching the holder's own key was rejected: it tells the holder after its rival may hold.
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

// alone reports whether the member that granted the lease is the only one that votes, and has given these answers. Such
// a member elects itself when it is started again, and in no other case; the process before it has ended by then, since
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

// missing is called when etcd refused a write because it does not know the lease. It ends the session, unless what is
// missing is the cluster's past: then all sessions end, for that reason.
func (s *session) missing(ctx context.Context) error {
	if _, err := s.d.get(ctx, s.d.spaceKey()); errors.Is(err, backend.ErrHistoryLost) {
		return err
	}
	s.end(backend.ReasonSessionExpired)
	return errSessionLost
}

// isOutgrown reports whether another session has taken the place of s, or will with the next acquire.
func (s *session) isOutgrown() bool {
	select {
	case <-s.outgrown:
		return true
	default:
		return false
	}
}

// outgrow lets another session take the place of s: the next one who asks for this TTL makes it. s lives on, unproved,
// until all have moved and its loop finds it unused.
func (d *Driver) outgrow(s *session) {
	if d.sessions.Replace(s) {
		close(s.outgrown)
	}
}

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
