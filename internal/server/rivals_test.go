package server

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/generation"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// recovered makes a new cluster from the disk of a stopped member, and returns the configuration of its server.
func (c *cluster) recovered(i int, o replica.RestoreOptions) (Config, replica.Restored, error) {
	c.t.Helper()
	o.ClosedFor, o.JoinKey = -1, joinKey
	r, err := replica.Recover(c.configs[i].DataDir, o)
	config := c.configs[i]
	config.Join, config.BootstrapExpect = nil, 0
	return config, r, err
}

// refuses waits until a server stops for a rival at an address.
func refuses(t *testing.T, what string, s *Server, at string) {
	t.Helper()
	eventually(t, what+" stops", func() bool { return s.Err() != nil })
	var rival *replica.RivalError
	if !errors.As(s.Err(), &rival) || rival.Address != at {
		t.Errorf("%s stops with %v; want a rival at %s", what, s.Err(), at)
	}
}

func soon(c *Config) { c.rivalsEvery = 200 * time.Millisecond }

// Two people recover a disk each. Neither cluster serves beside the other, in whichever order they are started, until
// one of them supersedes the other.
func TestTwoRecoveriesRefuseToServe(t *testing.T) {
	t.Parallel()
	rounds(t, 2, 2, twoRecoveries)
}

func twoRecoveries(t *testing.T, round int) {
	one, two := round, 1-round
	// Each server looks for rivals when the other asks. A server that looked by itself, while the other already
	// listens but has not asked yet, would stop before the other asks.
	c := newCluster(t, 3, nil)
	x := newCaller(t, c.connect)
	x.unlock(x.lock("x"))
	for i := range c.servers {
		c.stop(i)
	}
	first, a, errA := c.recovered(one, replica.RestoreOptions{})
	second, b, errB := c.recovered(two, replica.RestoreOptions{})
	if err := errors.Join(errA, errB); err != nil || a.Generation.Number != 1 || b.Generation.Number != 1 ||
		a.Generation.ID == b.Generation.ID {
		t.Fatalf("generations %v and %v, %v", a.Generation, b.Generation, err)
	}
	s := alone(t, first)
	late := start(t, second)
	refuses(t, "the serving cluster", s, second.PeerListen)
	refuses(t, "the later cluster", late, first.PeerListen)
	if late.Leads() {
		t.Error("the second one serves")
	}

	closeNow(t, s)
	closeNow(t, late)
	s = alone(t, first) // the other does not answer
	c.configs[two] = second
	removeLost(t, second.DataDir)
	_, _, err := c.recovered(two, replica.RestoreOptions{})
	var rival *replica.RivalError
	if !errors.As(err, &rival) || rival.Address != first.PeerListen {
		t.Fatalf("recovered beside a serving cluster: %v", err)
	}
	second, b, err = c.recovered(two, replica.RestoreOptions{Supersede: true})
	if err != nil || b.Generation.Number != 2 {
		t.Fatalf("superseded: %v, %v; want generation 2", b.Generation, err)
	}
	late = alone(t, second)
	refuses(t, "the superseded cluster", s, second.PeerListen)
	if g := generation.Of(late.welcome().History); g != b.Generation {
		t.Errorf("it serves as generation %v, want %v", g, b.Generation)
	}
}

// A recovery of the disk of a stopped member supersedes the running members, if Supersede is set.
func TestRecoverySupersedesMembersThatRun(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, soon)
	x := newCaller(t, c.connect)
	x.unlock(x.lock("x"))
	victim := (c.leader() + 1) % 3
	eventually(t, "it knows the others", func() bool { return c.servers[victim].replica.Voters() == 3 })
	c.stop(victim)
	var rival *replica.RivalError
	if _, _, err := c.recovered(victim, replica.RestoreOptions{}); !errors.As(err, &rival) {
		t.Fatalf("recovered beside the others: %v", err)
	}
	config, r, err := c.recovered(victim, replica.RestoreOptions{Supersede: true})
	if err != nil || r.Generation.Number != 1 {
		t.Fatal(r.Generation, err)
	}
	alone(t, config)
	for i, s := range c.servers {
		if i != victim {
			refuses(t, "a member of before", s, config.PeerListen)
			_ = s.Close(t.Context())
			c.servers[i] = nil
		}
	}
}

func closeNow(t *testing.T, s *Server) {
	t.Helper()
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func removeLost(t *testing.T, dir string) {
	t.Helper()
	if err := os.RemoveAll(dir + ".lost"); err != nil {
		t.Fatal(err)
	}
}
