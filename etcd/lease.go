package etcd

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// lease is an engine.Session: an etcd lease.
type lease struct {
	id      clientv3.LeaseID
	ttl     time.Duration
	granter uint64        // the member that granted it, or handed the request on
	term    atomic.Uint64 // of the grant, or a later one: see Prove

	placing sync.Mutex // protects the following field
	// placed are the create revisions of the keys of holds. etcd shows only the names of the keys on a lease, and after an
	// administrator has deleted a key, a later hold of this client may have a key of that name.
	placed map[string]int64

	mu     sync.Mutex // protects the following fields; held during a keepalive
	stream pb.Lease_LeaseKeepAliveClient
	cancel context.CancelFunc // of the stream
}

// TTL is engine.Session's.
func (l *lease) TTL() time.Duration { return l.ttl }

// leaseOf returns the lease of a session.
func leaseOf(s engine.Session) *lease {
	l, _ := s.(*lease)
	return l
}

// Open is engine.Sessions's. The id of the lease is ours and not the server's, so that a lease whose grant was not
// answered can be revoked.
//
// The term is noted before the request is sent: an election after the grant could raise the term in the answer, and
// the lease would then count as one of a later leader than its own. A term that is too low costs a move.
func (e *service) Open(ctx context.Context, ttl time.Duration) (engine.Session, error) {
	l := &lease{id: clientv3.LeaseID(1 + rand.Int64N(math.MaxInt64))}
	l.term.Store(e.history.greatestTerm())
	since := e.history.mark()
	ctx = clientv3.WithRequireLeader(ctx)
	resp, err := pb.NewLeaseClient(e.client.ActiveConnection()).LeaseGrant(ctx,
		&pb.LeaseGrantRequest{TTL: int64(ttl / time.Second), ID: int64(l.id)})
	if err != nil {
		e.trouble()
		if e.Classify(err) != engine.Unknown {
			return nil, err
		}
		return l, clientv3.ContextError(ctx, err)
	}
	l.granter, l.ttl = resp.Header.GetMemberId(), time.Duration(resp.TTL)*time.Second
	return l, e.hear(ctx, resp.Header, since)
}

