package etcd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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
