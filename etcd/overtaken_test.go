package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/testtier"
)

// A leader that was frozen while another one was elected answers keepalives until it is notified of the election,
// since etcd answers them without a quorum: it prolongs a lease that the new leader may end. A holder that can reach
// no other node must not rely on such an answer.
func TestOvertakenLeaderProvesNothing(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
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

// overtaken is one round. It reports whether the old leader answered a keepalive after the election of another one.
func overtaken(ctx context.Context, t *testing.T, c *containers.EtcdNodes, ttl time.Duration) (answered bool) {
	t.Helper()
	addrs, links := c.NewLinks(t)
	d := openDriver(t, addrs...)
	defer func() {
		links.Pass()
		_ = d.Close(context.WithoutCancel(ctx))
	}()
	g, err := d.Acquire(ctx,
		backend.Request{Name: "x", Owner: "test", RequestID: backend.NewRequestID(), Fresh: true, TTL: ttl})
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
			t.Errorf("a renewal sent %v after another leader's election was confirmed by one that had not heard of it",
				r.SentAt.Sub(elected))
		}
	}
	for backend.SystemClock().Now().Sub(elected) < ttl/5 { // then the last proof before the election is too old
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
			break // it no longer leads, and reports that
		}
		if ctx.Err() != nil {
			t.Fatal("the old leader goes on leading")
		}
	}
	return answered
}

// When such a leader continues, it also revokes leases that expired by its clock while it was frozen: it checks only
// its clock, and forwards the revocations to the current leader. A lease that the new leader has prolonged may
// therefore end at any moment. So a hold must be on a lease that the old leader never knew.
func TestOvertakenLeaderEndsNoHold(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	const ttl = 5 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	c := containers.EtcdCluster(t)
	for round := 1; !revoked(ctx, t, c, ttl); round++ {
		if round == 20 {
			t.Fatal("no leader that was overtaken ended a lease while all holds were renewed: nothing was tried")
		}
	}
}

// revoked is one round. It reports whether the old leader ended leases that were kept alive through others, and all
// holds were renewed meanwhile.
func revoked(ctx context.Context, t *testing.T, c *containers.EtcdNodes, ttl time.Duration) bool {
	t.Helper()
	const clients = 8 // it ends only some of the leases
	leader, term, err := c.Leader(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	others := slices.Delete(slices.Clone(c.Endpoints()), leader, leader+1)
	plain := newClient(t, others...)
	var leases []clientv3.LeaseID
	var locks []*fencelock.Client
	var holds []*fencelock.Lease
	for i := range clients {
		lease, err := plain.Grant(ctx, int64(ttl/time.Second))
		if err != nil {
			t.Fatal(err)
		}
		client, err := fencelock.ForCorrectness(openDriver(t, others...), &fencelock.Options{TTL: ttl})
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close(context.WithoutCancel(ctx))
		hold, err := client.Acquire(ctx, fmt.Sprint("x/", i))
		if err != nil {
			t.Fatal(err)
		}
		leases, locks, holds = append(leases, lease.ID), append(locks, client), append(holds, hold)
	}
	if err := c.Node(leader).Pause(ctx); err != nil {
		t.Fatal(err)
	}
	frozen := time.Now()
	defer c.Node(leader).Resume(context.WithoutCancel(ctx))
	if _, _, err := c.Leader(ctx, term); err != nil {
		t.Fatal(err)
	}
	for time.Since(frozen) < ttl+ttl/5 { // until all leases have expired by the old leader's clock
		for _, lease := range leases {
			attempt, cancel := context.WithTimeout(ctx, ttl/10)
			_, _ = plain.KeepAliveOnce(attempt, lease)
			cancel()
		}
	}
	for _, lease := range leases {
		if left, err := plain.TimeToLive(ctx, lease); err != nil || left.TTL < int64(ttl/time.Second)/2 {
			t.Logf("a round is lost: a lease was not kept alive: %d s, %v", left.TTL, err)
			return false
		}
	}
	if err := c.Node(leader).Resume(ctx); err != nil {
		t.Fatal(err)
	}
	gone := map[clientv3.LeaseID]bool{}
	for resumed := time.Now(); time.Since(resumed) < ttl/3; {
		for i, hold := range holds {
			if left, err := plain.TimeToLive(ctx, leases[i]); err == nil && left.TTL < 0 {
				gone[leases[i]] = true
			}
			holder, err := locks[i].Look(ctx, hold.Name())
			if err == nil && hold.Err() == nil &&
				(len(holder.Holders) != 1 || holder.Holders[0].Token != hold.Token()) {
				t.Fatalf("the hold with token %v is believed in, and etcd knows of %v", hold.Token(), holder.Holders)
			}
		}
	}
	t.Logf("%d of %d leases that were kept alive were ended", len(gone), clients)
	renewed := true
	for _, hold := range holds {
		err := hold.Release(ctx)
		if lost := (*fencelock.LostError)(nil); errors.As(err, &lost) && lost.Reason == fencelock.ReasonExpired {
			t.Logf("a round is lost: the machine did not renew in time: %v", err)
			renewed = false
		} else if err != nil {
			t.Errorf("release: %v", err)
		}
	}
	return renewed && len(gone) > 0
}
