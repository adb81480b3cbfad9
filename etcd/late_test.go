package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
)

// A follower that was cut off from the leader hands on what it was asked when it is back, long after the client gave
// up, asked another node to remove whatever had come of it, and was told that there was nothing. The client's lease
// lives, as it has another lock, and must not keep the name closed.
func TestRequestThatANodeHandsOnLateClosesNothing(t *testing.T) {
	t.Parallel()
	const ttl = 2 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
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
	d, rival := open(addrs...), open(c.Endpoints()...)
	request := func(name string, wait bool) backend.Request {
		return backend.Request{Name: name, Owner: "test", RequestID: backend.NewRequestID(), Fresh: true, TTL: ttl, Wait: wait}
	}
	if _, err := d.Acquire(ctx, request("other", false)); err != nil {
		t.Fatal(err)
	}
	// only makes d speak to one node.
	only := func(node int) {
		links[node].Pass()
		for i, link := range links {
			if i != node {
				link.Refuse()
			}
		}
	}
	// A follower that is cut off for too long drops what it was asked, and then nothing is late: begin again.
	var late backend.Request
	var healed time.Time
	for n, arrived := 1, false; !arrived; n++ {
		if n > 5 {
			t.Fatal("no late request arrived")
		}
		leader, _, err := c.Leader(ctx, 0)
		if err != nil {
			t.Fatal(err)
		}
		follower := (leader + 1) % containers.Nodes
		late = request(fmt.Sprintf("late-%d", n), false)
		only(follower)
		if err := onceConnected(ctx, d, links[follower]); err != nil {
			t.Fatal(err)
		}
		c.Cut(follower, leader)
		said := c.Said(follower, leader)
		short, stop := context.WithTimeout(ctx, ttl/8)
		_, err = d.Acquire(short, late)
		stop()
		if !errors.Is(err, backend.ErrUnknown) {
			t.Fatalf("acquire through a node that is cut off: %v; want ErrUnknown", err)
		}
		if c.Said(follower, leader) == said {
			t.Fatal("the follower handed nothing on")
		}
		only(leader)
		for err = errors.New("not tried"); !errors.Is(err, backend.ErrNotHeld); {
			if err = d.Release(ctx, late.Grant()); err == nil {
				t.Fatal("there was something to release: the request was not late")
			}
			if ctx.Err() != nil {
				t.Fatalf("release: %v", err)
			}
		}
		c.Heal()
		healed = time.Now()
		arrived = held(ctx, rival, late.Name)
	}
	g, err := rival.Acquire(ctx, request(late.Name, true))
	if err != nil {
		t.Fatalf("the late request closed the name for good: %v", err)
	}
	if closed := time.Since(healed); closed > ttl+5*time.Second {
		t.Errorf("the late request closed the name for %v", closed)
	}
	if err := rival.Release(ctx, g); err != nil {
		t.Error(err)
	}
}

// held reports whether the name is seen held within some seconds.
func held(ctx context.Context, d backend.Driver, name string) bool {
	ctx, cancel := context.WithTimeout(ctx, 8*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		info, err := d.(backend.Inspector).Look(ctx, name)
		if err == nil && info.Held {
			return true
		}
	}
	return false
}

// onceConnected returns when d has asked something over link.
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
