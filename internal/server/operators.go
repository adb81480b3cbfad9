package server

// The listener for operators: all of lockpb.AdminService. The socket for clients has only its reading calls, so that
// a client that may lock cannot change the cluster.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/listeners"
)

// AdminSocket is the name of the default of Config.AdminListen in the data directory.
const AdminSocket = "admin.sock"

// noAdmin is the Config.AdminListen of a member that accepts no changes.
const noAdmin = "none"

// readCalls are the calls of lockpb.AdminService that make no change and return no backup. All other and future calls
// are for operators.
var readCalls = map[string]bool{
	lockpb.AdminService_Status_FullMethodName: true, lockpb.AdminService_ListMembers_FullMethodName: true,
	lockpb.AdminService_LookStale_FullMethodName: true, lockpb.AdminService_ListSessions_FullMethodName: true,
	lockpb.AdminService_Explain_FullMethodName: true,
}

// refuseChanges refuses calls for operators at the socket for clients.
func (s *Server) refuseChanges(method string) error {
	if readCalls[method] || !strings.HasPrefix(method, "/"+lockpb.AdminService_ServiceDesc.ServiceName+"/") {
		return nil
	}
	where := "which this member does not have: see --admin-listen"
	if at := s.operators.address(); at != "" {
		where = "at " + at
	}
	return status.Errorf(codes.PermissionDenied, "the call is accepted only at the listener for operators, %s", where)
}

// operatorSocket is the listener for operators, or nil.
type operatorSocket struct {
	listener  net.Listener
	grpc      *grpc.Server
	advertise string
	stopped   chan struct{} // closed when Serve has returned
}

// address returns the address for operators; empty if they have no listener.
func (o *operatorSocket) address() string {
	if o == nil {
		return ""
	}
	return o.advertise
}

// adminListen returns the address for changes: as configured, or the socket in the data directory of a member that
// has clients or other members. Empty: no listener.
func (c *Config) adminListen() string {
	switch {
	case c.AdminListen == noAdmin:
		return ""
	case c.AdminListen != "":
		return c.AdminListen
	case c.DataDir == "" || c.Listen == "":
		return ""
	}
	return listeners.UnixPrefix + filepath.Join(c.DataDir, AdminSocket)
}

// checkAdmin refuses changes over TCP without a certificate of an operator.
func (c *Config) checkAdmin() error {
	at := c.adminListen()
	if path, is := listeners.UnixPath(at); is || at == "" {
		if is && path == "" {
			return mistake("AdminListen", at, "the path of the socket is missing")
		}
		return nil
	}
	if _, _, err := net.SplitHostPort(at); err != nil {
		return mistake("AdminListen", at, err.Error()+"; want unix:PATH, HOST:PORT or none")
	}
	if c.AdminTLS == nil {
		return mistake("AdminListen", at, "over TCP, changes need a certificate of the server and an authority of the "+
			"operators' certificates")
	}
	return nil
}

// openOperators opens the listener. If the default path is too long for a socket, it logs that and the server starts
// without the listener.
func (s *Server) openOperators(ctx context.Context) error {
	at := s.config.adminListen()
	if at == "" {
		return nil
	}
	o := &operatorSocket{stopped: make(chan struct{})}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessage), grpc.ChainUnaryInterceptor(withoutBrowsers, s.ofOperators),
		grpc.ChainStreamInterceptor(streamWithoutBrowsers, s.streamOfOperators),
	}
	var err error
	if path, is := listeners.UnixPath(at); is {
		if path, err = filepath.Abs(path); err == nil {
			o.advertise = listeners.UnixPrefix + path
			o.listener, err = listeners.ListenUnix(path)
		}
		if err != nil && s.config.AdminListen == "" {
			s.log.Warn("changes of the cluster cannot be made at this member; give --admin-listen", "error", err)
			return nil
		}
	} else if o.listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", at); err == nil {
		o.advertise = s.reachable(addressOf(at, o.listener))
		options = append(options, grpc.Creds(credentials.NewTLS(s.config.AdminTLS)))
	}
	if err != nil {
		return fmt.Errorf("for operators: %w", err)
	}
	o.listener = listeners.NewGate(listeners.AdminConnections, listeners.AdminConnections, s.log).
		Admit(o.listener, listeners.AdminConnections, "operators")
	o.grpc = grpc.NewServer(options...)
	lockpb.RegisterAdminServiceServer(o.grpc, &admin{server: s, looking: make(chan struct{}, 1)})
	s.operators = o
	return nil
}

func (s *Server) ofOperators(
	ctx context.Context, in any, call *grpc.UnaryServerInfo, next grpc.UnaryHandler,
) (out any, err error) {
	if err = s.refuseOperators(ctx); err == nil {
		out, err = next(ctx, in)
	}
	s.auditCall(ctx, call.FullMethod, in, err)
	return out, err
}

func (s *Server) streamOfOperators(
	server any, stream grpc.ServerStream, call *grpc.StreamServerInfo, next grpc.StreamHandler,
) error {
	err := s.refuseOperators(stream.Context())
	if err == nil {
		err = next(server, stream)
	}
	s.auditCall(stream.Context(), call.FullMethod, nil, err)
	return err
}

// reachable returns address, with the host by which clients find this machine if it has no host.
func (s *Server) reachable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil || !net.ParseIP(host).IsUnspecified() {
		return address
	}
	if known, _, err := net.SplitHostPort(s.advertise); err == nil {
		host = cmp.Or(known, host)
	}
	return net.JoinHostPort(host, port)
}

// AdminAddr returns the address for operators: unix:PATH, or host:port; empty without one.
func (s *Server) AdminAddr() string { return s.operators.address() }

func (o *operatorSocket) serve(failed func(error)) {
	go func() {
		defer close(o.stopped)
		if err := o.grpc.Serve(o.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			failed(fmt.Errorf("for operators: %w", err))
		}
	}()
}

func (o *operatorSocket) close() {
	stopGRPC(o.grpc)
	<-o.stopped
}
