package etcd

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/testtier"
)

// A renewal for a shorter TTL leaves the hold on its lease until the earlier promise has passed, and then moves it.
func TestRenewalForLessCutsNothingShort(t *testing.T) {
	t.Parallel()
	const long, short = 6 * time.Second, 2 * time.Second
	server := containers.Etcd(t)
	d := newDriver(t, server.Addr())
	r := request("x", false)
	r.TTL = long
	g := mustAcquire(t, d, r)
	promised := g.SentAt.Add(long)
	before := leaseUnder(t, d, r)
	g.TTL = short
	for {
		renewal := d.Renew(t.Context(), []backend.Grant{g})[0]
		if renewal.Err != nil || renewal.TTL != short {
			t.Fatalf("renewal = %+v", renewal)
		}
		now := leaseUnder(t, d, r)
		left, err := d.service.client.TimeToLive(t.Context(), now)
		if err != nil {
			t.Fatal(err)
		}
		ends := d.Describe().Clock.Now().Add(time.Duration(left.TTL+1) * time.Second) // whole seconds, rounded down
		if ends < promised {
			t.Fatalf("the key ends %v before what was promised", promised.Sub(ends))
		}
		if now != before {
			break
		}
		if d.Describe().Clock.Now() > promised.Add(20*time.Second) {
			t.Fatal("the hold never moved to the shorter lease")
		}
		time.Sleep(short / 3) // as the core renews
	}
}

// A server may allow fewer operations in a transaction than by default. After an election all holds move, in
// transactions that the server allows.
func TestHoldsMoveInPartsThatTheServerAllows(t *testing.T) {
	t.Parallel()
	testtier.NotShort(t)
	const holds = 70
	c := containers.EtcdCluster(t, containers.Args("--max-txn-ops", "9"))
	d := newDriver(t, c.Endpoints()...)
	grants, rs := make([]backend.Grant, holds), make([]backend.Request, holds)
	for i := range grants {
		rs[i] = request(fmt.Sprint("x", i), false)
		rs[i].TTL = time.Minute
		rs[i].Lost = func(loss backend.Loss) { t.Errorf("lost: %v", loss.Reason) }
		grants[i] = mustAcquire(t, d, rs[i])
	}
	before := leaseUnder(t, d, rs[0])
	leader, term, err := c.Leader(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Node(leader).Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Leader(t.Context(), term); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all holds have moved to another lease", func() bool {
		for i, r := range d.Renew(t.Context(), grants) {
			if errors.Is(r.Err, backend.ErrNotHeld) {
				t.Fatalf("hold %d: %v", i, r.Err)
			}
			if r.Err != nil {
				return false
			}
		}
		return leaseUnder(t, d, rs[0]) != before && leaseUnder(t, d, rs[holds-1]) != before
	})
	// A deleted hold does not prevent the move of others, and its renewal reports the loss.
	if _, err := d.service.client.Delete(t.Context(), d.Key(grants[3])); err != nil {
		t.Fatal(err)
	}
	for i := range grants {
		grants[i].TTL = 2 * time.Minute
	}
	for i, r := range d.Renew(t.Context(), grants) {
		if errors.Is(r.Err, backend.ErrNotHeld) != (i == 3) || r.Err != nil && i != 3 {
			t.Errorf("hold %d: %v", i, r.Err)
		}
	}
}
