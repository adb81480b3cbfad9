package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
)

// A follower that was cut off from the leader reconnects and forwards an old request. The client has abandoned the
// request long ago, and has had its effects removed through another node, which found no effects. The client's lease
// lives, since the client holds another lock, but the late request must not block the name.
func TestLateForwardedRequestLeavesNothing(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	c := containers.EtcdCluster(t)
	addrs, links := c.NewLinks(t)
	open := func(addrs ...string) backend.Driver {
		d := openDriver(t, addrs...)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_ = d.Close(ctx)
		})
		return d
	}
	l := lateRequests{
		c: c, links: links, d: open(addrs...), rival: open(c.Endpoints()...), admin: newClient(t, c.Endpoints()...),
	}
	for round := 1; ; round++ {
		missing := l.round(ctx, t, fmt.Sprintf("late-%d", round))
		if missing == "" {
			return
		}
		t.Logf("round %d shows nothing: %s", round, missing)
		if ctx.Err() != nil {
			t.Fatal("no late request arrived")
		}
	}
}

// lateRequests delays requests: d reaches the cluster over links, and rival reaches it directly.
type lateRequests struct {
	c        *containers.EtcdNodes
	links    fault.Links
	d, rival backend.Driver
	admin    *clientv3.Client
}

// round delays a request for a name, and checks the consequences. It returns the reason if that was impossible, or "":
// if the machine stalls, a node may be cut off for too long to forward the request, may already lead, or may lose the
// lease.
func (l *lateRequests) round(ctx context.Context, t *testing.T, name string) (missing string) {
	t.Helper()
	request := func(name string, wait bool) backend.Request {
		return backend.Request{
			Name: name, Owner: "test", RequestID: backend.NewRequestID(), Fresh: true,
			TTL: 10 * time.Second, Wait: wait,
		}
	}
	defer l.links.Pass()
	defer l.c.Heal()
	leader, term, err := l.c.Leader(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	other, err := l.d.Acquire(ctx, request("beside "+name, false))
	if err != nil {
		t.Fatal(err)
	}
	before, err := l.admin.Get(ctx, "x")
	if err != nil {
		t.Fatal(err)
	}
	follower := (leader + 1) % containers.Nodes
	l.only(follower)
	if err := onceConnected(ctx, l.d, l.links[follower]); err != nil {
		t.Fatal(err)
	}

	l.c.Cut(follower, leader)
	late := request(name, false)
	short, stop := context.WithTimeout(ctx, 250*time.Millisecond)
	_, acquired := l.d.Acquire(short, late)
	stop()
	// A node forwards requests in their order: the arrival of the next request shows that this one has arrived, since a
	// late acquire leaves no key.
	witness, stop := context.WithTimeout(ctx, 250*time.Millisecond)
	_, _ = newClient(t, l.c.Endpoints()[follower]).Put(witness, "witness of "+name, "")
	stop()
	l.only(leader)
	released := make(chan error, 1)
	go func() {
		err := errors.New("not tried")
		for err != nil && !errors.Is(err, backend.ErrNotHeld) && ctx.Err() == nil {
			err = l.d.Release(ctx, late.Grant())
		}
		released <- err
	}()
	select { // a driver may wait until no request is on its way; a node keeps the request for about a second
	case err = <-released:
		released <- err
	case <-time.After(700 * time.Millisecond):
	}
	if now, after, electedErr := l.c.Leader(ctx, 0); electedErr != nil || now != leader || after != term {
		<-released
		return fmt.Sprintf("the leader is node %d now, and was node %d, %v", now, leader, electedErr)
	}
	if acquired == nil {
		t.Fatal("a request that was not handed on was carried out")
	}
	l.c.Heal()
	if err := <-released; err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Fatalf("release: %v", err)
	}
	if !l.arrives(ctx, t, follower, name, before.Header.Revision) {
		return fmt.Sprintf("the request did not arrive (%v)", acquired)
	}
	if !errors.Is(acquired, backend.ErrUnknown) {
		t.Errorf("acquire through a node that is cut off: %v; want ErrUnknown", acquired)
	}

	opens, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	g, err := l.rival.Acquire(opens, request(name, true))
	if err != nil {
		t.Fatalf("the late request closed the name for good: %v", err)
	}
	if err := l.rival.Release(ctx, g); err != nil {
		t.Error(err)
	}
	if err := l.d.Renew(ctx, []backend.Grant{other})[0].Err; err != nil {
		return fmt.Sprintf("the lease has ended, and the request with it: %v", err)
	}
	return ""
}

// only makes d speak to one node.
func (l *lateRequests) only(node int) {
	l.links[node].Pass()
	for i, link := range l.links {
		if i != node {
			link.Refuse()
		}
	}
}

// arrives waits until a later request to the node has been executed, and reports whether a key of the name, or the
// witness, has been written since a revision.
func (l *lateRequests) arrives(ctx context.Context, t *testing.T, node int, name string, since int64) bool {
	t.Helper()
	through := newClient(t, l.c.Endpoints()[node])
	for marked := false; !marked; {
		attempt, stop := context.WithTimeout(ctx, 5*time.Second)
		_, err := through.Put(attempt, "marker of "+name, "")
		stop()
		if marked = err == nil; ctx.Err() != nil {
			t.Fatal(err)
		}
	}
	for resp := range l.admin.Watch(ctx, "", clientv3.WithPrefix(), clientv3.WithRev(since+1)) {
		if err := resp.Err(); err != nil {
			t.Fatal(err)
		}
		for _, event := range resp.Events {
			if key := string(event.Kv.Key); key == "witness of "+name || strings.HasPrefix(key, dialers["Open"].dir(name)) {
				return true
			} else if key == "marker of "+name {
				return false
			}
		}
	}
	t.Fatal(ctx.Err())
	return false
}

// onceConnected returns when d has sent a request over link.
func onceConnected(ctx context.Context, d backend.Driver, link fault.Link) error {
	for before := link.Seen(fault.Requests); ; {
		err := d.(backend.Pinger).Ping(ctx)
		if err == nil && link.Seen(fault.Requests) > before {
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
	}
}
