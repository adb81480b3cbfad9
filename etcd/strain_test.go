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
)

// Compaction under waiters and watchers takes nothing from them: both follow what is to come.
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
	if _, err := d.client.Compact(t.Context(), int64(other.Token), clientv3.WithCompactPhysical()); err != nil {
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

// A server whose quota is used up takes no writes but those that make room. Holds go on, and can be given back; whoever
// wants one is told that the service is unavailable, and gets it when there is room.
func TestFullServerKeepsHolds(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t, containers.Args("--quota-backend-bytes", "1048576")).Addr())
	r := request("x", false)
	r.Lost = func(reason backend.Reason) { t.Errorf("the hold was lost: %v", reason) }
	held, other := mustAcquire(t, d, r), mustAcquire(t, d, request("other", false))
	fill := strings.Repeat("x", 100<<10)
	eventually(t, "the server is full", func() bool {
		_, err := d.client.Put(t.Context(), "filling/"+backend.NewRequestID(), fill)
		return errors.Is(err, rpctypes.ErrNoSpace)
	})
	if _, err := d.Acquire(t.Context(), request("y", false)); !errors.Is(err, backend.ErrUnavailable) || errors.Is(err, backend.ErrUnknown) {
		t.Errorf("Acquire = %v, want ErrUnavailable", err)
	}
	for last := held.SentAt; last < held.SentAt.Add(2*held.TTL); { // longer than it would live by itself
		renewal := d.Renew(t.Context(), []backend.Grant{held})[0]
		if renewal.Err != nil {
			t.Fatalf("Renew = %v", renewal.Err)
		}
		last = renewal.SentAt
		time.Sleep(held.TTL / 10) // as the core, which does not renew all the time
	}
	mustRelease(t, d, other)

	resp, err := d.client.Delete(t.Context(), "filling/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.Compact(t.Context(), resp.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.Defragment(t.Context(), d.client.Endpoints()[0]); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.AlarmDisarm(t.Context(), &clientv3.AlarmMember{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "there is room again", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		g, err := d.Acquire(ctx, request("y", false))
		return err == nil && g.Token > held.Token
	})
}
