package server

// The socket for clients: gRPC, its bounds and keepalives, and the health of this member.

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

const (
	// maxMessage bounds a message of a client, in bytes.
	maxMessage = 4 << 20
	// The server pings a client after clientSilence without a message, and closes the connection after clientAnswer
	// without an answer.
	clientSilence = 10 * time.Second
	clientAnswer  = 5 * time.Second
	// clientPings is the minimum interval between a client's pings.
	clientPings = time.Second
	// streamsPerConn bounds the open calls of one connection; the client library queues further calls.
	streamsPerConn = 100
)

// clientSocket is the socket for clients: the lock service, and the reading calls of the service for operators, over
// gRPC, with the standard services for health and reflection.
type clientSocket struct {
	lockpb.UnimplementedLockServiceServer
	server   *Server
	listener net.Listener
	grpc     *grpc.Server
	health   *health.Server
	stopped  chan struct{} // closed when Serve has returned
}

func (s *Server) openFront(ctx context.Context) (*clientSocket, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.config.Listen)
	if err != nil {
		return nil, fmt.Errorf("for clients: %w", err)
	}
	if s.advertise = s.config.Advertise; s.advertise == "" {
		s.advertise = addressOf(s.config.Listen, listener)
	}
	listener = s.gate.Admit(listener, s.connections(), "clients")
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxConcurrentStreams(streamsPerConn),
		// Fixed windows spare a ping with each message, which gRPC would need to measure the connection.
		grpc.StaticStreamWindowSize(maxMessage), grpc.StaticConnWindowSize(maxMessage),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: clientSilence, Timeout: clientAnswer}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: clientPings, PermitWithoutStream: true}),
		grpc.ChainUnaryInterceptor(withoutBrowsers, s.withToken, s.withoutChanges),
		grpc.ChainStreamInterceptor(streamWithoutBrowsers, s.streamWithToken, s.streamWithoutChanges),
	}
	if s.config.TLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(s.config.TLS)))
	}
	f := &clientSocket{
		server: s, listener: listener, grpc: grpc.NewServer(options...), health: health.NewServer(),
		stopped: make(chan struct{}),
	}
	lockpb.RegisterLockServiceServer(f.grpc, f)
	lockpb.RegisterAdminServiceServer(f.grpc, &admin{server: s, looking: make(chan struct{}, 1)}) // without changes
	grpc_health_v1.RegisterHealthServer(f.grpc, f.health)
	reflection.Register(f.grpc)
	f.leads(false)
	return f, nil
}

func withoutBrowsers(ctx context.Context, in any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := refuseBrowsers(ctx); err != nil {
		return nil, err
	}
	return next(ctx, in)
}

func streamWithoutBrowsers(
	server any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler,
) error {
	if err := refuseBrowsers(s.Context()); err != nil {
		return err
	}
	return next(server, s)
}

func (s *Server) withoutChanges(ctx context.Context, in any, call *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := s.refuseClients(ctx, call.FullMethod); err != nil {
		s.auditCall(ctx, call.FullMethod, in, err)
		return nil, err
	}
	return next(ctx, in)
}

func (s *Server) streamWithoutChanges(
	server any, stream grpc.ServerStream, call *grpc.StreamServerInfo, next grpc.StreamHandler,
) error {
	if err := s.refuseClients(stream.Context(), call.FullMethod); err != nil {
		s.auditCall(stream.Context(), call.FullMethod, nil, err)
		return err
	}
	return next(server, stream)
}

// refuseClients returns an error for calls that the socket for clients does not serve.
func (s *Server) refuseClients(ctx context.Context, method string) error {
	if err := s.refuseChanges(method); err != nil {
		return err
	}
	return s.refuseReaders(ctx, method)
}

// refuseBrowsers refuses a call with an Origin, which only browsers send: no web page may use this socket.
func refuseBrowsers(ctx context.Context) error {
	if origin := metadata.ValueFromIncomingContext(ctx, "origin"); len(origin) > 0 {
		return status.Errorf(codes.PermissionDenied, "the call has an Origin, %q: it comes from a page in a browser",
			origin[0])
	}
	return nil
}

// serve takes connections until close.
func (f *clientSocket) serve() {
	go func() {
		defer close(f.stopped)
		if err := f.grpc.Serve(f.listener); err != nil {
			f.server.fail(fmt.Errorf("for clients: %w", err))
		}
	}()
}

// leads sets whether this member serves the lock service, in the health of that service. The health of the server as
// a whole, with the empty name, does not depend on it.
func (f *clientSocket) leads(yes bool) {
	status := grpc_health_v1.HealthCheckResponse_NOT_SERVING
	if yes {
		status = grpc_health_v1.HealthCheckResponse_SERVING
	}
	f.health.SetServingStatus(lockpb.LockService_ServiceDesc.ServiceName, status)
}

// Connect implements lockpb.LockServiceServer.
func (f *clientSocket) Connect(stream grpc.BidiStreamingServer[lockpb.ClientMessage, lockpb.ServerMessage]) error {
	if err := f.server.serveStream(stream); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return nil
}

// drain sets the health to the end of the server.
func (f *clientSocket) drain() { f.health.Shutdown() }

// close ends all connections, whose streams have ended or are about to. Written messages are still sent, unless a
// client takes longer than twice the farewell to read them.
func (f *clientSocket) close() {
	stopGRPC(f.grpc)
	<-f.stopped
}

// stopGRPC ends the connections of a server, and cuts the remaining ones after twice the farewell.
func stopGRPC(s *grpc.Server) {
	impatient := time.AfterFunc(2*farewell, s.Stop)
	defer impatient.Stop()
	s.GracefulStop()
}
