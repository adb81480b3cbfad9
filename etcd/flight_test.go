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

// Callers of one client that come at once share transactions; each gets its own answer, and no name is in one twice.
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
