package etcd

import (
	"context"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// The stream for a session's keepalives. The library's two ways do not fit: KeepAlive itself decides when to send,
// and KeepAliveOnce opens a stream for each keepalive. Here one stream serves the session, and each
// answer belongs to the keepalive that was sent last, because there never is more than one under way.

// keepAlives is that stream. Keepalives are sent one at a time, each answered before the next one is sent. They do
// not use a stream each: with a user and a password a client that is passed to New authenticates for every stream,
// which costs the server a slow hash and the cluster a proposal (TestKeepalivesAuthenticateOnce).
//
// A keepalive without an answer in time ends its stream. So a late answer is never mistaken for a later keepalive's
// (TestSlowKeepaliveTakesItsStreamWithIt). Everything ends with stop, which the session calls when its loop has
// ended.
type keepAlives struct {
	d *Driver
	// Ends with stop, and with Close of the driver. Every stream is opened under it.
	ctx  context.Context
	stop context.CancelFunc

	// turn holds one token while a keepalive is under way, and protects the following fields. It is a channel and not
	// a mutex, so that a waiting caller returns when its context ends.
	turn   chan struct{}
	stream pb.Lease_LeaseKeepAliveClient
	// Not nil while the stream is opened. The result is put into it, once; it is never closed.
	opening chan opened
	cancel  context.CancelFunc // ends stream, or the opening
}

// opened is the result of opening a stream.
type opened struct {
	stream pb.Lease_LeaseKeepAliveClient
	err    error
}

// openTime bounds the opening of a stream. The keepalive that wants it does not: a server that is slow to check a
// password would have to restart for every keepalive.
const openTime = 3 * callTime

// newKeepAlives returns a stream that is opened by the first keepalive. It asks its server to have a leader.
func newKeepAlives(d *Driver) *keepAlives {
	k := &keepAlives{d: d, turn: make(chan struct{}, 1)}
	k.ctx, k.stop = context.WithCancel(clientv3.WithRequireLeader(d.ctx))
	return k
}

// ask sends a keepalive and returns the answer to it. It waits for its turn, and for the answer, until ctx ends. A
// stream that was opened with a token that the server has forgotten is replaced once.
func (k *keepAlives) ask(ctx context.Context, lease clientv3.LeaseID) (*pb.LeaseKeepAliveResponse, error) {
	select {
	case k.turn <- struct{}{}:
		defer func() { <-k.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	answer, err := k.exchange(ctx, lease)
	if isOneOf(err, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision) {
		answer, err = k.exchange(ctx, lease) // on a stream with another token
	}
	return answer, err
}

// open makes sure that there is a stream. If ctx ends first, the next call finds the opening under way: it runs in a
// separate goroutine, counted in at the gate, which ends when the stream stands, openTime has passed, or stop is
// called. Its result waits in a buffered channel, whether anybody receives it or not.
func (k *keepAlives) open(ctx context.Context) error {
	if k.stream != nil {
		return nil
	}
	if k.opening == nil {
		if err := k.d.enter(); err != nil {
			return err
		}
		streamCtx, cancel := context.WithCancel(k.ctx)
		result := make(chan opened, 1)
		k.opening, k.cancel = result, cancel
		// Only openTime and stop end this: a caller that gives up leaves it to the next one.
		go func() {
			defer k.d.gate.Leave()
			defer time.AfterFunc(openTime, cancel).Stop()
			stream, err := pb.NewLeaseClient(k.d.client.ActiveConnection()).LeaseKeepAlive(streamCtx)
			result <- opened{stream, err}
		}()
	}
	select {
	case o := <-k.opening:
		k.opening, k.stream = nil, o.stream
		if o.err != nil {
			k.stream = nil
			k.cancel()
		}
		return o.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// exchange sends one keepalive on the stream and receives its answer. gRPC's streams know no deadline for a single
// message, so the end of ctx ends the stream; so does every error.
func (k *keepAlives) exchange(ctx context.Context, lease clientv3.LeaseID) (*pb.LeaseKeepAliveResponse, error) {
	if err := k.open(ctx); err != nil {
		return nil, err
	}
	// If ctx has ended, cancel may have been called although the answer came: the stream is closed then, whatever the
	// answer.
	inTime := context.AfterFunc(ctx, k.cancel)
	answer, err := k.sendAndReceive(lease)
	if !inTime() || err != nil {
		k.cancel()
		k.stream = nil
	}
	// The stream says that it was cancelled; the reason is the end of ctx.
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	return answer, err
}

// sendAndReceive blocks until the stream has an answer or ends.
func (k *keepAlives) sendAndReceive(lease clientv3.LeaseID) (*pb.LeaseKeepAliveResponse, error) {
	if err := k.stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(lease)}); err != nil {
		// Send only says that the stream has ended; Recv says why.
		if _, why := k.stream.Recv(); why != nil {
			err = why
		}
		return nil, err
	}
	return k.stream.Recv()
}
