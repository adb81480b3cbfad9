package etcd

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/testtier"
)

// Compaction costs waiters and watchers nothing: both follow future revisions only.
func TestCompactionUnderAWatchIsNotNoticed(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t).Addr())
	first := mustAcquire(t, d, request("x", false))
	waiter := acquireLater(t, d, request("x", true))
	changes := make(chan backend.Change, 8)
	started := make(chan struct{})
	go func() {
		defer close(changes)
		since, err := d.Look(t.Context(), "x")
		close(started)
		for change, watchErr := range d.Watch(t.Context(), "x", since.Revision) {
			if err != nil || watchErr != nil {
				t.Error(err, watchErr)
				return
			}
			if changes <- change; change.Type == backend.ChangeAcquired {
				return
			}
		}
	}()
	<-started
	other := mustAcquire(t, d, request("other", false))
	if _, err := d.service.client.Compact(t.Context(), int64(other.Token), clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	mustRelease(t, d, first)
	second := mustGet(t, waiter)
	var types []backend.ChangeType
	for change := range changes {
		types = append(types, change.Type)
	}
	if len(types) != 2 || types[0] != backend.ChangeReleased || second.Token <= first.Token {
		t.Errorf("the watch told %v; token %v after %v", types, second.Token, first.Token)
	}
}

// A server whose quota is exhausted accepts only writes that make room. Holds continue, and clients can release them.
// A new Acquire fails with ErrUnavailable, and succeeds once there is room. The same is true after a restart of the
// only member, as the holds need not move.
func TestFullServerKeepsHolds(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t, containers.Args("--quota-backend-bytes", "1048576"))
	d := newDriver(t, server.Addr())
	r := request("x", false)
	r.TTL = 20 * time.Second // longer than the server's restart
	r.Lost = func(loss backend.Loss) { t.Errorf("the hold was lost: %v", loss.Reason) }
	held := mustAcquire(t, d, r)
	other := request("other", false)
	other.TTL = r.TTL
	alsoHeld := mustAcquire(t, d, other)
	fill(t, d.service.client)
	before := leaseUnder(t, d, r)
	if err := server.Restart(t.Context()); err != nil { // which begins another term
		t.Fatal(err)
	}
	eventually(t, "the hold is renewed after the restart", func() bool {
		renewal := d.Renew(t.Context(), []backend.Grant{held})[0]
		if errors.Is(renewal.Err, backend.ErrNotHeld) {
			t.Fatalf("Renew = %v", renewal.Err)
		}
		held.SentAt = max(held.SentAt, renewal.SentAt)
		return renewal.Err == nil
	})
	if leaseUnder(t, d, r) != before {
		t.Error("the hold has moved")
	}
	if _, err := d.Acquire(t.Context(), request("y", false)); !errors.Is(err, backend.ErrUnavailable) ||
		errors.Is(err, backend.ErrUnknown) {
		t.Errorf("Acquire = %v, want ErrUnavailable", err)
	}
	for last := held.SentAt; last < held.SentAt.Add(held.TTL+held.TTL/4); { // longer than the hold lives without renewals
		renewal := d.Renew(t.Context(), []backend.Grant{held})[0]
		if renewal.Err != nil {
			t.Fatalf("Renew = %v", renewal.Err)
		}
		last = renewal.SentAt
		time.Sleep(held.TTL / 10) // the core does not renew continuously, either
	}
	mustRelease(t, d, alsoHeld)

	makeRoom(t, d.service.client)
	eventually(t, "there is room again", func() bool {
		disarm(t, d.service.client)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		g, err := d.Acquire(ctx, request("y", false))
		return err == nil && g.Token > held.Token
	})
}

// fill uses up the quota.
func fill(t *testing.T, c *clientv3.Client) {
	t.Helper()
	text := strings.Repeat("x", 100<<10)
	eventually(t, "the quota is used up", func() bool {
		_, err := c.Put(t.Context(), "filling/"+backend.NewRequestID(), text)
		return errors.Is(err, rpctypes.ErrNoSpace)
	})
}

// makeRoom undoes fill, except for the alarm.
func makeRoom(t *testing.T, c *clientv3.Client) {
	t.Helper()
	resp, err := c.Delete(t.Context(), "filling/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Compact(t.Context(), resp.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	for _, endpoint := range c.Endpoints() {
		if _, err := c.Defragment(t.Context(), endpoint); err != nil {
			t.Fatal(err)
		}
	}
}

// disarm disarms the NOSPACE alarm. A member raises it for each write that it applies without room, also for late
// ones and for those it applies again after a restart, and reports it later: disarming once is not enough.
func disarm(t *testing.T, c *clientv3.Client) {
	t.Helper()
	if _, err := c.AlarmDisarm(t.Context(), &clientv3.AlarmMember{}); err != nil {
		t.Fatal(err)
	}
}

// In a full cluster of several members no hold can move after an election. Then no client relies on a hold for longer
// than the previous leader has granted. The key stays, and the hold continues with its token if there is room in time.
func TestFullClusterAfterAnElection(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	c := containers.EtcdCluster(t, containers.Args("--quota-backend-bytes", "1048576"))
	d := newDriver(t, c.Endpoints()...)
	r := request("x", false)
	r.TTL = 30 * time.Second
	r.Lost = func(loss backend.Loss) { t.Errorf("the hold was lost: %v", loss.Reason) }
	held := mustAcquire(t, d, r)
	fill(t, d.service.client)
	before := leaseUnder(t, d, r)

	leader, term, err := c.Leader(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Node(leader).Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Leader(t.Context(), term); err != nil {
		t.Fatal(err)
	}
	elected := d.Describe().Clock.Now()
	eventually(t, "the proofs of the leader before are used up", func() bool {
		renewal := d.Renew(t.Context(), []backend.Grant{held})[0]
		if errors.Is(renewal.Err, backend.ErrNotHeld) {
			t.Fatalf("Renew = %v", renewal.Err)
		}
		if renewal.Err == nil && renewal.SentAt > elected {
			t.Errorf("a renewal after the election rests on a request that was sent %v after it",
				renewal.SentAt.Sub(elected))
		}
		return errors.Is(renewal.Err, backend.ErrUnavailable)
	})
	if leaseUnder(t, d, r) != before {
		t.Error("the hold has moved")
	}
	makeRoom(t, d.service.client)
	eventually(t, "the hold has moved", func() bool {
		disarm(t, d.service.client)
		renewal := d.Renew(t.Context(), []backend.Grant{held})[0]
		if errors.Is(renewal.Err, backend.ErrNotHeld) {
			t.Fatalf("Renew = %v", renewal.Err)
		}
		return renewal.Err == nil && leaseUnder(t, d, r) != before
	})
	mustRelease(t, d, held)
}
