package server

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// named is a proposal that can be told from others.
func named(by *conn, name string) proposal {
	return proposal{command: machine.Command{Op: machine.OpRelease, Name: name}, by: by, done: func(outcome, error) {}}
}

func namesOf(batch []proposal) (all []string) {
	for _, x := range batch {
		all = append(all, x.command.Name)
	}
	return all
}

func TestConnectionsTakeTurns(t *testing.T) {
	t.Parallel()
	a, b := &conn{}, &conn{}
	var l lanes
	for _, x := range []proposal{
		named(a, "a1"), named(a, "a2"), named(a, "a3"), named(b, "b1"), named(nil, "n1"), named(b, "b2"),
	} {
		if !l.add(x) {
			t.Fatal("refused")
		}
	}
	gone := named(b, "b3")
	gone.obsolete = func() error { return replica.ErrNotLeader }
	l.add(gone)
	batch, obsolete := l.take()
	if got := namesOf(batch); !slices.Equal(got, []string{"a1", "b1", "n1", "a2", "b2", "a3"}) {
		t.Errorf("the entry has %v", got)
	}
	if len(obsolete) != 1 || obsolete[0].command.Name != "b3" || !errors.Is(obsolete[0].why, replica.ErrNotLeader) {
		t.Errorf("obsolete: %v", obsolete)
	}
	if l.queued != 0 || len(l.all) != 0 || l.last != nil {
		t.Errorf("left over: %+v", l)
	}
}

// Who comes after a flood of others waits for one command of each of them, and finds room.
func TestFloodLeavesRoom(t *testing.T) {
	t.Parallel()
	var l lanes
	flooders := []*conn{{}, {}, {}}
	refused := 0
	for range maxQueued {
		for _, by := range flooders {
			if !l.add(named(by, "flood")) {
				refused++
			}
		}
	}
	if want := (len(flooders) - 1) * maxQueued; refused != want {
		t.Errorf("%d were refused; want %d", refused, want)
	}
	if !l.add(named(&conn{}, "late")) {
		t.Fatal("refused")
	}
	batch, _ := l.take()
	if at := slices.Index(namesOf(batch), "late"); at < 0 || at > len(flooders) {
		t.Errorf("it is number %d of %d", at, len(batch))
	}
}

// A command that has waited behind others while the client went on on another connection is not carried out: what the
// client sent there may be ahead of it.
func TestCommandsOfAnEarlierConnectionAreObsolete(t *testing.T) {
	t.Parallel()
	r := &leadership{attached: map[machine.SessionID]*conn{}, proposer: newProposer(nil, time.Now)}
	session := machine.SessionID{1}
	before, after := &conn{}, &conn{}
	x := &call{conn: before, leadership: r, session: session, request: acquireOf(session[:], "x", backend.NewRequestID(), false)}
	for _, c := range []struct {
		on       *conn
		obsolete bool
	}{{before, false}, {nil, false}, {after, true}} {
		if c.on == nil {
			r.forget(session)
		} else {
			r.attach(session, c.on)
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

// One client sends as fast as it can and waits for nothing. Another one takes and gives back a lock meanwhile.
func TestFloodingClientStopsNobody(t *testing.T) {
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
			send(&lockpb.Request{Call: &lockpb.Request_OpenSession{OpenSession: &lockpb.OpenSession{TtlNanos: int64(longTTL)}}})
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
