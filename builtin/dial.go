package builtin

import (
	"cmp"
	"context"
	"errors"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/grpctls"
)

// Stream is a client's end of one connection: a stream of gRPC, or of a server in this process, for Attach. Send and Recv
// may run concurrently, but neither concurrently with itself. Both return an error once the context with which the
// stream was opened has ended; they have no time limits.
type Stream interface {
	// Send takes ownership of the message and returns when there is room for the next one, which may be before it has
	// arrived. io.EOF means that the stream has ended, and that Recv returns the reason.
	Send(*lockpb.ClientMessage) error
	// Recv returns the next message, in the order in which the server sent them. Its error is final.
	Recv() (*lockpb.ServerMessage, error)
	// CloseSend ends the client's messages. The driver does not call it: the server would treat it as the end of the
	// sessions (see Leaving in lock.proto), and Close ends them by separate requests and awaits the answers.
	CloseSend() error
}

// dialer opens a stream to the server at address. The stream ends with ctx, which closes a connection that hangs:
// Send and Recv have no time limits.
type dialer func(ctx context.Context, address string) (Stream, error)

// windowBytes bounds the bytes that a server may send ahead of the reader. A fixed window spares both sides a ping
// with each message, which gRPC would need to measure the connection.
const windowBytes = 4 << 20

// maxReplyBytes bounds one message from the server, far above the messages that servers send.
const maxReplyBytes = 64 << 20

// dialOptions returns the options of every connection over TCP or TLS. They turn off gRPC's retries, proxies, and service
// configuration: the driver itself decides which request to send twice, and which member to ask next.
func dialOptions(o *Options) []grpc.DialOption {
	o = cmp.Or(o, &Options{})
	creds := insecure.NewCredentials()
	if o.TLS != nil {
		creds = grpctls.Credentials(o.TLS)
	}
	dial := o.Dial
	if dial == nil {
		dial = func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", address)
		}
	}
	all := []grpc.DialOption{
		grpc.WithTransportCredentials(creds), grpc.WithContextDialer(dial), grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(), grpc.WithNoProxy(),
		grpc.WithStaticStreamWindowSize(windowBytes), grpc.WithStaticConnWindowSize(windowBytes),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReplyBytes)),
	}
	if o.TokenFile != "" {
		all = append(all, grpc.WithPerRPCCredentials(tokenFile(o.TokenFile)))
	}
	return all
}

// inProcess connects to a server in this process, whatever the address.
func inProcess(connect func(context.Context) Stream) dialer {
	return func(ctx context.Context, _ string) (Stream, error) {
		if stream := connect(ctx); stream != nil {
			return stream, nil
		}
		return nil, errNoStream
	}
}

// errNoStream: the function passed to Attach returned nil.
var errNoStream = errors.New("the server in this process opened no stream")

// networkDialer speaks gRPC over TCP or TLS. Each stream has a separate connection, which ends with ctx: one that hangs is
// closed together with its stream. Options.Dial or the system resolves the name each time, so that a member with a new
// address is found.
func networkDialer(o *Options) dialer {
	options := dialOptions(o)
	return func(ctx context.Context, address string) (Stream, error) {
		cc, err := grpc.NewClient("passthrough:///"+address, options...)
		if err != nil {
			return nil, err
		}
		stream, err := lockpb.NewLockServiceClient(cc).Connect(ctx)
		if err != nil {
			_ = cc.Close()
			return nil, err
		}
		context.AfterFunc(ctx, func() { _ = cc.Close() })
		return stream, nil
	}
}
