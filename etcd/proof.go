package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// errOutgrown: the lease is older than the raft term.
var errOutgrown = fmt.Errorf("%w: the etcd lease was granted by an earlier leader", backend.ErrUnavailable)

// provedAt returns the instant on which the validity of every hold of the session rests.
func (s *session) provedAt() backend.Instant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proved
}

// prove makes sure that the lease was confirmed by a request sent not more than age ago. Concurrent callers share one
// request.
func (s *session) prove(ctx context.Context, age time.Duration) error {
	for {
		s.mu.Lock()
		if s.Ended() {
			s.mu.Unlock()
			return errSessionLost
		}
		if s.d.clock.Now().Sub(s.proved) <= age {
			s.mu.Unlock()
			return nil
		}
		if s.isOutgrown() {
			s.mu.Unlock()
			return errOutgrown
		}
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

// keepAliveOnce sends one keepalive and waits for its proof.
func (s *session) keepAliveOnce(ctx context.Context, done chan struct{}) error {
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), min(max(s.ttl/6, time.Second), attemptTime))
	defer cancel()
	var sent backend.Instant
	err := errOvertaken
	for range 2 { // the first keepalive after an election may come before anything was written in the new term
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
	if err == nil && sent > s.proved {
		s.proved = sent
	}
	s.mu.Unlock()
	if err != nil {
		s.d.trouble()
	}
	return err
}

// errOvertaken: whoever answered a keepalive may have been overtaken by another leader before that.
var errOvertaken = fmt.Errorf("%w: a leader that may have been overtaken has answered", backend.ErrUnavailable)

// prolong starts the lease's time anew, or finds it gone.
//
// The answer to a keepalive alone proves nothing: a leader gives it without asking anybody, also when it stood still
// while another one was elected and has not heard of that yet. The lease ends by the other's time then, or one that was
// granted since is not known here. So a linearizable read follows, and both answers must be of one term. A header bears
// the term of the last entry that its server had applied: the keepalive's before the lease was looked up, thus not
// above the term of the leader who did that, and the read's afterwards, thus not below the term of the leader who
// confirmed it with a majority. If they are equal so are those two, and the one who answered for the lease led when it
// did.
//
// Nor does the lease live on for sure if its term is over. A leader that stood still ends, when it goes on, the leases
// that ran out by its own clock meanwhile: etcd asks it only whether it ticks, and it hands the revocations on to the
// leader of the time. It knows the leases of its term and before. So a proof must be of the term in which the lease was
// granted: then it came from the only leader that could do this, who will not before a TTL has passed since. What
// stands on a lease of an earlier term moves to another, which that leader has never heard of. Where nobody else can have
// led, the lease goes on: see alone.
func (s *session) prolong(ctx context.Context) error {
	defer s.d.conns.expectAnswer()()
	since := s.d.history.mark()
	answer, err := s.keepAlives.ask(ctx, s.id)
	if err != nil {
		return err
	}
	if err := s.d.hear(answer.Header, nil); err != nil {
		return err
	}
	read, err := s.d.client.Get(ctx, s.d.spaceKey())
	if err != nil {
		return err
	}
	if err := s.d.hear(read.Header, since); err != nil {
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

// alone reports whether the member that granted the lease is the only one that votes, and has given these answers. It
// elects itself when it is started again, and in no other case; the process before it has ended by then, since it keeps
// the data locked. So there is no leader of an earlier term that could end the lease, which then need not move: moving
// takes writes, and a server whose quota is used up refuses them.
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
	voters := slices.DeleteFunc(resp.Members, func(m *pb.Member) bool { return m.IsLearner })
	return len(voters) == 1 && voters[0].ID == s.granter
}

// missing ends a session whose lease etcd does not know. It asks for the past first, which may be what is missing.
func (s *session) missing(ctx context.Context) error {
	if _, err := s.d.get(ctx, s.d.spaceKey()); errors.Is(err, backend.ErrHistoryLost) {
		return err
	}
	s.end(backend.ReasonSessionExpired)
	return errSessionLost
}

func (s *session) isOutgrown() bool {
	select {
	case <-s.outgrown:
		return true
	default:
		return false
	}
}

// outgrow lets another session take the place of s, which lives on until all have moved.
func (d *Driver) outgrow(s *session) {
	if d.sessions.Replace(s) {
		close(s.outgrown)
	}
}

// keep prolongs the lease: an outgrown one so that its keys stay until they have moved.
func (s *session) keep(ctx context.Context) error {
	if !s.isOutgrown() {
		return s.prove(ctx, s.ttl/3-s.ttl/20)
	}
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), attemptTime)
	defer cancel()
	return s.prolong(ctx)
}
