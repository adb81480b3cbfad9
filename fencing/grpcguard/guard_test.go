package grpcguard_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/grpcguard"
	"github.com/fencelock/fencelock/fencing/guardtest"
)

const space = "cluster é/1" // nothing that metadata could carry as it is

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	touch  = "/test.Store/Touch"  // the request is the name of the resource
	upload = "/test.Store/Upload" // a stream from the client; it writes to "stream"
	look   = "/test.Store/Look"   // writes nothing
)

func resource(_ context.Context, method string, request any) ([]string, error) {
	switch method {
	case touch:
		return []string{request.(*wrapperspb.StringValue).GetValue()}, nil
	case upload:
		return []string{"stream"}, nil
	}
	return nil, nil
}

// service serves the three methods. Touch and Upload want a claim in their context.
func service(t *testing.T, guard fencing.Guard) string {
	claimed := func(ctx context.Context) error {
		if c, ok := fencing.FromIncomingContext(ctx); !ok || c.List()[0].Resource == "" {
			return status.Error(codes.Internal, "the handler finds no claim")
		}
		return nil
	}
	unary := func(method string, handle func(context.Context) error) grpc.MethodDesc {
		return grpc.MethodDesc{
			MethodName: strings.TrimPrefix(method, "/test.Store/"),
			Handler: func(srv any, ctx context.Context, decode func(any) error,
				interceptor grpc.UnaryServerInterceptor) (any, error) {
				var request wrapperspb.StringValue
				if err := decode(&request); err != nil {
					return nil, err
				}
				return interceptor(ctx, &request, &grpc.UnaryServerInfo{FullMethod: method},
					func(ctx context.Context, _ any) (any, error) {
						return &emptypb.Empty{}, handle(ctx)
					})
			},
		}
	}
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(grpcguard.UnaryServer(guard, resource)),
		grpc.ChainStreamInterceptor(grpcguard.StreamServer(guard, resource)))
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "test.Store",
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{unary(touch, claimed), unary(look, func(context.Context) error { return nil })},
		Streams: []grpc.StreamDesc{{StreamName: "Upload", ClientStreams: true,
			Handler: func(_ any, stream grpc.ServerStream) error {
				if err := claimed(stream.Context()); err != nil {
					return err
				}
				for {
					var part wrapperspb.StringValue
					if err := stream.RecvMsg(&part); errors.Is(err, io.EOF) {
						return stream.SendMsg(&emptypb.Empty{})
					} else if err != nil {
						return err
					}
				}
			}}},
	}, struct{}{})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return listener.Addr().String()
}

func dial(addr string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUnaryInterceptor(grpcguard.UnaryClient()), grpc.WithStreamInterceptor(grpcguard.StreamClient()))
}

