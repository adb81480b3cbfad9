package builtin

// How a driver reaches a server: a Stream, over gRPC or within the process. Everything above it knows no transport.

import (
	"cmp"
	"context"
	"errors"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// Stream is a client's end of one connection. Send and Recv may run beside each other, but neither beside itself. Both
// return an error once the context with which the stream was opened has ended; they have no limits of time of their
// own.
//
// A stream of gRPC is one, and so is what a server in this process gives to Attach.
type Stream interface {
	// Send takes the message over and returns when there is room for the next one, which may be before it has arrived.
	// io.EOF says that the stream has ended, and that Recv tells why.
	Send(*lockpb.ClientMessage) error
	// Recv returns the next message, in the order in which the server sent them. Its error is final.
	Recv() (*lockpb.ServerMessage, error)
	// CloseSend says that nothing more is sent. The driver does not call it: the server would take it for the end of
	// the sessions (see Leaving in lock.proto), and Close ends them by requests of their own, whose answers it awaits.
	CloseSend() error
}

// dialer opens a stream to the server at address. The stream ends with ctx, which is how a connection that hangs is
// given up: Send and Recv have no time limits of their own.
type dialer func(ctx context.Context, address string) (Stream, error)

// windowBytes is how much a server may send ahead of the reader. That it is fixed spares both sides a ping with each
// message: gRPC would measure the connection with them.
const windowBytes = 4 << 20

// maxReplyBytes bounds one message from the server: far above what servers send, and not without bound.
const maxReplyBytes = 64 << 20

// dialOptions are those of every connection over TCP or TLS.
//
// Nothing tries again behind the driver's back, and no proxy or setting from elsewhere comes between: the driver knows
// which request may be sent twice, and which member is to be asked next.
func dialOptions(o *Options) []grpc.DialOption {
	o = cmp.Or(o, &Options{})
	creds := insecure.NewCredentials()
	if o.TLS != nil {
		creds = credentials.NewTLS(o.TLS)
	}
	dial := o.Dial
	if dial == nil {
		dial = func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", address)
		}
	}
	return []grpc.DialOption{
		grpc.WithTransportCredentials(creds), grpc.WithContextDialer(dial), grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(), grpc.WithNoProxy(),
		grpc.WithStaticStreamWindowSize(windowBytes), grpc.WithStaticConnWindowSize(windowBytes),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReplyBytes)),
	}
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

// errNoStream: the function given to Attach returned nil.
var errNoStream = errors.New("the server in this process gives no stream")

// networkDialer speaks gRPC over TCP or TLS. Each stream has a connection of its own: a connection that hangs is given
// up together with its stream.
//
// What is opened is closed when ctx ends, and by nothing else: the hook on ctx costs no goroutine until then. The name
// is resolved each time, by Options.Dial or the system, so that a member that moves with its name is found.
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
