package etcd

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
)

// Tests of mechanisms of this driver that no call shows.

func fly(d *Driver, together ...*flight) {
	for _, f := range together {
		f.values = d.ctx
	}
	d.commitTogether(together)
}

// A step that the server refuses, or whose comparison fails, keeps no other from being done.
func TestEachStepAnswersForItself(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t).Addr())
	held := mustAcquire(t, d, request("held", false))
	put := func(key string, lease clientv3.LeaseID) []clientv3.Op {
		return []clientv3.Op{clientv3.OpPut(d.prefix+key, "", clientv3.WithLease(lease))}
	}
	good := &flight{name: "a", here: true, cmps: []clientv3.Cmp{vacant(d.prefix + "a")}, then: put("a", 0)}
	fails := &flight{name: "b", here: true, cmps: []clientv3.Cmp{vacant(d.spaceKey())}, then: put("b", 0),
		otherwise: []clientv3.Op{clientv3.OpGet(d.spaceKey())}}
	refusedOne := &flight{name: "c", here: true, then: put("c", 4711)}
	leaves := &flight{
		name: "held", cmps: []clientv3.Cmp{d.OwnerCmp(held)}, then: []clientv3.Op{clientv3.OpDelete(d.Key(held))},
	}
	fly(d, good, fails, refusedOne, leaves)
	if good.err != nil || !good.resp.Succeeded || good.resp.Header.Revision == 0 {
		t.Errorf("the first: %v, %v", good.resp, good.err)
	}
	if fails.err != nil || fails.resp.Succeeded || len(fails.resp.Responses[0].GetResponseRange().Kvs) != 1 {
		t.Errorf("the one whose comparison fails: %v, %v", fails.resp, fails.err)
	}
	if !isOneOf(refusedOne.err, rpctypes.ErrLeaseNotFound) {
		t.Errorf("the one without a lease: %v, %v", refusedOne.resp, refusedOne.err)
	}
	if leaves.err != nil || !leaves.resp.Succeeded {
		t.Errorf("the release: %v, %v", leaves.resp, leaves.err)
	}
}

// In a store with another token space, the driver releases its holds and does nothing else.
func TestStepsInAnotherSpace(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t).Addr())
	held := mustAcquire(t, d, request("held", false))
	if _, err := d.client.Delete(t.Context(), d.spaceKey()); err != nil {
		t.Fatal(err)
	}
	acquires := &flight{name: "a", here: true, then: []clientv3.Op{clientv3.OpPut(d.prefix+"a", "")}}
	leaves := &flight{
		name: "held", cmps: []clientv3.Cmp{d.OwnerCmp(held)}, then: []clientv3.Op{clientv3.OpDelete(d.Key(held))},
	}
	fly(d, acquires, leaves)
	if !errors.Is(acquires.err, backend.ErrHistoryLost) {
		t.Errorf("the acquire = %v, want ErrHistoryLost", acquires.err)
	}
	if leaves.err != nil || !leaves.resp.Succeeded {
		t.Errorf("the release: %v, %v", leaves.resp, leaves.err)
	}
	if resp, err := d.client.Get(t.Context(), d.prefix+"a"); err != nil || len(resp.Kvs) > 0 {
		t.Errorf("written: %v, %v", resp, err)
	}
}

// What waits for others goes in order, one of each name; what nobody waits for any more does not go.
func TestDepartures(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t).Addr())
	if err := d.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	d.departures.under++ // as if one were under way
	d.departures.under++
	var flights []*flight
	for i, name := range []string{"a", "b", "a", "c", "b"} {
		f := &flight{
			name: name, values: t.Context(), then: []clientv3.Op{clientv3.OpPut(fmt.Sprint("departure/", i), "")},
		}
		if err := d.send(f); err != nil {
			t.Fatal(err)
		}
		flights = append(flights, f)
	}
	if !d.withdraw(flights[3]) || d.withdraw(flights[3]) || !errors.Is(flights[3].err, errUnsent) {
		t.Errorf("withdrawn: %v", flights[3].err)
	}
	d.arrived()
	d.arrived()
	at := map[int]int64{}
	for i, f := range flights {
		if <-f.done; i != 3 {
			at[i] = f.resp.Header.Revision
		}
	}
	if at[0] != at[1] || at[2] != at[4] || at[2] <= at[0] {
		t.Errorf("the revisions are %v", at)
	}
	if resp, err := d.client.Get(t.Context(), "departure/3"); err != nil || len(resp.Kvs) > 0 {
		t.Errorf("what was withdrawn was sent: %v, %v", resp, err)
	}
}

