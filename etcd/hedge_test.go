package etcd

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
)

// slow delays the first transaction that creates a key of a name, as a slow member does, until pass is closed.
type slow struct {
	name string
	pass chan struct{}

	mu   sync.Mutex // protects the following field
	kept bool
}

func (s *slow) intercept(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
	call grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	txn, ok := request.(*pb.TxnRequest)
	s.mu.Lock()
	keep := ok && !s.kept && creates(txn, dirOf(s.name))
	s.kept = s.kept || keep
	s.mu.Unlock()
	if keep {
		<-s.pass
		ctx = context.WithoutCancel(ctx)
	}
	return call(ctx, method, request, reply, conn, opts...)
}

// creates reports whether a transaction may create a key in a directory.
func creates(txn *pb.TxnRequest, dir string) bool {
	return slices.ContainsFunc(slices.Concat(txn.Success, txn.Failure), func(op *pb.RequestOp) bool {
		put, inner := op.GetRequestPut(), op.GetRequestTxn()
		return put != nil && len(put.Key) > len(dir) && string(put.Key[:len(dir)]) == dir && !put.IgnoreValue ||
			inner != nil && creates(inner, dir)
	})
}

// takeAway deletes the key of a hold, as an administrator may. A forced release leaves a key that keeps the late
// acquire out.
func takeAway(t *testing.T, d *Driver, g backend.Grant) {
	t.Helper()
	if _, err := d.service.client.Delete(t.Context(), dirOf(g.Name), clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
}

// A member delays an acquire, and another member answers its repetition. When the first request is executed, the hold
// has been released, or has been deleted and its holder notified. In neither case does the request close the name,
// although the client holds another name with the same TTL.
func TestLateAcquireClosesNothing(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	const ttl = 4 * time.Second
	for what, end := range map[string]func(t *testing.T, d, other *Driver, g backend.Grant, pass func()){
		"released": func(t *testing.T, d, _ *Driver, g backend.Grant, _ func()) { mustRelease(t, d, g) },
		"taken away": func(t *testing.T, d, other *Driver, g backend.Grant, _ func()) {
			takeAway(t, other, g)
			if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
				t.Fatalf("Renew of a hold that was taken away = %v", err)
			}
		},
		"taken away, and released late": func(t *testing.T, d, other *Driver, g backend.Grant, pass func()) {
			takeAway(t, other, g)
			pass()
			eventually(t, "the late acquire is carried out", func() bool {
				s, err := other.Look(t.Context(), g.Name)
				return err == nil && s.Held
			})
			// The error is nil on a slow machine: the first of two releases, unanswered for half a second, has removed the late
			// key.
			if err := d.Release(t.Context(), g); err != nil && !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("Release of a hold that was taken away = %v", err)
			}
			if s, err := other.Look(t.Context(), g.Name); err != nil || s.Held {
				t.Errorf("after the release there is %+v, %v", s, err)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			name := "late/" + what
			s := &slow{name: name, pass: make(chan struct{})}
			passed := sync.OnceFunc(func() { close(s.pass) })
			t.Cleanup(passed)
			second, err := fault.NewProxy(server.Addr())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = second.Close() })
			client, err := clientv3.New(clientv3.Config{
				Endpoints: []string{server.Addr(), second.Addr()}, Logger: zap.NewNop(), DialTimeout: 20 * time.Second,
				DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(s.intercept)},
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = client.Close() })
			d, other := New(client, nil), newDriver(t, server.Addr())
			t.Cleanup(func() { _ = d.Close(context.WithoutCancel(t.Context())) })
			lives := mustAcquire(t, d, lasting("lives/"+what, false, ttl))
			g := mustAcquire(t, d, lasting(name, false, ttl))
			end(t, d, other, g, passed)
			passed()
			renewed := make(chan error, 1)
			ctx, stop := context.WithCancel(t.Context())
			go func() { // as the core does
				defer close(renewed)
				for kit.Sleep(ctx, ttl/8) == nil {
					if err := d.Renew(ctx, []backend.Grant{lives})[0].Err; errors.Is(err, backend.ErrNotHeld) {
						renewed <- err
						return
					}
				}
			}()
			for range 3 { // the late acquire may come between any two
				next := mustAcquire(t, other, lasting(name, true, time.Minute))
				mustRelease(t, other, next)
			}
			eventually(t, "nothing is left", func() bool {
				s, err := other.Look(t.Context(), name)
				return err == nil && !s.Held && s.Waiters == 0
			})
			stop()
			if err := <-renewed; err != nil {
				t.Errorf("Renew of another hold: %v", err)
			}
		})
	}
}

