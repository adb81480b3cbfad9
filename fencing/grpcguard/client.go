package grpcguard

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/fencelock/fencelock/fencing"
)

// The metadata of a call. A space may be any text, so its key is one of binary values.
const (
	tokenKey = "fencing-token"
	spaceKey = "fencing-token-space-bin"
)

// UnaryClient returns an interceptor that puts the claim in a call's context (fencing.NewContext) into its metadata; the
// claim's resource stays behind, since the service says what is written to. A call without a claim passes as it is. An
// error that tells of a refusal is that of the service's guard as well as a status.
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
		return told{stream}, nil
	}
}

// told is a stream whose errors tell of refusals. Those of SendMsg do not: gRPC gives the status to RecvMsg.
type told struct{ grpc.ClientStream }

func (s told) RecvMsg(m any) error { return errorFrom(s.ClientStream.RecvMsg(m)) }

func (s told) Header() (metadata.MD, error) {
	md, err := s.ClientStream.Header()
	return md, errorFrom(err)
}

func outgoing(ctx context.Context) context.Context {
	c, ok := fencing.FromContext(ctx)
	if !ok {
		return ctx
	}
	md, _ := metadata.FromOutgoingContext(ctx)
	md = md.Copy()
	if md == nil {
		md = metadata.MD{}
	}
	md.Set(tokenKey, c.Token.String())
	delete(md, spaceKey)
	if c.Space != "" {
		md.Set(spaceKey, c.Space)
	}
	return metadata.NewOutgoingContext(ctx, md)
}
