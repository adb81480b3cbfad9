package containers_test

import (
	"context"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/conformance/containers"
)

// fencelockWays are the ways to run the bundled server.
var fencelockWays = map[string]func() containers.Option{
	"container": containers.AsContainer,
	"process":   containers.AsProcess,
}

// grantTTL outlasts every test.
const grantTTL = time.Hour

// grant acquires a lock with a session that outlives the test, like the session of a dead client.
func grant(t *testing.T, name string, addrs ...string) backend.Grant {
	t.Helper()
	d := builtin.New(addrs, nil)
	t.Cleanup(func() { d.Close(context.Background()) }) // the servers may be gone by then
	g, err := d.Acquire(waiting(t),
		backend.Request{Name: name, RequestID: backend.NewRequestID(), Owner: "test", TTL: grantTTL})
	check(t, err)
	return g
}

// mustHold checks with its own client that g still holds name.
func mustHold(t *testing.T, g backend.Grant, name string, addrs ...string) {
	t.Helper()
	d := builtin.New(addrs, nil)
	defer d.Close(context.Background())
	info, err := d.Look(waiting(t), name)
	if err != nil || len(info.Holders) != 1 || info.Holders[0].Token != g.Token {
		t.Fatalf("%s is held by %+v, %v; want token %d", name, info.Holders, err, g.Token)
	}
}

func TestFencelockKeepsData(t *testing.T) {
	t.Parallel()
	for name, way := range fencelockWays {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, other := containers.Fencelock(t, way()), containers.Fencelock(t, way())
			addr, _ := s.NewLink(t)
			g := grant(t, "x", addr)
			check(t, s.Restart(waiting(t)))
			mustHold(t, g, "x", s.Addr())
			mustHold(t, g, "x", addr)
			d := builtin.New([]string{other.Addr()}, nil)
			defer d.Close(context.Background())
			free, err := d.Look(waiting(t), "x")
			if err != nil || free.Held {
				t.Errorf("another server has the lock too: %+v, %v", free, err)
			}
		})
	}
}

func TestFencelockClusterSurvivesOne(t *testing.T) {
	t.Parallel()
	for name, way := range fencelockWays {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := containers.FencelockCluster(t, way())
			leader, term, err := c.Leader(waiting(t), 0)
			check(t, err)
			addrs, links := c.NewLinks(t)
			g := grant(t, "x", addrs...)

			check(t, c.Node(leader).Stop(waiting(t)))
			second, term, err := c.Leader(waiting(t), term)
			check(t, err)
			if second == leader {
				t.Fatalf("node %d leads although it was killed", leader)
			}
			mustHold(t, g, "x", addrs...)
			check(t, c.Node(leader).Start(waiting(t)))

			check(t, c.Node(second).Pause(waiting(t)))
			third, _, err := c.Leader(waiting(t), term)
			check(t, err)
			if third == second {
				t.Fatalf("node %d leads although it is frozen", second)
			}
			check(t, c.Node(second).Resume(waiting(t)))

			check(t, c.Restart(waiting(t)))
			mustHold(t, g, "x", addrs...)
			links.Refuse()
			d := builtin.New(addrs, nil)
			defer d.Close(context.Background())
			ctx, cancel := context.WithTimeout(t.Context(), silence)
			defer cancel()
			if info, err := d.Look(ctx, "x"); err == nil {
				t.Errorf("an answer passed links that refuse: %+v", info)
			}
		})
	}
}
