package etcd

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/doctor"
)

// soon returns a context for what should not take long.
func soon(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// dataDir is the directory with an etcd server's data, in its folder.
const dataDir = "data"

// replace puts a copy of the directory from in the place of to.
func replace(t testing.TB, to, from string) {
	t.Helper()
	if err := errors.Join(os.RemoveAll(to), os.CopyFS(to, os.DirFS(from))); err != nil {
		t.Fatal(err)
	}
}

// must fails the test for each error.
func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// atRevision writes a key with that revision into the files of a stopped server, as a restore with --bump-revision
// does. The server counts on from there.
func atRevision(t testing.TB, data string, revision int64) {
	t.Helper()
	db, err := bbolt.Open(filepath.Join(data, "member", "snap", "db"), 0o600, nil)
	must(t, err)
	kv := &mvccpb.KeyValue{
		Key: []byte("bumped"), CreateRevision: revision, ModRevision: revision, Version: 1, Value: []byte("x"),
	}
	value, err := proto.Marshal(kv)
	must(t, err)
	key := binary.BigEndian.AppendUint64(nil, uint64(revision))
	key = binary.BigEndian.AppendUint64(append(key, '_'), 0)
	must(t, db.Update(func(tx *bbolt.Tx) error { return tx.Bucket([]byte("key")).Put(key, value) }), db.Close())
}

// A cluster's revision comes to the end of the numbers that guards admit as tokens, under a client with a hold. Tokens rise
// up to it; then nothing is granted, and the hold can be renewed and released.
func TestRevisionNearItsEnd(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t, containers.AsProcess())
	before := mustAcquire(t, newDriver(t, server.Addr()), request("before", false))
	must(t, server.Stop(soon(t, time.Minute)))
	atRevision(t, filepath.Join(server.Folder(t), dataDir), int64(fencing.MaxToken)-60)
	must(t, server.Start(soon(t, time.Minute)))
	d := newDriver(t, server.Addr())
	r := request("held", false)
	r.TTL = time.Minute
	r.Lost = func(loss backend.Loss) { t.Errorf("the hold was lost: %v", loss.Reason) }
	held := mustAcquire(t, d, r)
	last := max(held.Token, before.Token)
	grants := func(d *Driver) error {
		for {
			g, err := d.Acquire(soon(t, 20*time.Second), request("x", false))
			if err != nil {
				return err
			}
			if g.Token <= last || g.Token > fencing.MaxToken {
				t.Fatalf("token %v after %v, and %v at most", g.Token, last, fencing.MaxToken)
			}
			last = g.Token
			mustRelease(t, d, g)
		}
	}
	for what, d := range map[string]*Driver{"a running driver": d, "a new driver": newDriver(t, server.Addr())} {
		if err := grants(d); !errors.Is(err, backend.ErrMisconfigured) || errors.Is(err, backend.ErrUnknown) ||
			!strings.Contains(err.Error(), "revision") {
			t.Errorf("%s: %v, want ErrMisconfigured that names the revision", what, err)
		}
	}
	if renewal := d.Renew(t.Context(), []backend.Grant{held})[0]; renewal.Err != nil {
		t.Errorf("Renew = %v", renewal.Err)
	}
	mustRelease(t, d, held)
}

// The servers of a cluster restart one after the other with other limits and ticks, under a client with many holds.
// After the last one, and while only some have them, the holds are renewed and tokens rise.
func TestSettingsChangeUnderHolds(t *testing.T) {
	t.Parallel()
	cluster := containers.EtcdCluster(t, containers.AsProcess())
	d := newDriver(t, cluster.Endpoints()...)
	var holds []backend.Grant
	hold := func(name string) {
		t.Helper()
		r := request(name, false)
		r.TTL = 20 * time.Second
		r.Lost = func(loss backend.Loss) { t.Errorf("%s was lost: %v", name, loss.Reason) }
		g, last := mustAcquire(t, d, r), fencing.Token(0)
		if len(holds) > 0 {
			last = holds[len(holds)-1].Token
		}
		if g.Token <= last {
			t.Errorf("token %v after %v", g.Token, last)
		}
		holds = append(holds, g)
	}
	for _, name := range strings.Fields("a b c d e f g h i j") {
		hold(name)
	}
	for i := range containers.Nodes {
		must(t, cluster.Node(i).RestartWith(soon(t, time.Minute), "--max-txn-ops", "4", "--max-request-bytes", "4096",
			"--election-timeout", "1500", "--heartbeat-interval", "150"))
		since := backend.SystemClock().Now()
		eventually(t, "all holds are renewed", func() bool {
			return !slices.ContainsFunc(d.Renew(soon(t, 20*time.Second), holds), func(r backend.Renewal) bool {
				if errors.Is(r.Err, backend.ErrNotHeld) {
					t.Fatalf("Renew = %v", r.Err)
				}
				return r.Err != nil || r.SentAt < since
			})
		})
		hold("after " + string(rune('0'+i)))
	}
	for _, g := range holds {
		mustRelease(t, d, g)
	}
}