// End is engine.Sessions's.
func (e *service) End(ctx context.Context, s engine.Session) error {
	l := leaseOf(s)
	if l.mu.TryLock() { // no caller proves it any more, unless that is about to end
		l.close()
		l.mu.Unlock()
	}
	_, err := e.client.Revoke(ctx, l.id)
	if isOneOf(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return err
}

// errOvertaken: the leader that answered a keepalive may have been overtaken by another one before that. The
// first keepalive after an election is like that on a member that has not applied an entry of the new term yet.
var errOvertaken = fmt.Errorf("%w: a leader that may have been overtaken has answered", backend.ErrUnavailable)

// Prove is engine.Sessions's: a keepalive, and a linearizable read that confirms it.
//
// The answer to a keepalive alone is no proof. A leader sends it without asking other members, even if it was paused
// while another one was elected and does not know that yet. By then the lease may have ended by the other's time. So a
// linearizable read follows, and both answers must be of one term. A header has the term of the last entry that its
// server had applied. The keepalive's is read before the lease is looked up, so it is not above the term of the leader
// that looked. The read's is read afterwards, so it is not below the term of the leader that confirmed the read with a
// majority. If they are equal, so are those two, and the leader that answered for the lease led when it did. The key
// that is read is the token space: it shows for the same price whether this is still the store in which the hold was
// granted.
//
// Nor is it certain that a lease lives on when its term is over. A leader that was paused ends, when it resumes, the
// leases that ran out by its own clock meanwhile: etcd 3.7.3 asks it only whether it ticks. It knows the leases of its
// term and of those before. So a proof must be of the term in which the lease was granted: then it came from the only
// leader that could do this, and that one will not before a TTL has passed since. What stands on a lease of an earlier
// term moves to another lease, which that leader has never heard of. If no other member can have led, the lease
// continues: see alone.
func (e *service) Prove(ctx context.Context, s engine.Session) error {
	if e.members.due() {
		go func() { _ = e.askMembers(e.life) }()
	}
	err := errOvertaken
	for range 2 {
		if err = e.prove(ctx, leaseOf(s)); !errors.Is(err, errOvertaken) {
			break
		}
	}
	if err != nil {
		e.trouble()
	}
	return err
}

func (e *service) prove(ctx context.Context, l *lease) error {
	alive, err := l.keepAlive(ctx, e)
	if err != nil {
		return err
	}
	if err := e.hear(ctx, alive.Header, nil); err != nil {
		return err
	}
	read, err := e.get(clientv3.WithRequireLeader(ctx), e.spaceKey())
	if err != nil {
		return err
	}
	if err := e.checkSpace(ctx, read.Kvs); err != nil {
		return err
	}
	switch term := read.Header.GetRaftTerm(); {
	case term != alive.Header.GetRaftTerm():
		return errOvertaken
	case alive.TTL <= 0:
		return engine.ErrNoSession
	case term == l.term.Load():
	case e.alone(ctx, l.granter, alive.Header, read.Header):
		l.term.Store(term)
	default:
		return engine.ErrOutgrown
	}
	return nil
}

// alone reports whether a member is the only voter, and has given these answers. Such a member elects itself
// when it is started again, and in no other case; the process before it has ended by then. So no leader of an earlier
// term is left that could end the lease. That matters because moving takes writes, which a full server refuses.
func (e *service) alone(ctx context.Context, member uint64, answers ...*pb.ResponseHeader) bool {
	for _, header := range answers {
		if header.GetMemberId() != member {
			return false
		}
	}
	resp, err := e.client.MemberList(ctx)
	if err != nil || e.hear(ctx, resp.Header, nil) != nil {
		return false
	}
	vote := voters(resp.Members)
	return len(vote) == 1 && vote[0].ID == member
}

// keepAlive sends one keepalive and receives the answer to it. The library's loop is not used: it chooses the time of
// sending, and counts from the receipt. One stream serves the lease, since with a password a stream costs the
// server a slow hash. A keepalive that is not answered in time takes the stream with it, so that no late answer is
// taken for that to a later one. A stream with a token that the server has forgotten is replaced once. A keepalive that
// is sent beside another one has a separate stream, to another server.
func (l *lease) keepAlive(ctx context.Context, e *service) (*pb.LeaseKeepAliveResponse, error) {
	defer e.conns.expectAnswer()()
	if !l.mu.TryLock() {
		l = &lease{id: l.id}
		l.mu.Lock()
		defer l.close()
	}
	defer l.mu.Unlock()
	answer, err := l.exchange(ctx, e)
	if isOneOf(err, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision) {
		answer, err = l.exchange(ctx, e)
	}
	return answer, err
}

// exchange is one keepalive. The caller holds l.mu.
func (l *lease) exchange(ctx context.Context, e *service) (answer *pb.LeaseKeepAliveResponse, err error) {
	cancel := l.cancel
	if l.stream == nil {
		var own context.Context
		own, cancel = context.WithCancel(clientv3.WithRequireLeader(e.life))
		defer context.AfterFunc(ctx, cancel)()
		stream, err := pb.NewLeaseClient(e.client.ActiveConnection()).LeaseKeepAlive(own)
		if err != nil {
			cancel()
			return nil, clientv3.ContextError(ctx, err)
		}
		l.stream, l.cancel = stream, cancel
	}
	inTime := context.AfterFunc(ctx, cancel)
	if err = l.stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(l.id)}); err == nil {
		answer, err = l.stream.Recv()
	} else if _, why := l.stream.Recv(); why != nil {
		err = why // Send only reports that the stream has ended
	}
	if !inTime() || err != nil || answer.TTL <= 0 {
		l.close()
	}
	return answer, clientv3.ContextError(ctx, err)
}

// close ends the stream. The caller holds l.mu.
func (l *lease) close() {
	if l.stream != nil {
		l.cancel()
		l.stream = nil
	}
}

// keys returns the keys on a lease. The leader that answers may have been
// overtaken, so that a missing key may be there.
func (e *service) keys(ctx context.Context, l *lease) (map[string]bool, error) {
	resp, err := e.client.TimeToLive(clientv3.WithRequireLeader(ctx), l.id, clientv3.WithAttachedKeys())
	if err != nil {
		return nil, err
	}
	if err := e.hear(ctx, resp.ResponseHeader, nil); err != nil {
		return nil, err
	}
	if resp.TTL < 0 { // the next proof decides
		return nil, fmt.Errorf("%w: the server does not know the lease", backend.ErrUnavailable)
	}
	keys := make(map[string]bool, len(resp.Keys))
	for _, key := range resp.Keys {
		at := strings.Index(string(key), e.locksDir()) // behind the client's namespace
		keys[string(key)[max(at, 0):]] = true
	}
	return keys, nil
}

// place notes the create revision of the key of a hold on l.
func (l *lease) place(key string, revision int64) {
	l.placing.Lock()
	defer l.placing.Unlock()
	if l.placed == nil {
		l.placed = map[string]int64{}
	}
	l.placed[key] = revision
}

// has reports whether the hold of a key was created at a revision.
func (l *lease) has(key string, revision int64) bool {
	l.placing.Lock()
	defer l.placing.Unlock()
	return l.placed[key] == revision
}

// forget drops a key that is gone. l is nil if the engine does not know the lease of a request.
func (l *lease) forget(key string, revision int64) {
	if l == nil {
		return
	}
	l.placing.Lock()
	defer l.placing.Unlock()
	if l.placed[key] == revision {
		delete(l.placed, key)
	}
}
