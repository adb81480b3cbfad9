package etcd_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testtier"
)

// A stalled server accepts connections and requests but does not answer. gRPC notices after 13 s; until then every
// third request and every watch through this server would hang.
func TestSilentServerIsLeft(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	c := containers.EtcdCluster(t)
	for what, which := range map[string]int{"follower": 1, "leader": 0} {
		t.Run(what, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			leader, _, err := c.Leader(ctx, 0)
			if err != nil {
				t.Fatal(err)
			}
			silent := (leader + which) % containers.Nodes
			a, b := openDriver(t, c.Endpoints()...), openDriver(t, c.Endpoints()...)
			request := func(wait bool) backend.Request {
				return backend.Request{
					Name: what, Owner: "test", RequestID: backend.NewRequestID(), Fresh: true,
					TTL: 30 * time.Second, Wait: wait,
				}
			}
			handOver := func(d, next backend.FencingDriver) {
				t.Helper()
				g, err := d.Acquire(ctx, request(true))
				if err != nil {
					t.Fatal(err)
				}
				waiting := make(chan error, 1)
				go func() {
					g, err := next.Acquire(ctx, request(true))
					if err == nil {
						err = release(ctx, next, g)
					}
					waiting <- err
				}()
				if err := release(ctx, d, g); err != nil {
					t.Error(err)
				}
				if err := <-waiting; err != nil {
					t.Error(err)
				}
			}
			for range containers.Nodes { // connections to all servers are in use
				handOver(a, b)
			}
			if err := c.Node(silent).Pause(ctx); err != nil {
				t.Fatal(err)
			}
			end := stallmeter.Late(t)
			for range 2 * containers.Nodes {
				handOver(a, b)
				handOver(b, a)
			}
			// gRPC would notice later.
			took := end(10*time.Second, "hand-overs beside a silent "+what)
			t.Logf("%d hand-overs beside a silent %s took %v", 4*containers.Nodes, what, took)
			if err := c.Node(silent).Resume(ctx); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// release retries the release until it succeeds: a connection that fails may lose a request.
func release(ctx context.Context, d backend.FencingDriver, g backend.Grant) error {
	for {
		err := d.Release(ctx, g)
		if err == nil || ctx.Err() != nil {
			return err
		}
		if errors.Is(err, backend.ErrNotHeld) {
			return nil // an earlier release arrived
		}
	}
}
