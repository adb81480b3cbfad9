package etcd

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
)

// TestLateMoveTakesNothingBack: a transaction that moves a key to a lease runs when the key is already on the next
// lease, and its owner relies on that one. The transaction changes nothing.
func TestLateMoveTakesNothingBack(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	for what, wait := range map[string]bool{"of a hold": false, "of a waiter": true} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			const ttl = 30 * time.Second
			var mu sync.Mutex // protects the following variables
			var d *Driver
			var key string
			var deliver func() error
			client, err := clientv3.New(clientv3.Config{
				Endpoints: []string{server.Addr()}, Logger: quiet, DialTimeout: 20 * time.Second,
				DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(func(
					ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
					call grpc.UnaryInvoker, opts ...grpc.CallOption,
				) error {
					mu.Lock()
					txn, ok := request.(*pb.TxnRequest)
					late := ok && key != "" && deliver == nil && movesKey(txn, key)
					if late {
						deliver = func() error {
							return call(context.WithoutCancel(ctx), method, request, &pb.TxnResponse{}, conn, opts...)
						}
					}
					mu.Unlock()
					if late {
						d.outgrow(d.current(ttl)) // the next one goes to another lease
						return status.Error(codes.Unavailable, "the answer got lost")
					}
					return call(ctx, method, request, reply, conn, opts...)
				})},
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = client.Close() })
			d = New(client, nil)
			t.Cleanup(func() { _ = d.Close(context.WithoutCancel(t.Context())) })

			r := request("moved "+what, wait)
			r.TTL = ttl
			r.Lost = func(loss backend.Loss) { t.Errorf("the hold was lost: %v", loss.Reason) }
			var g backend.Grant
			begin := func() {
				own := string(keyOf(t, d, r).Key)
				mu.Lock()
				key = own
				mu.Unlock()
				d.outgrow(d.current(ttl))
			}
			if wait {
				before := request(r.Name, false)
				before.TTL = ttl
				first := mustAcquire(t, d, before)
				waiter := acquireLater(t, d, r)
				mustWait(t, "the waiter", waiter)
				begin()
				eventually(t, "the waiter has moved twice", func() bool { return moved(t, d, r, &mu, &deliver) })
				mustRelease(t, d, first)
				g = mustGet(t, waiter)
			} else {
				g = mustAcquire(t, d, r)
				begin()
				eventually(t, "the hold has moved twice", func() bool {
					return d.Renew(t.Context(), []backend.Grant{g})[0].Err == nil && moved(t, d, r, &mu, &deliver)
				})
			}
			if err := deliver(); err != nil {
				t.Fatal(err)
			}
			if lease, want := leaseUnder(t, d, r), d.currentLease(ttl); lease != want {
				t.Errorf("the key stands on the lease %x, and its holder believes in %x", lease, want)
			}
			if renewal := d.Renew(t.Context(), []backend.Grant{g})[0]; renewal.Err != nil {
				t.Errorf("Renew = %v", renewal.Err)
			}
			mustRelease(t, d, g)
		})
	}
}

// current is the session for a TTL.
func (d *Driver) current(ttl time.Duration) *session {
	s, _ := d.sessions.Find(ttl)
	return s
}

func (d *Driver) currentLease(ttl time.Duration) clientv3.LeaseID {
	s := d.current(ttl)
	if s == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.id
}

// moved reports whether a key stands on the current lease, after a transaction was held back.
func moved(t *testing.T, d *Driver, r backend.Request, mu *sync.Mutex, deliver *func() error) bool {
	mu.Lock()
	late := *deliver != nil
	mu.Unlock()
	return late && leaseUnder(t, d, r) == d.currentLease(r.TTL)
}

// movesKey reports whether a transaction writes a key that stands.
func movesKey(txn *pb.TxnRequest, key string) bool {
	if slices.ContainsFunc(txn.Compare, func(c *pb.Compare) bool {
		return string(c.Key) == key && (c.Target != pb.Compare_CREATE || c.GetCreateRevision() != 0)
	}) {
		return slices.ContainsFunc(txn.Success, func(op *pb.RequestOp) bool { return op.GetRequestPut() != nil })
	}
	return slices.ContainsFunc(slices.Concat(txn.Success, txn.Failure), func(op *pb.RequestOp) bool {
		inner := op.GetRequestTxn()
		return inner != nil && movesKey(inner, key)
	})
}
