package zookeeper_test

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/zookeeper"
)

// TestWrittenHoldIsWatchedAgain writes into the node of a hold, which uses up its watch, and breaks the connection over
// which the driver sets another one. That the node is deleted after that must be reported nevertheless.
func TestWrittenHoldIsWatchedAgain(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	admin := newAdmin(t, server.Addr())
	lost := make(chan backend.Reason, 1)
	r := request("written", false)
	r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
	b := &breaker{requestID: r.RequestID}
	d := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: b.dial})
	t.Cleanup(func() { _ = d.Close(soon(t, 10*time.Second)) })
	g := take(t, d, r)
	ctx := soon(t, 30*time.Second)
	if err := b.await(ctx, "watch one's own"); err != nil {
		t.Fatal(err)
	}
	if err := d.Renew(ctx, []backend.Grant{g})[0].Err; err != nil { // the watch has been answered before
		t.Fatalf("Renew = %v", err)
	}
	b.arm("watch one's own", requestLost)
	nodes := admin.below(t, "/fencelock/lock:written")
	if len(nodes) != 1 {
		t.Fatalf("the queue is %q, want one entry", nodes)
	}
	if err := admin.try(func() error {
		_, err := admin.Set(nodes[0], nil, -1)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for ; !b.hasBroken(); time.Sleep(time.Millisecond) { // no event announces it
		if ctx.Err() != nil {
			t.Fatal("the node was not watched again")
		}
	}
	again := func() error { return d.Renew(ctx, []backend.Grant{g})[0].Err }
	for err := again(); err != nil; err = again() { // over the next connection
		if ctx.Err() != nil {
			t.Fatalf("Renew = %v", err)
		}
	}
	if err := admin.try(func() error { return admin.Delete(nodes[0], -1) }); err != nil {
		t.Fatal(err)
	}
	select {
	case reason := <-lost:
		if reason != backend.ReasonEvicted {
			t.Errorf("reason = %q, want %q", reason, backend.ReasonEvicted)
		}
	case <-ctx.Done():
		t.Error("the holder was not notified that its node was deleted")
	}
}
