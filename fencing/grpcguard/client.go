package grpcguard

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/wire"
)

// Key is the metadata of a call: one value for each claim, in the form of httpguard.Header.
const Key = "fencing-claim"

const fromMetadata = "metadata " + Key

// UnaryClient returns an interceptor that puts the claims in a call's context (fencing.NewOutgoingContext) into its
// metadata. A call without claims passes as it is. The error of a refused call wraps both the refusal of
// the service's guard and the status.
func UnaryClient() grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
		options ...grpc.CallOption,
	) error {
		return errorFrom(invoke(outgoing(ctx), method, request, reply, conn, options...))
	}
}

// StreamClient is UnaryClient for streams.
func StreamClient() grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer,
		options ...grpc.CallOption,
	) (grpc.ClientStream, error) {
		stream, err := open(outgoing(ctx), desc, conn, method, options...)
		if err != nil {
			return nil, errorFrom(err)
		}
		return refusable{stream}, nil
	}
}

// refusable is a stream that converts the errors of refusals. Errors of SendMsg are not converted: gRPC gives the
// status to RecvMsg.
type refusable struct{ grpc.ClientStream }

func (s refusable) RecvMsg(m any) error { return errorFrom(s.ClientStream.RecvMsg(m)) }

func (s refusable) Header() (metadata.MD, error) {
	md, err := s.ClientStream.Header()
	return md, errorFrom(err)
}

func outgoing(ctx context.Context) context.Context {
	claims, ok := fencing.FromOutgoingContext(ctx)
	if !ok {
		return ctx
	}
	md, _ := metadata.FromOutgoingContext(ctx)
	md = md.Copy()
	if md == nil {
		md = metadata.MD{}
	}
	md.Delete(Key)
	for _, c := range claims.List() {
		md.Append(Key, wire.Text(c))
	}
	return metadata.NewOutgoingContext(ctx, md)
}
