package grpcguard

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/refusal"
	"github.com/fencelock/fencelock/fencing/internal/wire"
)

// Resources returns the resources that a call writes, by the guard's names. method is the full name,
// "/package.Service/Method"; request is nil for streams. Without resources the call passes without a check. An error
// is returned to the client unchanged if it is a status, and otherwise as InvalidArgument.
type Resources func(ctx context.Context, method string, request any) ([]string, error)

// UnaryServer returns an interceptor that reads the claims of each call that writes, asks the guard, and puts them into
// the handler's context (fencing.FromIncomingContext). Without a guard the handler has to check.
//
// A refused call returns the error of Status, a malformed one InvalidArgument. If the guard itself fails the error is
// Unavailable, without the cause, and the handler does not run.
func UnaryServer(guard fencing.Guard, resources Resources) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		ctx, err := admit(ctx, guard, resources, info.FullMethod, request)
		if err != nil {
			return nil, err
		}
		return handler(ctx, request)
	}
}

// StreamServer is UnaryServer for streams. They are checked once, when they begin.
func StreamServer(guard fencing.Guard, resources Resources) grpc.StreamServerInterceptor {
	return func(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx, err := admit(stream.Context(), guard, resources, info.FullMethod, nil)
		if err != nil {
			return err
		}
		return handler(service, claimed{stream, ctx})
	}
}

// claimed is a stream with the claim in its context.
type claimed struct {
	grpc.ServerStream
	ctx context.Context
}

func (s claimed) Context() context.Context { return s.ctx }

// admit returns the handler's context, or the status to answer with.
func admit(ctx context.Context, guard fencing.Guard, resources Resources, method string,
	request any) (context.Context, error) {
	names, err := resources(ctx, method, request)
	if err != nil {
		if _, ok := status.FromError(err); ok {
			return nil, err
		}
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if len(names) == 0 {
		return ctx, nil
	}
	claims, err := ClaimsFrom(ctx, names...)
	if err != nil {
		return nil, Status(err)
	}
	if guard != nil {
		if err := guard.Check(ctx, fencing.Unordered(claims)); err != nil {
			return nil, failed(ctx, err)
		}
	}
	return fencing.NewIncomingContext(ctx, claims), nil
}

// failed returns the status for a failed check.
func failed(ctx context.Context, err error) error {
	if _, no := refusal.Of(err); no || errors.Is(err, fencing.ErrInvalid) {
		return Status(err)
	}
	if ctx.Err() != nil {
		return status.FromContextError(ctx.Err()).Err()
	}
	return status.Error(codes.Unavailable, "the fencing guard cannot decide")
}

// ClaimsFrom reads the claims of a call being served, for the resources that it writes to, as httpguard.ClaimsFrom
// does; for handlers that receive them late, for example from the messages of a stream.
func ClaimsFrom(ctx context.Context, resources ...string) (fencing.Set, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	claims, err := wire.Read(fromMetadata, md.Get(Key))
	if err != nil {
		return nil, err
	}
	return wire.Match(fromMetadata, claims, resources)
}
