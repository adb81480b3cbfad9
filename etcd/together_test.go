package etcd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
)

// Concurrent callers of one client share transactions. Each gets its own answer, and no transaction has a name twice.
func TestStepsTravelTogether(t *testing.T) {
	t.Parallel()
	for args, server := range map[string]*containers.EtcdServer{
		"": containers.Etcd(t), "--max-txn-ops 9": containers.Etcd(t, containers.Args("--max-txn-ops", "9")),
	} {
		t.Run("server"+args, func(t *testing.T) {
			var txns atomic.Int64
			client, err := clientv3.New(clientv3.Config{
				Endpoints: []string{server.Addr()}, Logger: quiet, DialTimeout: 5 * time.Second,
				DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(func(
					ctx context.Context, method string, request, reply any,
					conn *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption,
				) error {
					if method == "/etcdserverpb.KV/Txn" {
						txns.Add(1)
					}
					return call(ctx, method, request, reply, conn, opts...)
				})},
			})
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			d := New(client, nil)
			defer d.Close(context.WithoutCancel(t.Context()))
			const names, rounds = 64, 10
			var work sync.WaitGroup
			for n := range names {
				work.Go(func() {
					c := []use{exclusively(), sharing(), taking(2, 3)}[n%3]
					before := uint64(0)
					for range rounds {
						g, err := d.Acquire(t.Context(), c.asks(fmt.Sprint("name/", n), n%2 == 0))
						if err != nil {
							t.Error(err)
							return
						}
						if g.Token.Order() <= before {
							t.Errorf("token %v after %d", g.Token, before)
						}
						before = g.Token.Order()
						if c.Kind == backend.KindExclusive {
							if _, err := d.Acquire(
								t.Context(), c.asks(g.Name, false),
							); !errors.Is(err, backend.ErrHeld) {
								t.Errorf("a second hold of %s = %v, want ErrHeld", g.Name, err)
							}
						}
						if err := d.Release(t.Context(), g); err != nil {
							t.Error(err)
						}
					}
				})
			}
			work.Wait()
			t.Logf("%d transactions for %d steps", txns.Load(), names*rounds*7/3)
			if args == "" && txns.Load() > names*rounds {
				t.Errorf("%d transactions for %d steps: they went alone", txns.Load(), names*rounds*7/3)
			}
		})
	}
}

// A step that the server refuses, or whose comparison fails, does not prevent others.
func TestEachStepAnswersForItself(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t).Addr())
	e, held := d.service, mustAcquire(t, d, request("held", false))
	put := func(key string, lease clientv3.LeaseID) []clientv3.Op {
		return []clientv3.Op{clientv3.OpPut(e.prefix+key, "", clientv3.WithLease(lease))}
	}
	all := e.send([]step{
		{values: t.Context(), grants: true, cmps: []clientv3.Cmp{vacant(e.prefix + "a")}, then: put("a", 0)},
		{
			values: t.Context(), grants: true, cmps: []clientv3.Cmp{vacant(e.spaceKey())}, then: put("b", 0),
			otherwise: []clientv3.Op{clientv3.OpGet(e.spaceKey())},
		},
		{values: t.Context(), grants: true, then: put("c", 4711)},
		{values: t.Context(), cmps: []clientv3.Cmp{d.OwnerCmp(held)}, then: []clientv3.Op{clientv3.OpDelete(d.Key(held))}},
	})
	if a := all[0]; a.err != nil || !a.resp.Succeeded || a.resp.Header.Revision == 0 {
		t.Errorf("the first: %+v", a)
	}
	if a := all[1]; a.err != nil || a.resp.Succeeded || len(a.resp.Responses[0].GetResponseRange().Kvs) != 1 {
		t.Errorf("the one with a comparison that fails: %+v", a)
	}
	if a := all[2]; !isOneOf(a.err, rpctypes.ErrLeaseNotFound) {
		t.Errorf("the one without a lease: %+v", a)
	}
	if a := all[3]; a.err != nil || !a.resp.Succeeded {
		t.Errorf("the release: %+v", a)
	}
}

// In a store with another token space, the driver releases its holds and does nothing else.
func TestStepsInAnotherSpace(t *testing.T) {
	t.Parallel()
	d := newDriver(t, containers.Etcd(t).Addr())
	e, held := d.service, mustAcquire(t, d, request("held", false))
	if _, err := e.client.Delete(t.Context(), e.spaceKey()); err != nil {
		t.Fatal(err)
	}
	all := e.send([]step{
		{values: t.Context(), grants: true, then: []clientv3.Op{clientv3.OpPut(e.prefix+"a", "")}},
		{values: t.Context(), cmps: []clientv3.Cmp{d.OwnerCmp(held)}, then: []clientv3.Op{clientv3.OpDelete(d.Key(held))}},
	})
	if !errors.Is(all[0].err, backend.ErrHistoryLost) {
		t.Errorf("the acquire = %v, want ErrHistoryLost", all[0].err)
	}
	if a := all[1]; a.err != nil || !a.resp.Succeeded {
		t.Errorf("the release: %+v", a)
	}
	if resp, err := e.client.Get(t.Context(), e.prefix+"a"); err != nil || len(resp.Kvs) > 0 {
		t.Errorf("written: %v, %v", resp, err)
	}
}
