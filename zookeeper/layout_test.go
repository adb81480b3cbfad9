package zookeeper_test

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
	server := containers.ZooKeeper(t)
	admin, running, late := newAdmin(t, server.Addr()), driver(t, server.Addr()), driver(t, server.Addr())
	lost := make(chan backend.Loss, 1)
	r := request("x", false)
	r.Lost = func(l backend.Loss) { lost <- l }
	take(t, running, r)
	if err := admin.try(func() error {
		text, stat, err := admin.Get("/fencelock")
		if err == nil {
			later := strings.Replace(string(text), "{", `{"fencelock_layout":2,`, 1)
			_, err = admin.Set("/fencelock", []byte(later), stat.Version)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	_, err := late.Acquire(soon(t, 30*time.Second), request("y", false))
	if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), `"2", must be 1`) {
		t.Errorf("a new driver: Acquire = %v", err)
	}
	select {
	case l := <-lost:
		if l.Reason != backend.ReasonHistoryLost {
			t.Errorf("the hold is lost with %q", l.Reason)
		}
	case <-soon(t, 30*time.Second).Done():
		t.Error("the hold is not lost")
	}
	_, err = running.Acquire(soon(t, 30*time.Second), request("y", false))
	if !errors.Is(err, backend.ErrHistoryLost) ||
		!strings.Contains(err.Error(), "layout of /fencelock was 1 and is 2") {
		t.Errorf("a running driver: Acquire = %v", err)
	}
}
