package etcd

import (
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/doctor"
)

// Each address is asked for its role and the token space; a space that no driver wrote is a problem.
func TestExamine(t *testing.T) {
	t.Parallel()
	addr := containers.Etcd(t).Addr()
	d := newDriver(t, addr)
	mustRelease(t, d, mustAcquire(t, d, request("x", false)))
	look := func() doctor.Member {
		t.Helper()
		r, err := examine(t.Context(), "etcd://"+addr)
		if err != nil || len(r.Members) != 1 || r.Members[0].Err != nil {
			t.Fatalf("examine = %+v, %v", r, err)
		}
		return r.Members[0]
	}
	if m := look(); m.Role != doctor.Leader || m.Space != d.Describe().TokenSpace || len(m.Problems) > 0 {
		t.Errorf("%+v, want a leader with the space %s", m, d.Describe().TokenSpace)
	}
	if _, err := d.service.client.Put(t.Context(), d.service.spaceKey(), "mine"); err != nil {
		t.Fatal(err)
	}
	if m := look(); len(m.Problems) != 1 {
		t.Errorf("%+v, want one problem", m)
	}
}