// The key of a transaction that was not answered gets no other request: it may yet be written.
func TestKeyInDoubtIsNotUsedAgain(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	addr, link := server.NewLink(t)
	d := newDriver(t, addr)
	held := request("held", false)
	held.TTL = time.Minute
	mustAcquire(t, d, held)
	r := request("x", false)
	r.TTL = time.Minute
	link.Hold(fault.Replies)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := d.Acquire(ctx, r); !errors.Is(err, backend.ErrUnknown) {
		t.Fatalf("Acquire = %v, want ErrUnknown", err)
	}
	key := d.Key(r.Grant())
	eventually(t, "the transaction has ended", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.places[key].doubts) == 1
	})
	link.Pass()
	// The sweep may have been faster.
	if err := d.Release(t.Context(), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("Release = %v", err)
	}
	next := request("x", true)
	next.TTL = time.Minute
	if g := mustAcquire(t, d, next); d.Key(g) == key {
		t.Error("the next request got the same key")
	}
	s := d.current(time.Minute)
	if _, err := d.client.Revoke(t.Context(), s.id); err != nil {
		t.Fatal(err)
	}
	s.end(backend.ReasonSessionExpired)
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.places) != 0 || len(d.requests) != 0 {
		t.Errorf("without the lease the driver keeps %v, %v", d.places, d.requests)
	}
}

// An abandoned request may have left nothing. The removal that looks for it then ends, and does not run until the
// driver closes.
func TestRemovalOfNothingEnds(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t).Addr())
	a := d.attempt([]backend.Request{request("nothing", true)})
	d.remove(a.wishes)
	d.endCall(a.wishes[0].key)
	eventually(t, "nobody needs the key", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.places) == 0
	})
}

// A renewal moves a hold, and its answer comes after the release of the hold: nothing may stay behind in the driver.
func TestRenewalThatIsOvertakenByAReleaseLeavesNothing(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	var held atomic.Pointer[chan struct{}] // until it is closed, moves are done and not answered
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{server.Addr()}, Logger: quiet, DialTimeout: 5 * time.Second,
		DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(func(
			ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
			call grpc.UnaryInvoker, opts ...grpc.CallOption,
		) error {
			err := call(ctx, method, request, reply, conn, opts...)
			if txn, ok := request.(*pb.TxnRequest); ok && len(txn.Success) > 0 &&
				txn.Success[0].GetRequestPut() != nil {
				if until := held.Load(); until != nil {
					<-*until
				}
			}
			return err
		})},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	d, other := New(client, nil), newDriver(t, server.Addr())
	defer d.Close(context.WithoutCancel(t.Context()))
	for name, of := range map[string]*Driver{"own": d, "of another driver": other} {
		t.Run(name, func(t *testing.T) {
			r := request(name, false)
			g := mustAcquire(t, of, r)
			moved := g
			moved.TTL = 30 * time.Second
			mustAcquire(t, d,
				func() backend.Request { r := request("warm "+name, false); r.TTL = moved.TTL; return r }())
			watch := other.client.Watch(t.Context(), d.Key(g))
			answered := make(chan struct{})
			held.Store(&answered)
			done := make(chan backend.Renewal, 1)
			go func() { done <- d.Renew(t.Context(), []backend.Grant{moved})[0] }()
			if e := (<-watch).Events[0]; e.Type != mvccpb.PUT || clientv3.LeaseID(e.Kv.Lease) == clientv3.LeaseID(0) {
				t.Fatalf("%+v", e)
			}
			// The move succeeds, but its answer is late. Meanwhile the driver releases the hold.
			released := make(chan error, 1)
			go func() { released <- d.Release(t.Context(), g) }()
			if e := (<-watch).Events[0]; e.Type != mvccpb.DELETE {
				t.Fatalf("%+v", e)
			}
			d.dropHold(d.Key(g), d.hold(d.Key(g), g))
			close(answered)
			held.Store(nil)
			<-done
			if err := <-released; err != nil {
				t.Errorf("Release = %v", err)
			}
			if h := d.hold(d.Key(g), g); h != nil {
				t.Errorf("the driver keeps %+v", h)
			}
		})
	}
}