// An operator turns authentication on under a client without a user: its renewals are refused with the cause, its hold
// ends no later than it believes, and it is granted nothing.
func TestAuthenticationIsTurnedOn(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d, operator := newDriver(t, server.Addr()), dial(t, server.Addr())
	r := request("x", false)
	r.TTL = 30 * time.Second
	held := mustAcquire(t, d, r)
	ctx := soon(t, time.Minute)
	for _, act := range []func() error{
		func() error { _, err := operator.UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := operator.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := operator.AuthEnable(ctx); return err },
	} {
		must(t, act())
	}
	on := backend.SystemClock().Now()
	eventually(t, "a renewal is refused", func() bool {
		answer := d.Renew(ctx, []backend.Grant{held})[0]
		if answer.Err == nil && answer.SentAt > on {
			t.Fatal("a client without a user has a renewal confirmed")
		}
		return errors.Is(answer.Err, backend.ErrMisconfigured)
	})
	if _, err := d.Acquire(ctx, request("y", false)); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("Acquire = %v, want ErrMisconfigured", err)
	}
	root, err := clientv3.New(clientv3.Config{
		Endpoints: []string{server.Addr()}, Logger: quiet, Username: "root", Password: "secret", DialTimeout: 5 * time.Second,
	})
	must(t, err)
	defer root.Close()
	_, err = root.AuthDisable(ctx)
	must(t, err)
	eventually(t, "it is renewed again", func() bool { return d.Renew(ctx, []backend.Grant{held})[0].Err == nil })
	mustRelease(t, d, held)
}

// The disk of one member reverts to an earlier state. With a member that was down it makes a majority of three: both lack
// changes that the third member has. A running client detects the loss and gives the cluster another token space.
func TestDiskOfOneMemberReverts(t *testing.T) {
	t.Parallel()
	const reverted, behind, knows = 0, 1, 2
	cluster := containers.EtcdCluster(t, containers.AsProcess())
	all := cluster.Endpoints()
	early := mustAcquire(t, newDriver(t, all...), request("before", false))
	ctx := soon(t, 2*time.Minute)
	data, backup := filepath.Join(cluster.Node(reverted).Folder(t), dataDir), filepath.Join(t.TempDir(), "backup")
	must(t, cluster.Node(reverted).Stop(ctx))
	must(t, os.CopyFS(backup, os.DirFS(data)), cluster.Node(reverted).Start(ctx))
	must(t, cluster.Node(behind).Stop(ctx))
	someRevisions(t, cluster.Node(knows).Addr(), 50)
	s := newSurvivorFor(t, time.Minute, all...)
	must(t, cluster.Node(reverted).Stop(ctx), cluster.Node(knows).Stop(ctx))
	replace(t, data, backup)
	var starting sync.WaitGroup
	for _, i := range []int{reverted, behind} {
		starting.Go(func() {
			if err := cluster.Node(i).Start(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	starting.Wait()
	s.wantAllLost(t, "")
	fresh := newDriver(t, all...)
	g := mustAcquire(t, fresh, request("another", false))
	if now := fresh.Describe().TokenSpace; now == "" || now == s.space {
		t.Errorf("the space is %q, want a new one: a driver has noticed the loss", now)
	}
	if g.Token <= early.Token || g.Token >= s.held.Token {
		t.Errorf("token %v, want one between %v, which the disk knew, and %v, which it forgot", g.Token, early.Token,
			s.held.Token)
	}
}

// A member is copied, and both are started. Clients of one of them cannot detect it: both grant the same tokens of one
// space. The doctor reports it, and so does a client that moves from the original to an older copy.
func TestCopiedMember(t *testing.T) {
	t.Parallel()
	original, copied := containers.Etcd(t, containers.AsProcess()), containers.Etcd(t, containers.AsProcess())
	addr, swap := swapped(t, original.Addr())
	mustAcquire(t, newDriver(t, addr), request("before", false))
	ctx := soon(t, time.Minute)
	must(t, original.Stop(ctx), copied.Stop(ctx))
	replace(t, filepath.Join(copied.Folder(t), dataDir), filepath.Join(original.Folder(t), dataDir))
	must(t, original.Start(ctx), copied.Start(ctx))
	someRevisions(t, original.Addr(), 20)
	s := newSurvivorFor(t, time.Minute, addr)
	there, here := newDriver(t, copied.Addr()), newDriver(t, original.Addr())
	twin := mustAcquire(t, there, request("held", false))
	if space := there.Describe().TokenSpace; space != s.space || twin.Token > s.held.Token {
		t.Errorf("the copy grants token %v of %s, the original %v of %s: it is no copy", twin.Token, space, s.held.Token,
			s.space)
	}
	report, err := doctor.Examine(ctx, "etcd://"+original.Addr()+","+copied.Addr())
	must(t, err)
	found := strings.Join(report.Diagnose(), "\n")
	for _, problem := range []string{"are the same server", "2 servers lead at once"} {
		if !strings.Contains(found, problem) {
			t.Errorf("the doctor says %q, want that they %s", found, problem)
		}
	}
	someRevisions(t, original.Addr(), 50)
	mustAcquire(t, here, request("other", false))
	swap(copied.Addr())
	s.wantAllLost(t, "revision")
}