// TestRenewalKnowsItsOwnKey: the key of a hold is deleted by an administrator, and the same client is granted the name
// again, under a key of the same name on the same lease. The first holder is notified that it has lost the lock.
func TestRenewalKnowsItsOwnKey(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t).Addr())
	first := mustAcquire(t, d, request("taken", false))
	if err := d.Renew(t.Context(), []backend.Grant{first})[0].Err; err != nil {
		t.Fatal(err)
	}
	takeAway(t, d, first)
	second := mustAcquire(t, d, request("taken", false))
	if err := d.Renew(t.Context(), []backend.Grant{first})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("Renew of the hold that was taken away = %v, want ErrNotHeld", err)
	}
	if err := d.Renew(t.Context(), []backend.Grant{second})[0].Err; err != nil {
		t.Errorf("Renew of the later hold = %v", err)
	}
	mustRelease(t, d, second)
}

// delayed delays the next transaction that only reads keys of a name, until pass is closed.
type delayed struct {
	name  string
	pass  chan struct{}
	armed atomic.Bool
	kept  chan struct{} // has a value when the transaction was delayed
}

func (s *delayed) intercept(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
	call grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	txn, ok := request.(*pb.TxnRequest)
	if ok && slices.ContainsFunc(txn.Success, func(op *pb.RequestOp) bool {
		read := op.GetRequestRange()
		return read != nil && strings.HasPrefix(string(read.Key), dirOf(s.name))
	}) && s.armed.CompareAndSwap(true, false) {
		s.kept <- struct{}{}
		<-s.pass
		ctx = context.WithoutCancel(ctx)
	}
	return call(ctx, method, request, reply, conn, opts...)
}

// A renewal that moves a hold to a shorter session is not answered, and a later one moves the hold to a longer session.
// When the first is answered late, the hold stays where it is.
func TestLateRenewalMovesNothing(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	s := &delayed{name: "moves", pass: make(chan struct{}), kept: make(chan struct{}, 1)}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{server.Addr()}, Logger: zap.NewNop(), DialTimeout: 20 * time.Second,
		DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(s.intercept)},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	d := New(client, nil)
	t.Cleanup(func() { _ = d.Close(context.WithoutCancel(t.Context())) })
	g := mustAcquire(t, d, lasting("moves", false, time.Minute))
	for _, ttl := range []time.Duration{2 * time.Minute, time.Hour} {
		mustAcquire(t, d, lasting("session/"+ttl.String(), false, ttl)) // makes the session
	}
	s.armed.Store(true)
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	short, long := g, g
	short.TTL, long.TTL = 2*time.Minute, time.Hour
	go func() { left <- d.Renew(ctx, []backend.Grant{short})[0].Err }()
	<-s.kept
	leave()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("a renewal without an answer = %v", err)
	}
	if err := d.Renew(t.Context(), []backend.Grant{long})[0].Err; err != nil {
		t.Fatal(err)
	}
	close(s.pass)
	for until := time.Now().Add(time.Second); time.Now().Before(until); {
		keys, err := client.Get(t.Context(), dirOf("moves"), clientv3.WithPrefix())
		if err != nil || len(keys.Kvs) != 1 {
			t.Fatalf("%d keys, %v", len(keys.Kvs), err)
		}
		lease, err := client.TimeToLive(t.Context(), clientv3.LeaseID(keys.Kvs[0].Lease))
		if err != nil || lease.GrantedTTL != 3600 {
			t.Fatalf("the hold is on a lease of %d s, %v, want 3600", lease.GrantedTTL, err)
		}
	}
}
