package builtin_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	replicated "github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server"
)

// A client that works under the hold of another process is refused where it would wait for that hold, alone and in a
// set.
func TestUnderHoldsOfOtherProcesses(t *testing.T) {
	t.Parallel()
	s, err := server.Start(t.Context(), server.Config{Listen: "127.0.0.1:0", Log: quiet(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	within(t, s.WaitLeader)
	client := func(under ...string) *builtin.Driver {
		d := builtin.New([]string{s.Addr().String()}, &builtin.Options{Under: under, Logger: quiet(t)})
		t.Cleanup(func() { _ = d.Close(context.Background()) })
		return d
	}
	request := func(name string) backend.Request {
		return backend.Request{Name: name, Owner: "a", RequestID: backend.NewRequestID(), TTL: time.Minute, Wait: true}
	}
	outer := request("x")
	if _, err := client().Acquire(t.Context(), outer); err != nil {
		t.Fatal(err)
	}
	ref := builtin.HoldRef(outer.RequestID)
	if want := replicated.HiddenRequest(outer.RequestID); ref != want {
		t.Fatalf("the reference is %s, and the server knows %s", ref, want)
	}
	inner := client(builtin.HoldRef(backend.NewRequestID()), ref)
	if _, err := inner.Acquire(t.Context(), request("x")); !errors.Is(err, backend.ErrDeadlock) {
		t.Errorf("one name: %v, want a deadlock", err)
	}
	if _, err := inner.AcquireAll(t.Context(), []backend.Request{request("y"), request("x")}); !errors.Is(err, backend.ErrDeadlock) {
		t.Errorf("a set: %v, want a deadlock", err)
	}
	own := request("y")
	own.Under = []string{outer.RequestID} // the same hold, by its request id
	if _, err := inner.Acquire(t.Context(), own); err != nil {
		t.Errorf("a name that nobody holds: %v", err)
	}

	for _, bad := range [][]string{{""}, {outer.RequestID}, make([]string, backend.MaxUnder+1)} {
		if _, err := client(bad...).Acquire(t.Context(), request("z")); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("under %q: %v, want an invalid option", bad, err)
		}
	}
	url := "fencelock://" + s.Addr().String() + "?under="
	if _, err := builtin.Open(t.Context(), url+"short"); !errors.Is(err, backend.ErrInvalidOption) || !strings.Contains(err.Error(), "short") {
		t.Errorf("a URL with under=short: %v", err)
	}
	d, err := builtin.Open(t.Context(), url+ref)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close(context.Background())
	if _, err := d.Acquire(t.Context(), request("x")); !errors.Is(err, backend.ErrDeadlock) {
		t.Errorf("under, in the URL: %v, want a deadlock", err)
	}
}
