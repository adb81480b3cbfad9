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

// A creation that reaches the server over a connection that its client has replaced, after the request was released,
// closes nothing, although the session lives on.
func TestLateCreationClosesNothing(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	addr, link := server.NewLink(t)
	d, rival := closed(t, newDriver(t, addr, server.Addr())), closed(t, newDriver(t, server.Addr()))
	brief := func(name string) backend.Request {
		r := request(name, false)
		r.TTL = 6 * time.Second
		return r
	}
	other, r := acquire(t, d, brief("other")), brief("late")
	link.Hold(fault.Requests)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if _, err := d.Acquire(ctx, r); !errors.Is(err, backend.ErrUnknown) {
		t.Fatalf("Acquire = %v, want ErrUnknown", err)
	}
	if err := d.Release(within(t, 30*time.Second), r.Grant()); !errors.Is(err, backend.ErrNotHeld) { // over the other address
		t.Fatalf("Release = %v, want ErrNotHeld", err)
	}
	link.Pass()
	for until := time.Now().Add(time.Second); time.Now().Before(until); {
		if s, err := rival.Look(within(t, 30*time.Second), "late"); err != nil || s.Held {
			t.Fatalf("after the late delivery: Look = %+v, %v", s, err)
		}
	}
	acquire(t, rival, brief("late"))
	if out := d.Renew(within(t, 30*time.Second), []backend.Grant{other}); out[0].Err != nil {
		t.Errorf("renewal of another hold = %v", out[0].Err)
	}
}
