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
)

// A renewal for less leaves the hold where it is, until what was promised before has passed: then it moves.
func TestRenewalForLessCutsNothingShort(t *testing.T) {
	t.Parallel()
	const long, short = 6 * time.Second, 2 * time.Second
	server := containers.Etcd(t)
	d := newDriver(t, server.Addr())
	r := request("x", false)
	r.TTL = long
	g := mustAcquire(t, d, r)
	promised := g.SentAt.Add(long)
	before := leaseOf(t, d, r)
	g.TTL = short
	for {
		renewal := d.Renew(t.Context(), []backend.Grant{g})[0]
		if renewal.Err != nil || renewal.TTL != short {
			t.Fatalf("renewal = %+v", renewal)
		}
		now := leaseOf(t, d, r)
		left, err := d.client.TimeToLive(t.Context(), now)
		if err != nil {
			t.Fatal(err)
		}
		ends := d.clock.Now().Add(time.Duration(left.TTL+1) * time.Second) // whole seconds, rounded down
		if ends < promised {
			t.Fatalf("the key ends %v before what was promised", promised.Sub(ends))
		}
		if now != before {
			break
		}
		if d.clock.Now() > promised.Add(20*time.Second) {
			t.Fatal("the hold never moved to the shorter lease")
		}
		time.Sleep(short / 3) // as the core renews
	}
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

// A server may allow fewer operations in a transaction than is usual. After an election all holds move, in parts that
// fit.
func TestHoldsMoveInPartsThatTheServerAllows(t *testing.T) {
	t.Parallel()
	const holds = 70
	server := containers.Etcd(t, containers.Args("--max-txn-ops", "9"))
	d := newDriver(t, server.Addr())
	grants, rs := make([]backend.Grant, holds), make([]backend.Request, holds)
	for i := range grants {
		rs[i] = request(fmt.Sprint("x", i), false)
		rs[i].TTL = 30 * time.Second
		rs[i].Lost = func(loss backend.Loss) { t.Errorf("lost: %v", loss.Reason) }
		grants[i] = mustAcquire(t, d, rs[i])
	}
	before := leaseOf(t, d, rs[0])
	// As if another member, which may have led since, had granted the lease.
	d.current(30 * time.Second).granter = 0
	if err := server.Restart(t.Context()); err != nil { // which begins another term
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
		return leaseOf(t, d, rs[0]) != before && leaseOf(t, d, rs[holds-1]) != before
	})
	// A hold that is gone keeps no other hold from moving, and its renewal reports the loss.
	if _, err := d.client.Delete(t.Context(), d.Key(grants[3])); err != nil {
		t.Fatal(err)
	}
	for i := range grants {
		grants[i].TTL = time.Minute
	}
	for i, r := range d.Renew(t.Context(), grants) {
		if errors.Is(r.Err, backend.ErrNotHeld) != (i == 3) || r.Err != nil && i != 3 {
			t.Errorf("hold %d: %v", i, r.Err)
		}
	}
}

func TestALearnersAnswerIsRefusedAndTriedElsewhere(t *testing.T) {
	t.Parallel()
	err := rpctypes.ErrGRPCNotSupportedForLearner
	if !refused(err) || !transient(err) || !errors.Is(classOf(err), backend.ErrUnavailable) {
		t.Errorf("refused %v, transient %v, %v", refused(err), transient(err), classOf(err))
	}
}
