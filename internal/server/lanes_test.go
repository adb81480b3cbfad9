package server

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
)

// The server does not execute a command that has waited behind others while the client moved to another connection:
// later commands of the client may be ahead of it.
func TestCommandsOfAnEarlierConnectionAreObsolete(t *testing.T) {
	t.Parallel()
	r := alone(t, Config{}).leadership.Load()
	session := machine.SessionID{1}
	before, after := &conn{}, &conn{}
	x := &call{
		conn: before, leadership: r, session: session,
		request: acquireOf(session[:], "x", backend.NewRequestID(), false),
	}
	for _, c := range []struct {
		on       *conn
		obsolete bool
	}{{before, false}, {nil, false}, {after, true}} {
		if c.on == nil {
			r.Forget(session)
		} else {
			r.Attach(session, session, c.on)
		}
		if err := x.attachedElsewhere(); (err != nil) != c.obsolete {
			t.Errorf("attached to %p, sent on %p: %v", c.on, before, err)
		}
	}
	x.request = holderOf("x")
	if err := x.attachedElsewhere(); err != nil {
		t.Errorf("a request that changes nothing: %v", err)
	}
}

// One client floods the server and waits for no answer. Meanwhile another client takes and releases a lock.
func TestFloodingClientDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{DataDir: t.TempDir()})
	const cycles = 20
	ctx, stop := context.WithCancel(context.Background())
	var flooding sync.WaitGroup
	for range 2 {
		stream := s.Attach(ctx)
		id := sessionID()
		flooding.Go(func() {
			number := uint64(0)
			send := func(q *lockpb.Request) bool {
				number++
				q.Number, q.Session = number, id
				return stream.Send(&lockpb.ClientMessage{Requests: []*lockpb.Request{q}}) == nil
			}
			send(&lockpb.Request{
				Call: &lockpb.Request_OpenSession{OpenSession: &lockpb.OpenSession{TtlNanos: int64(longTTL)}},
			})
			request := backend.NewRequestID()
			for send(acquireOf(nil, "flooded", request, false)) {
			}
		})
		flooding.Go(func() { // it reads, or it would be cut off
			for {
				if m, err := stream.Recv(); err != nil || m.Replies[len(m.Replies)-1].GetGoodbye() != nil {
					return
				}
			}
		})
	}
	defer flooding.Wait()
	defer stop()
	x := attach(t, s)
	session := x.open(longTTL)
	began := time.Now()
	for range cycles {
		id, token := x.hold(session, "x")
		if r := x.call(releaseOf(session, "x", id, token)); r.GetDone() == nil {
			t.Fatalf("release: %v", r)
		}
	}
	t.Logf("%d cycles beside the flood took %v", cycles, time.Since(began))
	if r := s.leadership.Load(); r == nil {
		t.Error("the server does not lead any more")
	}
}
