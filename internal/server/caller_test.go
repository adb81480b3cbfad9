package server

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// callerTTL is longer than any test looks for a leader: a caller's session never ends.
const callerTTL = 2 * patience

// caller is a client that finds each new leader, as a driver does.
type caller struct {
	*client
	t        testing.TB
	connect  func() *client // to the leader; nil without a leader
	session  []byte
	sequence uint64
}

func newCaller(t testing.TB, connect func() *client) *caller {
	x := &caller{t: t, connect: connect}
	x.reconnect()
	return x
}

// reconnect finds a leader. The session goes on there.
func (x *caller) reconnect() {
	x.t.Helper()
	if x.client != nil {
		x.close()
	}
	eventually(x.t, "a leader has the session", func() bool {
		if x.client = x.connect(); x.client == nil {
			return false
		}
		if x.session == nil {
			return x.openAt()
		}
		r, err := x.within(impatience, attachOf(x.session, "", 0))
		if err == nil && codeOf(r) == lockpb.Code_CODE_SESSION_ENDED {
			x.t.Fatal("the session is gone")
		}
		return err == nil && r.GetSession() != nil && r.Renewed
	})
}

func (x *caller) openAt() bool {
	id := sessionID()
	r, err := x.within(impatience, openOf(id, callerTTL))
	if err == nil && r.GetSession() != nil {
		x.session = id
	}
	return x.session != nil
}

// must sends a request until it is known what became of it.
func (x *caller) must(q *lockpb.Request) *lockpb.Reply {
	x.t.Helper()
	x.sequence++
	q.Session, q.Sequence, q.Acknowledged = x.session, x.sequence, x.sequence-1
	for end := time.Now().Add(patience); time.Now().Before(end); {
		r, err := x.try(q)
		if err == nil {
			switch codeOf(r) {
			case lockpb.Code_CODE_NOT_LEADER, lockpb.Code_CODE_UNAVAILABLE, lockpb.Code_CODE_UNKNOWN:
			default:
				return r
			}
		}
		x.reconnect()
	}
	x.t.Fatalf("no answer to %v", q)
	return nil
}

// lock waits for a lock.
func (x *caller) lock(name string) *lockpb.Grant {
	x.t.Helper()
	id := backend.NewRequestID()
	for {
		r := x.must(acquireOf(nil, name, id, true))
		if g := r.GetAcquired().GetGrants(); len(g) == 1 {
			return g[0]
		}
		if !r.GetAcquired().GetQueued() {
			x.t.Fatalf("lock %q: %v", name, r)
		}
		if g := x.granted(id); g != nil {
			return g
		}
		x.reconnect()
	}
}

// granted waits for the grant to a request; nil if the stream ends before.
func (x *caller) granted(id string) *lockpb.Grant {
	x.t.Helper()
	for {
		select {
		case r, ok := <-x.pushes:
			if !ok {
				return nil
			}
			if g := r.GetGranted().GetGrants(); len(g) == 1 && g[0].RequestId == id {
				return g[0]
			}
		case <-time.After(callerTTL):
			x.t.Fatal("no grant")
		}
	}
}

func (x *caller) unlock(g *lockpb.Grant) {
	x.t.Helper()
	if r := x.must(releaseOf(nil, g.Name, g.RequestId, g.Token)); r.GetDone() == nil {
		x.t.Fatalf("unlock: %v", r)
	}
}
