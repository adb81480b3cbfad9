package etcd

import (
	"context"
	"errors"
	"os/exec"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
)

// startMember starts a member of the cluster in the arguments.
func startMember(t testing.TB, name, client, peer, cluster, state string) *fault.Child {
	t.Helper()
	return fault.Start(t, exec.Command("etcd", "--name", name, "--data-dir", t.TempDir(), "--log-level", "warn",
		"--listen-client-urls", "http://"+client, "--advertise-client-urls", "http://"+client,
		"--listen-peer-urls", "http://"+peer, "--initial-advertise-peer-urls", "http://"+peer,
		"--initial-cluster", cluster, "--initial-cluster-state", state))
}

// A learner has no vote and serves no locks. A client that knows a learner and voters gets every lock from the
// voters, and still treats the cluster as having a single member until the learner votes.
func TestLearnerAmongTheMembers(t *testing.T) {
	t.Parallel()
	containers.Etcd(t, containers.AsProcess()) // skips the test without etcd
	addrs := freeport.Addresses(t, 4)
	cluster := "voter=http://" + addrs[1]
	startMember(t, "voter", addrs[0], addrs[1], cluster, "new")
	admin := dial(t, addrs[0])
	serves := func(c *clientv3.Client, addr string) bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		status, err := c.Status(ctx, addr)
		return err == nil && status.Leader != 0
	}
	eventually(t, "the voter leads", func() bool { return serves(admin, addrs[0]) })
	held := newDriver(t, addrs[0])
	r := request("held", false)
	r.TTL = time.Minute
	g := mustAcquire(t, held, r)
	added, err := admin.MemberAddAsLearner(t.Context(), []string{"http://" + addrs[3]})
	if err != nil {
		t.Fatal(err)
	}
	startMember(t, "learner", addrs[2], addrs[3], cluster+",learner=http://"+addrs[3], "existing")
	eventually(t, "the learner follows", func() bool { return serves(admin, addrs[2]) })

	both, err := clientv3.New(clientv3.Config{
		Endpoints: []string{addrs[2], addrs[0]}, Logger: quiet, DialTimeout: 5 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer both.Close()
	d := New(both, nil)
	defer d.Close(context.WithoutCancel(t.Context()))
	for i := range 20 {
		r := request("x", i%2 == 0)
		r.TTL = time.Minute
		var got backend.Grant
		eventually(t, "a member that votes has answered", func() bool {
			var err error
			if got, err = d.Acquire(t.Context(), r); err != nil {
				if errors.Is(err, backend.ErrUnknown) || !errors.Is(err, backend.ErrUnavailable) {
					t.Fatalf("Acquire = %v, want a grant or ErrUnavailable", err)
				}
			}
			return err == nil
		})
		eventually(t, "the hold is released", func() bool { return d.Release(t.Context(), got) == nil })
	}
	if d.Describe().Exclusion != backend.ExclusionDurableServer {
		t.Errorf("with one member that votes, exclusion is %v", d.Describe().Exclusion)
	}
	alone := newDriver(t, addrs[2])
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := alone.Acquire(ctx, request("x", false)); !errors.Is(err, backend.ErrUnavailable) ||
		errors.Is(err, backend.ErrUnknown) {
		t.Errorf("Acquire from a learner alone = %v, want ErrUnavailable", err)
	}
	eventually(t, "the learner votes", func() bool {
		_, err := admin.MemberPromote(t.Context(), added.Member.ID)
		return err == nil
	})
	eventually(t, "the hold of before is renewed", func() bool {
		renewal := held.Renew(t.Context(), []backend.Grant{g})[0]
		if errors.Is(renewal.Err, backend.ErrNotHeld) {
			t.Fatalf("Renew = %v", renewal.Err)
		}
		return renewal.Err == nil
	})
}
