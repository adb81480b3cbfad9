package zookeeper

import (
	"fmt"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/doctor"
)

// Each address is asked for its mode, the sessions that it grants, and the token space. A tick that is longer than that
// of the options is a problem.
func TestExamine(t *testing.T) {
	t.Parallel()
	addr := containers.ZooKeeper(t).Addr()
	look := func(tick time.Duration) doctor.Member {
		t.Helper()
		r, err := examine(t.Context(), fmt.Sprintf("zk://%s?tick=%v", addr, tick))
		if err != nil || len(r.Members) != 1 || r.Members[0].Err != nil {
			t.Fatalf("examine = %+v, %v", r, err)
		}
		return r.Members[0]
	}
	if m := look(containers.ZooKeeperTick); m.Space != "" || len(m.Facts) == 0 || len(m.Problems) > 0 {
		t.Errorf("before the first client: %+v, want no space and no problem", m)
	}
	d := New([]string{addr}, &Options{Tick: containers.ZooKeeperTick})
	defer d.Close(t.Context())
	r := backend.Request{Name: "x", RequestID: backend.NewRequestID(), TTL: 10 * time.Second}
	if _, err := d.Acquire(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if m := look(containers.ZooKeeperTick); m.Space != d.Describe().TokenSpace || len(m.Problems) > 0 {
		t.Errorf("%+v, want the space %s", m, d.Describe().TokenSpace)
	}
	if m := look(containers.ZooKeeperTick / 2); len(m.Problems) != 1 {
		t.Errorf("%+v, want one problem", m)
	}
}
