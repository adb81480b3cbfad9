package etcd

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
)

// A later layout is refused with both versions. A driver that knew the layout before loses its holds.
func TestLaterLayoutIsRefused(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	running, late := New(dial(t, server.Addr()), nil), New(dial(t, server.Addr()), nil)
	for _, d := range []*Driver{running, late} {
		defer d.Close(t.Context())
	}
	lost := make(chan backend.Loss, 1)
	r := request("x", false)
	r.TTL = time.Minute
	r.Lost = func(l backend.Loss) { lost <- l }
	if _, err := running.Acquire(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if _, err := running.service.client.Put(t.Context(), "fencelock/+space", `{"fencelock":2,"space":[]}`); err != nil {
		t.Fatal(err)
	}
	_, err := late.Acquire(t.Context(), request("y", false))
	if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), `"2", must be 1`) {
		t.Errorf("a new driver: Acquire = %v", err)
	}
	_, err = running.Acquire(t.Context(), request("y", true))
	if !errors.Is(err, backend.ErrHistoryLost) || !strings.Contains(err.Error(), "layout 2, this program knows 1") {
		t.Errorf("a running driver: Acquire = %v", err)
	}
	if l := <-lost; l.Reason != backend.ReasonHistoryLost {
		t.Errorf("the hold is lost with %q", l.Reason)
	}
}
