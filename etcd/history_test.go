package etcd

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/testtier"
)

// sameCluster gives two servers the same cluster id, as if an operator had wiped a cluster and restarted it with the
// same flags.
func sameCluster() containers.Option { return containers.Args("--initial-cluster-token", "same") }

// someRevisions advances the revision of an otherwise idle server by n at least.
func someRevisions(t *testing.T, addr string, n int) {
	t.Helper()
	c := dial(t, addr)
	for range n {
		eventually(t, "a key is written", func() bool { // a leader may be elected meanwhile
			_, err := c.Put(t.Context(), "unrelated", "x")
			return err == nil
		})
	}
}

// survivor is a driver with a hold and a waiter, which runs while a cluster loses its history.
type survivor struct {
	d       *Driver
	space   string
	held    backend.Grant
	lost    chan backend.Reason
	waiting <-chan outcome
}

func newSurvivor(t *testing.T, addrs ...string) *survivor {
	t.Helper()
	return newSurvivorFor(t, request("", false).TTL, addrs...)
}

// newSurvivorFor is newSurvivor with a TTL.
func newSurvivorFor(t *testing.T, ttl time.Duration, addrs ...string) *survivor {
	t.Helper()
	s := &survivor{d: newDriver(t, addrs...), lost: make(chan backend.Reason, 1)}
	r := request("held", false)
	r.TTL = ttl
	r.Lost = func(loss backend.Loss) { s.lost <- loss.Reason }
	s.held = mustAcquire(t, s.d, r)
	s.waiting = acquireLater(t, s.d, request("held", true))
	if s.space = s.d.Describe().TokenSpace; s.space == "" {
		t.Fatal("no token space")
	}
	return s
}

