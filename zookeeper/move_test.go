package zookeeper_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/zookeeper"
)

// TestReleaseWhileMoving releases a hold when its node has moved to another session, and the driver does not know yet.
// The driver then keeps nothing of it: both sessions end.
func TestReleaseWhileMoving(t *testing.T) {
	t.Parallel()
	r := request("moving", false)
	r.TTL = longTTL / 5 // both sessions end soon, and not while a busy machine does something else
	b := &breaker{requestID: r.RequestID, arrived: make(chan struct{}), deliver: make(chan struct{})}
	d := zookeeper.New([]string{sharedServer(t).Addr()},
		&zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: b.dial})
	t.Cleanup(func() { _ = d.Close(soon(t, 10*time.Second)) })
	g := take(t, d, r)
	b.arm("replace", replyHeld)
	longer := g
	longer.TTL = 2 * r.TTL
	renewed := make(chan error, 1)
	go func() { renewed <- d.Renew(soon(t, 20*time.Second), []backend.Grant{longer})[0].Err }()
	select {
	case <-b.arrived:
	case <-soon(t, 20*time.Second).Done():
		t.Fatal("the node was not moved")
	}
	if err := d.Release(soon(t, 20*time.Second), g); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("Release = %v", err)
	}
	b.rearm("watch one's own", unsent)
	close(b.deliver)
	if err := <-renewed; err == nil {
		t.Error("Renew says that a released hold goes on")
	}
	for ctx := soon(t, time.Minute); b.connections() > 0; time.Sleep(10 * time.Millisecond) { // no event announces it
		if ctx.Err() != nil {
			t.Fatalf("a driver that holds nothing has %d connections", b.connections())
		}
	}
}

// TestCallsWaitForALateAnswer holds the answer to a proof back until another one is asked for. That is later than one
// question waits, and earlier than the caller's context ends: no call may say that this has ended.
func TestCallsWaitForALateAnswer(t *testing.T) {
	t.Parallel()
	b := &breaker{requestID: backend.NewRequestID(), arrived: make(chan struct{}), deliver: make(chan struct{})}
	var asked atomic.Int32
	b.before = func(step string) {
		if step == "prove" && asked.Add(1) == 2 {
			close(b.deliver)
		}
	}
	d := zookeeper.New([]string{sharedServer(t).Addr()},
		&zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: b.dial})
	b.arm("prove", replyHeld)
	if _, err := d.Look(soon(t, time.Minute), "late"); err != nil {
		t.Errorf("Look = %v after %d questions, want it to wait for the second one's answer", err, asked.Load())
	}
	if !b.hasBroken() {
		t.Error("no answer was held back")
	}
	if err := d.Close(soon(t, 10*time.Second)); err != nil {
		t.Errorf("Close = %v", err)
	}
}
