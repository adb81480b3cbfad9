package etcd_test

import (
	"context"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
)

// A leader that stood still while another one was elected answers keepalives until it hears of that, for etcd asks nobody
// else about them: it prolongs a lease that the new leader ends in its own time. A holder that can reach no other node must
// not believe it.
func TestOvertakenLeaderProvesNothing(t *testing.T) {
	const ttl = 10 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	c := containers.EtcdCluster(t)
	for round := 1; ; round++ {
		if overtaken(ctx, t, c, ttl) {
			return
		}
		if round == 5 {
			t.Fatal("no leader that was overtaken answered a keepalive: nothing was tried")
		}
	}
}

// overtaken is one round. It reports whether the old leader answered a keepalive when another one had been elected.
func overtaken(ctx context.Context, t *testing.T, c *containers.EtcdNodes, ttl time.Duration) (answered bool) {
	t.Helper()
	addrs, links := c.NewLinks(t)
	d := openDriver(t, addrs...)
	defer func() {
		links.Pass()
		_ = d.Close(context.WithoutCancel(ctx))
	}()
	g, err := d.Acquire(ctx, backend.Request{Name: "x", Owner: "test", RequestID: backend.NewRequestID(), Fresh: true, TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	leader, term, err := c.Leader(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	control := newClient(t, c.Endpoints()[leader])
	lease, err := control.Grant(ctx, 60)
	if err != nil {
		t.Fatal(err)
	}

	for i, link := range links {
		if i != leader {
			link.Refuse()
		}
	}
	if err := onceConnected(ctx, d, links[leader]); err != nil {
		t.Fatal(err)
	}
	defer c.Heal()
	c.Isolate(leader)
	if err := c.Node(leader).Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Leader(ctx, term); err != nil {
		t.Fatal(err)
	}
	elected := backend.SystemClock().Now()
	renew := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		defer cancel()
		if r := d.Renew(ctx, []backend.Grant{g})[0]; r.Err == nil && r.SentAt > elected {
			t.Errorf("a renewal sent %v after another leader's election was confirmed by one that had not heard of it", r.SentAt.Sub(elected))
		}
	}
	for backend.SystemClock().Now().Sub(elected) < ttl/5 { // the last proof before is too old then
		renew()
	}
	if err := c.Node(leader).Resume(ctx); err != nil {
		t.Fatal(err)
	}
	for !t.Failed() {
		renew()
		attempt, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		_, err := control.KeepAliveOnce(attempt, lease.ID)
		cancel()
		answered = answered || err == nil
		if s, err := c.Status(ctx, leader); err == nil && s.Leader == 0 {
			break // it leads no longer, and says so
		}
		if ctx.Err() != nil {
			t.Fatal("the old leader goes on leading")
		}
	}
	return answered
}
