package builtin_test

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// forgetful is a stream that drops pushes about sessions while drops is positive.
type forgetful struct {
	builtin.Stream
	drops *atomic.Int32 // the number of pushes still to drop
}

func (f forgetful) Recv() (*lockpb.ServerMessage, error) {
	m, err := f.Stream.Recv()
	if err == nil {
		m.Replies = slices.DeleteFunc(m.Replies, func(r *lockpb.Reply) bool {
			return (r.GetGranted() != nil || r.GetLost() != nil) && f.drops.Add(-1) >= 0
		})
	}
	return m, err
}

// A server that loses one push blocks no name: the driver notices within a third of the TTL. Without the count in the
// answers to keepalives, the waiter would never return, and the holder would rely on a hold that it has lost.
func TestLostPushIsNoticed(t *testing.T) {
	t.Parallel()
	const ttl = 10 * time.Second
	n := startNode(t)
	var drops, connections atomic.Int32
	d := builtin.Attach(func(ctx context.Context) builtin.Stream {
		connections.Add(1)
		return forgetful{n.attach(ctx), &drops}
	}, nil)
	t.Cleanup(func() { _ = d.Close(context.Background()) })
	rival := attached(t, n)

	t.Run("granted", func(t *testing.T) {
		first := take(t, rival, request("x", ttl))
		r := request("x", ttl)
		r.Wait = true
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		done := make(chan error, 1)
		var g backend.Grant
		go func() {
			var err error
			g, err = d.Acquire(ctx, r)
			done <- err
		}()
		eventually(t, "it waits", func() bool {
			state, err := rival.Look(t.Context(), "x")
			return err == nil && state.Waiters == 1
		})
		drops.Store(1)
		if err := rival.Release(t.Context(), first); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil || g.Token <= first.Token || !g.Queued {
			t.Errorf("the waiter has %+v, %v", g, err)
		}
	})
	t.Run("lost", func(t *testing.T) {
		told := make(chan backend.Reason, 1)
		r := request("y", ttl)
		r.Lost = func(loss backend.Loss) { told <- loss.Reason }
		take(t, d, r)
		drops.Store(1)
		if err := rival.ForceRelease(t.Context(), backend.ForceRequest{Name: "y", Reason: "a test"}); err != nil {
			t.Fatal(err)
		}
		select {
		case <-told:
		case <-time.After(patience):
			t.Error("the holder was not notified")
		}
	})
	if n := connections.Load(); n < 3 {
		t.Errorf("%d connections, want another one for each push that got lost", n)
	}
}