func connect(t *testing.T, addr string) *grpc.ClientConn {
	t.Helper()
	conn, err := dial(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestInterceptors(t *testing.T) {
	guardtest.Run(t, guardtest.Harness{
		Address: service(t, new(fencing.Memory)), Space: space, Volatile: true,
		Open: func(_ context.Context, addr string) (*guardtest.Client, error) {
			conn, err := dial(addr)
			if err != nil {
				return nil, err
			}
			return &guardtest.Client{
				Check: func(ctx context.Context, c fencing.Claim) error {
					sent := c
					sent.Resource = "" // the service knows it
					call := fencing.NewOutgoingContext(ctx, sent)
					err := conn.Invoke(call, touch, wrapperspb.String(c.Resource), &emptypb.Empty{})
					if status.Code(err) == codes.Canceled {
						return errors.Join(err, ctx.Err()) // gRPC does not keep the context's error in the chain
					}
					return err
				},
				Close: conn.Close,
			}, nil
		},
	})
}

func upstream(ctx context.Context, conn *grpc.ClientConn) error {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, upload)
	if err != nil {
		return err
	}
	for range 3 {
		if err := stream.SendMsg(wrapperspb.String("part")); errors.Is(err, io.EOF) {
			break // the server has ended the stream: RecvMsg says why
		} else if err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return stream.RecvMsg(&emptypb.Empty{})
}

func TestStream(t *testing.T) {
	conn := connect(t, service(t, new(fencing.Memory)))
	with := func(token fencing.Token) context.Context {
		return fencing.NewOutgoingContext(t.Context(), fencing.Claim{Token: token})
	}
	if err := upstream(with(34), conn); err != nil {
		t.Fatal(err)
	}
	var stale *fencing.StaleError
	if err := upstream(with(33), conn); !errors.As(err, &stale) ||
		*stale != (fencing.StaleError{Resource: "stream", Token: 33, Highest: 34}) {
		t.Errorf("a stale stream: %v", err)
	}
	if err := upstream(t.Context(), conn); !errors.Is(err, fencing.ErrNoToken) {
		t.Errorf("a stream without a token: %v", err)
	}
}

func TestStatusCarriesTheRefusal(t *testing.T) {
	conn := connect(t, service(t, new(fencing.Memory)))
	for _, token := range []fencing.Token{34, 33} {
		ctx := fencing.NewOutgoingContext(t.Context(), fencing.Claim{Token: token})
		err := conn.Invoke(ctx, touch, wrapperspb.String("a"), &emptypb.Empty{})
		if token == 34 {
			if err != nil {
				t.Fatal(err)
			}
			continue
		}
		s := status.Convert(err)
		if s.Code() != codes.FailedPrecondition || len(s.Details()) != 1 {
			t.Fatalf("status %v, want FailedPrecondition with one detail", s)
		}
		info, _ := s.Details()[0].(*errdetails.ErrorInfo)
		if info.GetReason() != "STALE_TOKEN" || info.GetDomain() != grpcguard.Domain ||
			info.GetMetadata()["highest"] != "34" {
			t.Errorf("detail %v", info)
		}
	}
	if err := conn.Invoke(t.Context(), look, wrapperspb.String("a"), &emptypb.Empty{}); err != nil {
		t.Errorf("a call that writes nothing: %v", err)
	}
}

func TestInvalidClaims(t *testing.T) {
	conn := connect(t, service(t, new(fencing.Memory)))
	for name, pairs := range map[string][]string{
		"no number":              {grpcguard.Key, "seven"},
		"a space twice":          {grpcguard.Key, "7; space=a; space=b"},
		"a space with a newline": {grpcguard.Key, "7; space=%0a"},
	} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), pairs...)
		err := conn.Invoke(ctx, touch, wrapperspb.String("a"), &emptypb.Empty{})
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v, want InvalidArgument", name, err)
		}
	}
	// A claim in the context takes the place of what is there, and leaves the caller's metadata alone.
	ctx := metadata.AppendToOutgoingContext(t.Context(), grpcguard.Key, "seven", "other", "kept")
	ctx = fencing.NewOutgoingContext(ctx, fencing.Claim{Token: 7})
	if err := conn.Invoke(ctx, touch, wrapperspb.String("a"), &emptypb.Empty{}); err != nil {
		t.Errorf("with a claim: %v", err)
	}
	if md, _ := metadata.FromOutgoingContext(ctx); md.Get(grpcguard.Key)[0] != "seven" {
		t.Errorf("the caller's metadata were changed: %v", md)
	}
}

// brokenGuard cannot tell.
type brokenGuard struct{}

func (brokenGuard) Check(context.Context, fencing.Claims) error {
	return errors.New("password=hunter2 refused")
}

func TestFailingGuardAdmitsNoWrite(t *testing.T) {
	conn := connect(t, service(t, brokenGuard{}))
	ctx := fencing.NewOutgoingContext(t.Context(), fencing.Claim{Token: 7})
	err := conn.Invoke(ctx, touch, wrapperspb.String("a"), &emptypb.Empty{})
	if status.Code(err) != codes.Unavailable || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("%v, want Unavailable without the cause", err)
	}
	other := errors.New("other")
	if got := grpcguard.Status(other); !errors.Is(got, other) || got.Error() != "other" {
		t.Error("Status changed an error that is no refusal")
	}
}

// The same write again reaches the handler, which may have failed: only the step that writes records a sequence.
func TestFailedWriteIsTriedAgain(t *testing.T) {
	conn := connect(t, service(t, new(fencing.Memory)))
	ctx := fencing.NewOutgoingContext(t.Context(), fencing.Claim{Token: 34}.At(1))
	for range 2 {
		if err := conn.Invoke(ctx, touch, wrapperspb.String("a"), &emptypb.Empty{}); err != nil {
			t.Errorf("write 1: %v", err)
		}
		if err := upstream(ctx, conn); err != nil {
			t.Errorf("write 1 as a stream: %v", err)
		}
	}
}
