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
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

const (
	// maxMessage bounds a message of a client, in bytes.
	maxMessage = 4 << 20
	// A client that is silent for clientSilence is asked whether it is there, and given up after clientAnswer.
	clientSilence = 10 * time.Second
	clientAnswer  = 5 * time.Second
	// clientPings is how often a client may ask that itself.
	clientPings = time.Second
	// streamsPerConn is how many calls one connection may have open; the client library has more of them wait.
	streamsPerConn = 100
)

// front is the socket for clients: the lock service and the one for operators over gRPC, with the standard services for
// health and reflection.
type front struct {
	lockpb.UnimplementedLockServiceServer
	server   *Server
	listener net.Listener
	grpc     *grpc.Server
	health   *health.Server
	stopped  chan struct{} // closed when Serve has returned
}

func (s *Server) openFront(ctx context.Context) (*front, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.config.Listen)
	if err != nil {
		return nil, fmt.Errorf("for clients: %w", err)
	}
	if s.advertise = s.config.Advertise; s.advertise == "" {
		s.advertise = listener.Addr().String()
	}
	clients := s.connections()
	listener = newGate(listener, clients, s.config.Limits.Share(clients), "clients", s.log)
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxConcurrentStreams(streamsPerConn),
		// Fixed windows spare a ping with each message: gRPC would measure the connection with them.
		grpc.StaticStreamWindowSize(maxMessage), grpc.StaticConnWindowSize(maxMessage),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: clientSilence, Timeout: clientAnswer}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: clientPings, PermitWithoutStream: true}),
	}
	if s.config.TLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(s.config.TLS)))
	}
	f := &front{
		server: s, listener: listener, grpc: grpc.NewServer(options...), health: health.NewServer(),
		stopped: make(chan struct{}),
	}
	lockpb.RegisterLockServiceServer(f.grpc, f)
	lockpb.RegisterAdminServiceServer(f.grpc, &admin{server: s, looking: make(chan struct{}, 1)})
	grpc_health_v1.RegisterHealthServer(f.grpc, f.health)
	reflection.Register(f.grpc)
	f.leads(false)
	return f, nil
}

// serve takes connections until close.
func (f *front) serve() {
	go func() {
		defer close(f.stopped)
		if err := f.grpc.Serve(f.listener); err != nil {
			f.server.fail(fmt.Errorf("for clients: %w", err))
		}
	}()
}

// leads tells those who look at the health of the lock service whether this member serves it. That of the server as a
// whole, with the empty name, does not depend on it.
func (f *front) leads(yes bool) {
	status := grpc_health_v1.HealthCheckResponse_NOT_SERVING
	if yes {
		status = grpc_health_v1.HealthCheckResponse_SERVING
	}
	f.health.SetServingStatus(lockpb.LockService_ServiceDesc.ServiceName, status)
}

// Connect implements lockpb.LockServiceServer.
func (f *front) Connect(stream grpc.BidiStreamingServer[lockpb.ClientMessage, lockpb.ServerMessage]) error {
	if err := f.server.serveStream(stream); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return nil
}

// drain tells those who look at the health that the server is about to end.
func (f *front) drain() { f.health.Shutdown() }

// close ends all connections, whose streams have ended or are about to. What was written to them still leaves, unless a
// client takes longer for that than twice the farewell.
func (f *front) close() {
	impatient := time.AfterFunc(2*farewell, f.grpc.Stop)
	defer impatient.Stop()
	f.grpc.GracefulStop()
	<-f.stopped
}
