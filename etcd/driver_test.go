package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
)

// dial returns a client of the server at addr.
func dial(t testing.TB, addrs ...string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: addrs, Logger: quiet, DialTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// newDriver returns another driver on the servers at addrs.
func newDriver(t testing.TB, addrs ...string) *Driver {
	t.Helper()
	d := New(dial(t, addrs...), nil)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = d.Close(ctx)
	})
	return d
}

func request(name string, wait bool) backend.Request {
	id := backend.NewRequestID()
	return backend.Request{
		Name: name, Owner: "test", RequestID: id, HoldID: backend.HoldID(id), Fresh: true,
		TTL: 2 * time.Second, Wait: wait,
	}
}

func mustAcquire(t testing.TB, d *Driver, r backend.Request) backend.Grant {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	g, err := d.Acquire(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// acquireLater starts an acquire and waits until it is in the queue.
func acquireLater(t testing.TB, d *Driver, r backend.Request) <-chan outcome {
	t.Helper()
	done := make(chan outcome, 1)
	go func() {
		g, err := d.Acquire(t.Context(), r)
		done <- outcome{g, err}
	}()
	eventually(t, "the waiter stands in the queue", func() bool {
		s, err := d.Look(t.Context(), r.Name)
		return err == nil && slices.ContainsFunc(s.Queue, func(w backend.Waiter) bool { return w.HoldID == r.HoldID })
	})
	return done
}

type outcome struct {
	grant backend.Grant
	err   error
}

// eventually waits for a condition that only the server knows.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("in 60s it did not come true that %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// dirOf returns the prefix of the keys of a name, below the default prefix.
func dirOf(name string) string { return "fencelock/+locks/" + url.PathEscape(name) + "/" }

// keyOf returns the key of a request, or nil.
func keyOf(t testing.TB, d *Driver, r backend.Request) *mvccpb.KeyValue {
	t.Helper()
	resp, err := d.service.client.Get(t.Context(), dirOf(r.Name), clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range resp.Kvs {
		if strings.HasPrefix(string(kv.Value), `{"fencelock":3,"request":"`+r.RequestID+`"`) {
			return kv
		}
	}
	return nil
}

// leaseUnder returns the etcd lease of a request's key.
func leaseUnder(t testing.TB, d *Driver, r backend.Request) clientv3.LeaseID {
	t.Helper()
	kv := keyOf(t, d, r)
	if kv == nil {
		t.Fatalf("the request %s has no key", r.RequestID)
	}
	return clientv3.LeaseID(kv.Lease)
}

// sameKeys returns n drivers whose first choice for the keys of a name is the same.
func sameKeys(t testing.TB, n int, addr string) []*Driver {
	t.Helper()
	client, at := dial(t, addr), map[string][]*Driver{}
	for {
		d := New(client, nil)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			_ = d.Close(ctx)
		})
		key := firstKey(t, d)
		if at[key] = append(at[key], d); len(at[key]) == n {
			return at[key]
		}
	}
}

// firstKey returns the last part of the keys that a driver writes first.
func firstKey(t testing.TB, d *Driver) string {
	t.Helper()
	g := mustAcquire(t, d, request("first/"+backend.NewRequestID(), false))
	defer mustRelease(t, d, g)
	return path.Base(d.Key(g))
}

// The recipe of etcd's client: two mutexes of one session and one name both hold.
func TestOneClientExcludesItself(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d := newDriver(t, server.Addr())
	g := mustAcquire(t, d, request("x", false))
	if _, err := d.Acquire(t.Context(), request("x", false)); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("a second acquire by the same client = %v, want ErrHeld", err)
	}
	if err := d.Release(t.Context(), g); err != nil {
		t.Error(err)
	}

	session, err := concurrency.NewSession(dial(t, server.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	one, two := concurrency.NewMutex(session, "recipe"), concurrency.NewMutex(session, "recipe")
	t.Logf("etcd's recipe: first lock: %v, second lock in the same session: %v",
		one.Lock(t.Context()), two.TryLock(t.Context()))
}

// The recipe unlocks by key name: a repeated unlock deletes the next lock of the same session.
func TestRepeatedReleaseSparesTheNextHold(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d := newDriver(t, server.Addr())
	first := mustAcquire(t, d, request("x", false))
	if err := d.Release(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	second := mustAcquire(t, d, request("x", false))
	if err := d.Release(t.Context(), first); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("the repeated release = %v, want ErrNotHeld", err)
	}
	if r := d.Renew(t.Context(), []backend.Grant{second})[0]; r.Err != nil {
		t.Errorf("the repeated release hit the next hold: %v", r.Err)
	}
	if second.Token <= first.Token {
		t.Errorf("token %v after %v", second.Token, first.Token)
	}
}

// The recipe leaves a phantom in the queue after a wait that timed out while etcd did not answer.
func TestTimedOutWaitLeavesNoPhantom(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	addr, link := server.NewLink(t)
	d, rival := newDriver(t, addr), newDriver(t, server.Addr())
	if err := d.Release(t.Context(), mustAcquire(t, d, request("warm", false))); err != nil {
		t.Fatal(err)
	}
	r := request("x", true)
	link.Hold(fault.Replies) // it is committed, and the answer is lost
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := d.Acquire(ctx, r)
	if !errors.Is(err, backend.ErrUnknown) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the wait = %v, want ErrUnknown and the context's error", err)
	}
	eventually(t, "the key stands", func() bool {
		return keyOf(t, rival, r) != nil
	})
	link.Pass()
	// The sweep of the session may be faster.
	if err := d.Release(t.Context(), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("Release of what the request left: %v", err)
	}
	mustAcquire(t, rival, request("x", false))
}

// The recipe's Lock stays blocked after its context's end when etcd is out of reach.
func TestCancelledWaitReturnsWithoutTheServer(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	addr, link := server.NewLink(t)
	d, holder := newDriver(t, addr), newDriver(t, server.Addr())
	g := mustAcquire(t, holder, request("x", false))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	r := request("x", true)
	go func() {
		_, err := d.Acquire(ctx, r)
		done <- err
	}()
	eventually(t, "it waits", func() bool { return keyOf(t, holder, r) != nil })
	link.Hold(fault.Both)
	began := time.Now()
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the wait = %v, want context.Canceled", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the wait did not return within 10s of its context's end")
	}
	t.Logf("returned %v after the end of its context", time.Since(began))
	link.Pass()
	if err := holder.Release(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	mustAcquire(t, holder, request("x", true)) // the cancelled waiter leaves the queue, or its lease ends
}

