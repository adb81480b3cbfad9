package builtin_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// counting is a stream that counts keepalives, and the sessions that they renew.
type counting struct {
	builtin.Stream
	requests, sessions *atomic.Int64
}

func (c counting) Send(m *lockpb.ClientMessage) error {
	for _, r := range m.Requests {
		if k := r.GetKeepAlive(); k != nil {
			c.requests.Add(1)
			c.sessions.Add(max(1, int64(len(k.Sessions))))
		}
	}
	return c.Stream.Send(m)
}

// A client that holds locks with several TTLs, and so has several sessions, renews them together: one keepalive
// includes the sessions that are due soon.
func TestOneKeepaliveForAllTTLs(t *testing.T) {
	t.Parallel()
	const ttl, sessions = 12 * time.Second, 8
	n := startNode(t)
	var requests, renewed atomic.Int64
	d := builtin.Attach(func(ctx context.Context) builtin.Stream {
		return counting{n.attach(ctx), &requests, &renewed}
	}, nil)
	t.Cleanup(func() { _ = d.Close(context.Background()) })
	names := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	for i, name := range names[:sessions] {
		take(t, d, request(name, ttl+time.Duration(i)*time.Millisecond))
	}
	eventually(t, "each session was renewed twice", func() bool { return renewed.Load() >= 2*sessions })
	if sent := requests.Load(); 2*sent > renewed.Load() {
		t.Errorf("%d keepalives renewed %d sessions", sent, renewed.Load())
	}
	for _, name := range names {
		if s, err := d.Look(t.Context(), name); err != nil || len(s.Holders) != 1 {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
	}
}
