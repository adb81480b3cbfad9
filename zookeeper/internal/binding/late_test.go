package binding_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
)

// A creation that reaches the server after the attempt was released closes nothing, although the client and its session
// live on, and its connection was to the same server.
func TestLateCreationClosesNothing(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	addr, link := server.NewLink(t)
	d, rival := closed(t, newDriver(t, addr)), closed(t, newDriver(t, server.Addr()))
	other := acquire(t, d, request("other", false))
	link.Hold(fault.Requests)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	r := request("late", false)
	if _, err := d.Acquire(ctx, r); !errors.Is(err, backend.ErrUnknown) {
		t.Fatalf("Acquire = %v, want ErrUnknown", err)
	}
	released := make(chan error, 1)
	go func() { released <- d.Release(within(t, 30*time.Second), r.Grant()) }()
	time.Sleep(300 * time.Millisecond)
	link.Pass()
	if err := <-released; err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Fatalf("Release = %v", err)
	}
	acquire(t, rival, request("late", false))
	if out := d.Renew(within(t, 30*time.Second), []backend.Grant{other}); out[0].Err != nil {
		t.Errorf("renewal of another hold = %v", out[0].Err)
	}
}