func TestALearnersAnswerIsRefusedAndTriedElsewhere(t *testing.T) {
	t.Parallel()
	err := rpctypes.ErrGRPCNotSupportedForLearner
	if !refused(err) || !transient(err) || !errors.Is(classOf(err), backend.ErrUnavailable) {
		t.Errorf("refused %v, transient %v, %v", refused(err), transient(err), classOf(err))
	}
}

// TestLateDeleteSparesTheSameRequestSentAgain: the same request, sent again, overtakes a delete by request id. The
// delete must not remove what the second request got.
func TestLateDeleteSparesTheSameRequestSentAgain(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t).Addr())
	r := request("again", false)
	first := mustAcquire(t, d, r)
	r.Fresh = false
	reads := 0
	err := d.deleteAsRead(t.Context(), d.Key(r.Grant()), func(*mvccpb.KeyValue) bool {
		if reads++; reads == 1 {
			if again := mustAcquire(t, d, r); again.Token != first.Token {
				t.Errorf("sent again it has token %v, not %v", again.Token, first.Token)
			}
			return true
		}
		return false
	})
	if !errors.Is(err, backend.ErrNotHeld) || reads != 2 {
		t.Errorf("the delete = %v after %d readings", err, reads)
	}
	if renewed := d.Renew(t.Context(), []backend.Grant{first})[0]; renewed.Err != nil {
		t.Errorf("the lock is gone: %v", renewed.Err)
	}
}

// TestSlowKeepaliveTakesItsStreamWithIt: a late answer is not taken for that to a later keepalive.
func TestSlowKeepaliveTakesItsStreamWithIt(t *testing.T) {
	t.Parallel()
	addr, link := containers.Etcd(t).NewLink(t)
	d := newDriver(t, addr)
	r := request("x", false)
	r.TTL = 30 * time.Second
	mustAcquire(t, d, r)
	s := d.current(r.TTL)
	ask := func(within time.Duration) (any, error) {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		return s.keepAlives.ask(ctx, s.id)
	}
	if _, err := ask(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	first := s.keepAlives.stream
	link.Hold(fault.Replies)
	if answer, err := ask(200 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a keepalive whose answer is held back = %v, %v", answer, err)
	}
	link.Pass()
	if _, err := ask(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	if s.keepAlives.stream == first {
		t.Error("the stream is the one on which an answer is still owed")
	}
	if _, err := first.Recv(); err == nil {
		t.Error("the late answer can be read")
	}
}

// TestLateReaderIsSweptAway: what a late request of a reader left is swept away.
func TestLateReaderIsSweptAway(t *testing.T) {
	t.Parallel()
	addr := containers.Etcd(t).Addr()
	one, two := newDriver(t, addr), newDriver(t, addr)
	const name = "late"
	mustAcquire(t, one, exclusively().asks("keeps the lease", false))
	late := sharing().asks(name, false)
	s, err := one.sessionFor(t.Context(), late.TTL)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Leave(1)
	mustPut(t, one, late, "late", s.id)
	s.doubt()
	mustAcquire(t, two, exclusively().asks(name, true))
}

// mustPut writes the key of a request, as a transaction does that nobody waits for any more.
func mustPut(t testing.TB, d *Driver, r backend.Request, station string, lease clientv3.LeaseID) {
	t.Helper()
	c := use{r.Kind, r.Permits, r.Limit}
	w := wish{r: r, use: c, dir: d.dir(r.Name), key: d.dir(r.Name) + c.part() + station}
	if _, err := d.client.Do(t.Context(), w.put(lease)); err != nil {
		t.Fatal(err)
	}
}
