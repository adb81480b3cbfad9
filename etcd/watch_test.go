package etcd

import (
	"errors"
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
)

func TestLoopOfAWatchMayCloseTheDriver(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d := newDriver(t, server.Addr())
	start, err := d.Look(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	other := newDriver(t, server.Addr())
	g := mustAcquire(t, other, request("x", false))
	if err := other.Release(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	var got []error
	for _, err := range d.Watch(t.Context(), "x", start.Revision) {
		if got = append(got, err); err == nil {
			if err := d.Close(t.Context()); err != nil {
				t.Errorf("Close = %v", err)
			}
		}
	}
	if len(got) != 2 || got[0] != nil || !errors.Is(got[1], backend.ErrClosed) {
		t.Errorf("the loop saw errors %v, want an event and ErrClosed", got)
	}
}