// wantAllLost checks that the driver loses its hold and its wait because of the sign what, and gets no new hold.
func (s *survivor) wantAllLost(t *testing.T, what string) {
	t.Helper()
	select {
	case reason := <-s.lost:
		if reason != backend.ReasonHistoryLost {
			t.Errorf("the hold was lost as %s", reason)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the holder was not notified within 30s")
	}
	select {
	case o := <-s.waiting:
		if !errors.Is(o.err, backend.ErrHistoryLost) {
			t.Errorf("the waiter: %+v, %v", o.grant, o.err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the waiter did not end within 30s")
	}
	_, err := s.d.Acquire(t.Context(), request("another", false))
	lost := (*backend.HistoryError)(nil)
	if !errors.As(err, &lost) || !errors.Is(err, backend.ErrHistoryLost) || errors.Is(err, backend.ErrUnknown) {
		t.Fatalf("Acquire = %v", err)
	}
	t.Logf("answered: %v", err)
	if !strings.HasPrefix(lost.What, what) || lost.Was == lost.Now {
		t.Errorf("%+v, want the sign %q", lost, what)
	}
	if err := s.d.Ping(t.Context()); !errors.Is(err, backend.ErrHistoryLost) {
		t.Errorf("Ping = %v", err)
	}
	renewal := s.d.Renew(t.Context(), []backend.Grant{s.held})[0]
	if gone := (*backend.NotHeldError)(nil); !errors.As(renewal.Err, &gone) ||
		gone.Reason != backend.ReasonHistoryLost {
		t.Errorf("Renew = %v", renewal.Err)
	}
	if _, err := s.d.Look(t.Context(), "held"); err != nil {
		t.Errorf("what there is can be looked at: %v", err)
	}
	if err := s.d.Release(t.Context(), s.held); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("Release = %v", err)
	}
}

// wantFreshSpace checks that a new driver begins with a new token space, and that no driver has planted the old one
// again.
func (s *survivor) wantFreshSpace(t *testing.T, addr string) {
	t.Helper()
	resp, err := dial(t, addr).Get(t.Context(), "fencelock/+space")
	if err != nil || len(resp.Kvs) > 0 && strings.Contains(string(resp.Kvs[0].Value), s.space) {
		t.Errorf("the old space stands in the new cluster: %v, %v", resp, err)
	}
	fresh := newDriver(t, addr)
	g := mustAcquire(t, fresh, request("held", false))
	now := fresh.Describe().TokenSpace
	t.Logf("a fresh driver got token %v of %s after %v of %s", g.Token, now, s.held.Token, s.space)
	if now == "" || now == s.space {
		t.Errorf("the space of the new cluster is %q", now)
	}
}

// swapped returns an address behind which swap replaces the first server by another one.
func swapped(t *testing.T, first string) (addr string, swap func(second string)) {
	t.Helper()
	p, err := fault.NewProxy(first)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p.Addr(), func(second string) {
		p.SetUpstream(second)
		p.Reset()
	}
}

func TestWipedClusterIsNoticed(t *testing.T) {
	t.Parallel()
	before, after := containers.Etcd(t, sameCluster()), containers.Etcd(t, sameCluster())
	addr, swap := swapped(t, before.Addr())
	someRevisions(t, addr, 100)
	s := newSurvivor(t, addr)
	swap(after.Addr())
	s.wantAllLost(t, "revision")
	s.wantFreshSpace(t, addr)
}

func TestOtherClusterIsNoticed(t *testing.T) {
	t.Parallel()
	before, after := containers.Etcd(t), containers.Etcd(t)
	addr, swap := swapped(t, before.Addr())
	s := newSurvivor(t, addr)
	someRevisions(t, after.Addr(), 100)
	swap(after.Addr())
	s.wantAllLost(t, "cluster id")
	s.wantFreshSpace(t, addr)
}

// A cluster was wiped, and its revision and term have grown beyond those that the driver has seen of the old cluster,
// with the same id: the driver notices the other token space.
func TestWipedClusterThatHasGrownIsNoticed(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	for name, used := range map[string]bool{"and is in use": true, "and was not used": false} {
		t.Run(name, func(t *testing.T) {
			before, after := containers.Etcd(t, sameCluster()), containers.Etcd(t, sameCluster())
			addr, swap := swapped(t, before.Addr())
			s := newSurvivor(t, addr)
			someRevisions(t, after.Addr(), 100)
			if used {
				mustAcquire(t, newDriver(t, after.Addr()), request("theirs", false))
			}
			swap(after.Addr())
			if !used { // the hold expires with its lease; the next request fails
				<-s.lost
				s.lost <- backend.ReasonHistoryLost
			}
			s.wantAllLost(t, "token space")
			s.wantFreshSpace(t, addr)
		})
	}
}

// A server starts from a backup of its files: it has lost all later changes, but not the token space. The driver that
// notices this replaces the space, so that guards refuse the tokens of new drivers.
func TestRestoredServerIsNoticed(t *testing.T) {
	t.Parallel()
	files, backup := filepath.Join(t.TempDir(), "data"), filepath.Join(t.TempDir(), "backup")
	server := containers.Etcd(t, containers.AsProcess(), containers.Args("--data-dir", files))
	step := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	first := newDriver(t, server.Addr())
	forgotten := mustAcquire(t, first, request("before", false))
	step(server.Stop(t.Context()))
	step(os.CopyFS(backup, os.DirFS(files)))
	step(server.Start(t.Context()))
	someRevisions(t, server.Addr(), 100)
	s := newSurvivor(t, server.Addr())

	step(server.Stop(t.Context()))
	step(os.RemoveAll(files))
	step(os.CopyFS(files, os.DirFS(backup)))
	step(server.Start(t.Context()))
	s.wantAllLost(t, "revision")

	fresh := newDriver(t, server.Addr())
	g := mustAcquire(t, fresh, request("held", false))
	t.Logf("a fresh driver got token %v of %s after %v of %s",
		g.Token, fresh.Describe().TokenSpace, s.held.Token, s.space)
	if now := fresh.Describe().TokenSpace; now == "" || now == s.space {
		t.Errorf("the space is %q, want a new one: a driver has noticed the loss", now)
	}
	if g.Token <= forgotten.Token {
		t.Errorf("token %v after %v, which the backup knew", g.Token, forgotten.Token)
	}
	// A new client cannot detect the lost changes of such a cluster. Guards can: they refuse tokens that are not greater.
	if g.Token >= s.held.Token {
		t.Errorf("token %v after %v: nothing was forgotten", g.Token, s.held.Token)
	}
}

// The deletion of all keys of a cluster deletes the token space. A driver cannot distinguish that from a new cluster.
func TestDeletionOfEverythingIsNoticed(t *testing.T) {
	t.Parallel()
	addr := containers.Etcd(t).Addr()
	s := newSurvivor(t, addr)
	if _, err := s.d.service.client.Delete(t.Context(), "\x00", clientv3.WithFromKey()); err != nil {
		t.Fatal(err)
	}
	for renewed := false; !renewed; { // as the core renews
		err := s.d.Renew(t.Context(), []backend.Grant{s.held})[0].Err
		renewed = errors.Is(err, backend.ErrNotHeld)
		if gone := (*backend.NotHeldError)(nil); errors.As(err, &gone) && gone.Reason != backend.ReasonHistoryLost {
			t.Errorf("Renew = %v", err)
		}
	}
	s.wantAllLost(t, "token space")
	s.wantFreshSpace(t, addr)
}

func TestHistoryNote(t *testing.T) {
	t.Parallel()
	header := func(cluster, member uint64, revision int64, term uint64) *pb.ResponseHeader {
		return &pb.ResponseHeader{ClusterId: cluster, MemberId: member, Revision: revision, RaftTerm: term}
	}
	for name, c := range map[string]struct {
		answer       *pb.ResponseHeader
		linearizable bool
		sign         string
	}{
		"the same":                             {header(1, 7, 100, 5), true, ""},
		"later":                                {header(1, 7, 101, 6), true, ""},
		"another cluster":                      {header(2, 7, 101, 6), true, "cluster id"},
		"another cluster, from a member alone": {header(2, 7, 101, 6), false, "cluster id"},
		"an older revision":                    {header(1, 7, 99, 5), true, "revision"},
		"an older revision, from a member that lags":  {header(1, 7, 99, 5), false, ""},
		"an older term of the member":                 {header(1, 7, 100, 4), true, "raft term"},
		"an older term of another member that lagged": {header(1, 8, 100, 4), true, ""},
		"no header, as of a proxy":                    {nil, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var h history
			early := h.mark()
			if lost := h.note(header(1, 7, 100, 5), early); lost != nil {
				t.Fatal(lost)
			}
			if c.linearizable { // requested earlier: it may be older
				if lost := h.note(header(1, 7, 1, 1), early); lost != nil {
					t.Fatal(lost)
				}
			}
			var since *mark
			if c.linearizable {
				since = h.mark()
			}
			lost := h.note(c.answer, since)
			if (lost == nil) != (c.sign == "") || lost != nil && !strings.HasPrefix(lost.What, c.sign) {
				t.Errorf("%v, want the sign %q", lost, c.sign)
			}
		})
	}
}

func TestExclusionIsThatOfTheMembers(t *testing.T) {
	t.Parallel()
	single := newDriver(t, containers.Etcd(t).Addr())
	cluster := newDriver(t, containers.EtcdCluster(t).Endpoints()[0])
	for d, want := range map[*Driver]backend.Exclusion{
		single: backend.ExclusionDurableServer, cluster: backend.ExclusionQuorum,
	} {
		if err := d.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := d.Describe().Exclusion; got != want {
			t.Errorf("exclusion %v, want %v", got, want)
		}
	}
}
