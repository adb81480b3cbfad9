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
)

// Resource tells what a call writes to, as the guard knows it. Method is the full name, "/package.Service/Method"; request
// is nil for streams. Empty: the call writes nothing, and passes without a check. An error is answered as it is if it is a
// status, and else with InvalidArgument.
type Resource func(ctx context.Context, method string, request any) (string, error)

// UnaryServer returns an interceptor that reads the claim of each call that writes, asks the guard, and puts the claim into
// the handler's context (fencing.FromContext). Without a guard it asks nobody: the handler does.
//
// A refused call is answered as by Status, one that cannot be understood with InvalidArgument. Where the guard itself fails
// the answer is Unavailable, without a word about the cause, and the handler does not run.
func UnaryServer(guard fencing.Guard, resource Resource) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		ctx, err := admit(ctx, guard, resource, info.FullMethod, request)
		if err != nil {
			return nil, err
		}
		return handler(ctx, request)
	}
}

// StreamServer is UnaryServer for streams. They are checked once, when they begin.
func StreamServer(guard fencing.Guard, resource Resource) grpc.StreamServerInterceptor {
	return func(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx, err := admit(stream.Context(), guard, resource, info.FullMethod, nil)
		if err != nil {
			return err
		}
		return handler(service, claimed{stream, ctx})
	}
}

// claimed is a stream whose context carries the claim.
type claimed struct {
	grpc.ServerStream
	ctx context.Context
}

func (s claimed) Context() context.Context { return s.ctx }

// admit returns the handler's context, or the status to answer with.
func admit(ctx context.Context, guard fencing.Guard, resource Resource, method string, request any) (context.Context, error) {
	name, err := resource(ctx, method, request)
	if err != nil {
		if _, ok := status.FromError(err); ok {
			return nil, err
		}
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if name == "" {
		return ctx, nil
	}
	claim, err := claimFrom(ctx, name)
	if err == nil {
		err = claim.Validate()
	}
	if err != nil {
		return nil, Status(err)
	}
	if guard != nil {
		if err := fencing.Check(ctx, guard, claim); err != nil {
			return nil, failed(ctx, err)
		}
	}
	return fencing.NewContext(ctx, claim), nil
}

// failed is the answer to a check that admitted nothing.
func failed(ctx context.Context, err error) error {
	if _, no := refusal.Of(err); no || errors.Is(err, fencing.ErrInvalid) {
		return Status(err)
	}
	if ctx.Err() != nil {
		return status.FromContextError(ctx.Err()).Err()
	}
	return status.Error(codes.Unavailable, "the fencing guard cannot tell")
}

// claimFrom reads what the client interceptors wrote.
func claimFrom(ctx context.Context, resource string) (fencing.Claim, error) {
	c := fencing.Claim{Resource: resource}
	md, _ := metadata.FromIncomingContext(ctx)
	token, err := single(md, tokenKey)
	if err != nil {
		return c, err
	}
	if token != "" {
		if c.Token, err = fencing.ParseToken(token); err != nil {
			return c, &fencing.InvalidError{
				What: "metadata " + tokenKey, Value: token, Why: "want decimal digits below 1<<63, and an s if not exclusive",
			}
		}
	}
	c.Space, err = single(md, spaceKey)
	return c, err
}

func single(md metadata.MD, key string) (string, error) {
	switch values := md.Get(key); len(values) {
	case 0:
		return "", nil
	case 1:
		return values[0], nil
	default:
		return "", &fencing.InvalidError{What: "metadata " + key, Value: values[1], Why: "it is there more than once"}
	}
}
