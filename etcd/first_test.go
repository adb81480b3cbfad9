package etcd

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/fencelock/fencelock/conformance/containers"
)

// Two first calls run concurrently. One reads an empty store, but gets the answer after the other call has planted the
// token space. It must not conclude that the space is gone.
func TestFirstReadMayBeOld(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	var reads atomic.Int64
	read, planted := make(chan struct{}), make(chan struct{})
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{server.Addr()}, Logger: quiet, DialTimeout: 5 * time.Second,
		DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(func(
			ctx context.Context, method string, request, reply any,
			conn *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption,
		) error {
			err := call(ctx, method, request, reply, conn, opts...)
			if method == "/etcdserverpb.KV/Range" && reads.Add(1) == 1 {
				close(read)
				<-planted
			}
			return err
		})},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	d := New(client, nil)
	defer d.Close(context.WithoutCancel(t.Context()))
	early := make(chan error, 1)
	go func() { early <- d.Ping(t.Context()) }()
	<-read
	err = d.Ping(t.Context())
	close(planted)
	if err != nil {
		t.Error(err)
	}
	if err := <-early; err != nil {
		t.Errorf("the call that read first: %v", err)
	}
}