// The recipe does not notice that its lease has ended while it waits, and campaigns report a leader whose key was
// deleted.
func TestWaiterWhoseLeaseIsGoneHoldsNothing(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	holder, waiter, rival := newDriver(t, server.Addr()), newDriver(t, server.Addr()), newDriver(t, server.Addr())
	g := mustAcquire(t, holder, request("x", false))
	r := request("x", true)
	done := acquireLater(t, waiter, r)
	behind := request("x", true)
	next := acquireLater(t, rival, behind)

	if _, err := holder.service.client.Revoke(t.Context(), leaseUnder(t, waiter, r)); err != nil {
		t.Fatal(err)
	}
	if err := holder.Release(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	second := <-next
	if second.err != nil {
		t.Fatal(second.err)
	}
	select {
	case o := <-done:
		t.Fatalf("the waiter without a lease got %+v beside the holder %+v", o, second.grant)
	default:
	}
	if err := rival.Release(t.Context(), second.grant); err != nil {
		t.Fatal(err)
	}
	o := <-done // the waiter queued again, on a new lease
	if o.err != nil {
		t.Fatal(o.err)
	}
	if o.grant.Token <= second.grant.Token {
		t.Errorf("token %v after %v", o.grant.Token, second.grant.Token)
	}
	if renewal := waiter.Renew(t.Context(), []backend.Grant{o.grant})[0]; renewal.Err != nil {
		t.Errorf("the new hold: %v", renewal.Err)
	}
}

// An administrator deletes a waiter's key: the waiter queues again.
func TestWaiterWhoseKeyIsDeletedQueuesAgain(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	holder, waiter := newDriver(t, server.Addr()), newDriver(t, server.Addr())
	g := mustAcquire(t, holder, request("x", false))
	r := request("x", true)
	done := acquireLater(t, waiter, r)
	if _, err := holder.service.client.Delete(t.Context(), string(keyOf(t, holder, r).Key)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the waiter stands in the queue again", func() bool { return keyOf(t, holder, r) != nil })
	if err := holder.Release(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	if o := <-done; o.err != nil || o.grant.Token <= g.Token {
		t.Errorf("%+v after token %v", o, g.Token)
	}
}

// The recipe's session reports its end after a rival holds the lock; the test logs the figure for comparison.
func TestLossIsReportedBeforeTheRivalHolds(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // ample: the failure names the step that hangs
	defer cancel()
	await := func(what string, done <-chan struct{}) {
		t.Helper()
		select {
		case <-done:
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, ctx.Err())
		}
	}
	addr, link := server.NewLink(t)
	locks, err := fencelock.ForCorrectness(newDriver(t, addr), &fencelock.Options{TTL: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	lease, err := locks.Acquire(ctx, "x")
	if err != nil {
		t.Fatal(err)
	}
	recipe, err := concurrency.NewSession(dial(t, addr), concurrency.WithTTL(2), concurrency.WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	theirs := concurrency.NewMutex(recipe, "recipe")
	if err := theirs.Lock(ctx); err != nil {
		t.Fatal(err)
	}
	rival := newDriver(t, server.Addr())
	rivalSession, err := concurrency.NewSession(
		dial(t, server.Addr()), concurrency.WithTTL(2), concurrency.WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	defer rivalSession.Close()

	link.Hold(fault.Both)
	var told, heldAt time.Time
	toldDone, recipeDone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(toldDone)
		<-lease.Context().Done()
		told = time.Now()
	}()
	go func() {
		defer close(recipeDone)
		var theirRival time.Time
		both := make(chan struct{})
		go func() {
			defer close(both)
			if err := concurrency.NewMutex(rivalSession, "recipe").Lock(ctx); err == nil {
				theirRival = time.Now()
			}
		}()
		<-recipe.Done()
		late := time.Now()
		<-both
		t.Logf("etcd's recipe told its holder %v after its rival held the lock", late.Sub(theirRival))
	}()
	mustAcquire(t, rival, request("x", true))
	heldAt = time.Now()
	await("the holder is notified", toldDone)
	if !told.Before(heldAt) {
		t.Errorf("the holder was notified %v after the rival held the lock", told.Sub(heldAt))
	}
	t.Logf("the holder was notified %v before the rival held the lock", heldAt.Sub(told))
	// Do not restore the link earlier: a recipe lease that has not expired yet would continue, and its rival would never
	// hold.
	await("the holder by etcd's recipe is notified, and its rival holds", recipeDone)
	link.Pass()
	if lost := (*fencelock.LostError)(nil); !errors.As(context.Cause(lease.Context()), &lost) {
		t.Errorf("cause %v", context.Cause(lease.Context()))
	}
}

func TestExtendMovesToAnotherLease(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d := newDriver(t, server.Addr())
	r := request("x", false)
	g := mustAcquire(t, d, r)
	before := leaseUnder(t, d, r)
	g.TTL = 30 * time.Second
	renewal := d.Renew(t.Context(), []backend.Grant{g})[0]
	if renewal.Err != nil || renewal.TTL != 30*time.Second {
		t.Fatalf("renewal = %+v", renewal)
	}
	if leaseUnder(t, d, r) == before {
		t.Error("the key still stands on the old lease")
	}
	if again := d.Renew(t.Context(), []backend.Grant{g})[0]; again.Err != nil {
		t.Error(again.Err)
	}
	if err := d.Release(t.Context(), g); err != nil {
		t.Error(err)
	}
}

func TestOwnerCmpFencesAnEtcdWrite(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d := newDriver(t, server.Addr())
	g := mustAcquire(t, d, request("x", false))
	write := func(g backend.Grant) bool {
		t.Helper()
		resp, err := d.service.client.Txn(t.Context()).If(d.OwnerCmp(g)).Then(clientv3.OpPut("doc", "v")).Commit()
		if err != nil {
			t.Fatal(err)
		}
		return resp.Succeeded
	}
	if !write(g) {
		t.Error("the holder's write was refused")
	}
	if write(backend.Grant{}) {
		t.Error("a write without a grant was admitted")
	}
	if err := d.Release(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	mustAcquire(t, d, request("x", false))
	if write(g) {
		t.Error("a write under a grant that was released was admitted")
	}
}

func TestWatchReplaysWithReasons(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d := newDriver(t, server.Addr())
	start, err := d.Look(t.Context(), "x")
	if err != nil || start.Held {
		t.Fatalf("Holder of a free name = %+v, %v", start, err)
	}
	first := mustAcquire(t, d, request("x", false))
	waiting := request("x", true)
	done := acquireLater(t, d, waiting)
	if err := d.Release(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	second := (<-done).grant
	if err := d.ForceRelease(t.Context(), backend.ForceRequest{Name: "x", Reason: "pod 7f9c is gone"}); err != nil {
		t.Fatal(err)
	}
	renewal := d.Renew(t.Context(), []backend.Grant{second})[0]
	if notHeld := (*backend.NotHeldError)(nil); !errors.As(renewal.Err, &notHeld) ||
		notHeld.Reason != backend.ReasonForceReleased {
		t.Errorf("the victim's renewal = %v, want force-released", renewal.Err)
	}
	third := newDriver(t, server.Addr())
	r := request("x", false)
	thirdGrant := mustAcquire(t, third, r)
	if _, err := d.service.client.Revoke(t.Context(), leaseUnder(t, third, r)); err != nil {
		t.Fatal(err)
	}

	want := []struct {
		typ    backend.ChangeType
		token  fencing.Token
		reason string
	}{
		{backend.ChangeAcquired, first.Token, ""},
		{backend.ChangeReleased, first.Token, ""},
		{backend.ChangeAcquired, second.Token, ""},
		{backend.ChangeForceReleased, second.Token, "pod 7f9c is gone"},
		{backend.ChangeAcquired, thirdGrant.Token, ""},
		{backend.ChangeExpired, thirdGrant.Token, ""},
	}
	var last uint64
	for e, err := range d.Watch(t.Context(), "x", start.Revision) {
		if err != nil {
			t.Fatal(err)
		}
		w := want[0]
		if e.Type != w.typ || e.Token != w.token || e.Reason != w.reason || e.Name != "x" || e.Revision < last {
			t.Errorf("event %+v, want %+v", e, w)
		}
		last = e.Revision
		if want = want[1:]; len(want) == 0 {
			break
		}
	}

	if _, err := d.service.client.Compact(t.Context(), int64(last)); err != nil {
		t.Fatal(err)
	}
	for _, err := range d.Watch(t.Context(), "x", start.Revision) {
		if !errors.Is(err, backend.ErrCompacted) {
			t.Errorf("a watch since a compacted revision = %v, want ErrCompacted", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, err := range d.Watch(ctx, "x", 0) {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("a watch with an ended context = %v", err)
		}
	}
}

func TestListReadsAllPages(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d := newDriver(t, server.Addr())
	var want []string
	for i := range pageSize/10 + 3 {
		name := fmt.Sprintf("inventory/%04d", i)
		want = append(want, name)
		holder := request(name, false)
		holder.TTL = time.Minute
		mustAcquire(t, d, holder)
		lease := leaseUnder(t, d, holder)
		for n := range 12 { // places in the queue are keys, too
			text := `{"fencelock":3,"request":"` + backend.NewRequestID() + `","owner":"test"}`
			if _, err := d.service.client.Put(
				t.Context(), dirOf(name)+fmt.Sprint("waits", n), text, clientv3.WithLease(lease)); err != nil {
				t.Fatal(err)
			}
		}
	}
	mustAcquire(t, d, request("inventoryx", false))
	mustAcquire(t, d, request("other", false))
	var got []string
	for info, err := range d.List(t.Context(), "inventory/") {
		if err != nil {
			t.Fatal(err)
		}
		if !info.Held || info.Waiters != 12 {
			t.Fatalf("%+v, want a holder and 12 waiters", info)
		}
		got = append(got, info.Name)
	}
	if !slices.Equal(got, want) {
		t.Errorf("listed %d names, want %d", len(got), len(want))
	}
}

func TestIdleSessionIsRevoked(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d := newDriver(t, server.Addr())
	leases := func() int {
		resp, err := d.service.client.Leases(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return len(resp.Leases)
	}
	for range 20 {
		if err := d.Release(t.Context(), mustAcquire(t, d, request("x", false))); err != nil {
			t.Fatal(err)
		}
	}
	if n := leases(); n != 1 {
		t.Errorf("20 acquires made %d leases, want 1", n)
	}
	eventually(t, "the idle lease is revoked", func() bool { return leases() == 0 })
	mustAcquire(t, d, request("x", false))
}
