package server

import (
	"crypto/tls"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/listeners"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/testcert"
)

// The socket for clients refuses each call that changes something, future calls included, and answers each call that
// reads.
func TestClientsChangeNothing(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0"})
	conn := grpcTo(t, s.Addr().String(), insecure.NewCredentials())
	known := 0
	for _, m := range lockpb.AdminService_ServiceDesc.Methods {
		method := "/" + lockpb.AdminService_ServiceDesc.ServiceName + "/" + m.MethodName
		err := conn.Invoke(t.Context(), method, &lockpb.StatusRequest{}, &lockpb.RemoveMemberReply{})
		if refused := status.Code(err) == codes.PermissionDenied; refused == readCalls[method] {
			t.Errorf("%s: %v", method, err)
		} else if refused && !strings.Contains(err.Error(), s.AdminAddr()) {
			t.Errorf("%s does not say where: %v", method, err)
		}
		if readCalls[method] {
			known++
		}
	}
	for _, m := range lockpb.AdminService_ServiceDesc.Streams {
		method := "/" + lockpb.AdminService_ServiceDesc.ServiceName + "/" + m.StreamName
		stream, err := conn.NewStream(t.Context(), &m, method)
		if err == nil {
			err = errors.Join(stream.SendMsg(&lockpb.StatusRequest{}), stream.CloseSend())
		}
		if err == nil {
			err = stream.RecvMsg(&lockpb.RemoveMemberReply{})
		}
		if refused := status.Code(err) == codes.PermissionDenied; refused == readCalls[method] {
			t.Errorf("%s: %v", method, err)
		}
		if readCalls[method] {
			known++
		}
	}
	if known != len(readCalls) {
		t.Errorf("%d of the %d calls that read are there", known, len(readCalls))
	}
}

// The default is a socket of the server's user in its data directory, which a restart after a crash replaces.
func TestAdminSocket(t *testing.T) {
	t.Parallel()
	c := Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0"}
	path := filepath.Join(c.DataDir, AdminSocket)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c.AdminListen = listeners.UnixPrefix + path
	if _, err := Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Fatalf("a file is in the way: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	c.AdminListen = ""
	s := alone(t, c)
	if about, err := os.Stat(path); err != nil || about.Mode().Perm() != 0o600 {
		t.Errorf("the socket: %v, %v", about, err)
	}
	if m, err := operate(t, s.AdminAddr()).Status(t.Context(), &lockpb.StatusRequest{}); err != nil ||
		m.AdminAddress != listeners.UnixPrefix+path {
		t.Errorf("the status: %v, %v", m, err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the end: %v", err)
	}
	none := alone(t, Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", AdminListen: noAdmin})
	_, err := lockpb.NewAdminServiceClient(grpcTo(t, none.Addr().String(), insecure.NewCredentials())).
		Open(t.Context(), &lockpb.OpenRequest{})
	expectCode(t, err, codes.PermissionDenied, "--admin-listen")
}

// Over TCP only an operator's certificate opens it.
func TestAdminOverTCP(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"127.0.0.1:0", "nowhere", "unix:"} {
		_, err := Start(t.Context(), Config{AdminListen: at})
		if !errors.As(err, new(*replica.ConfigError)) || !strings.Contains(err.Error(), "AdminListen") {
			t.Errorf("%s: %v", at, err)
		}
	}
	operators, clients := testcert.New(t), testcert.New(t)
	s := alone(t, Config{
		DataDir: t.TempDir(), Listen: "127.0.0.1:0", Advertise: "localhost:1", AdminListen: "0.0.0.0:0",
		AdminTLS: mutual(t, operators),
	})
	address := s.AdminAddr()
	if !strings.HasPrefix(address, "localhost:") {
		t.Errorf("it returns %s", address)
	}
	ask := func(config *tls.Config) error {
		c := lockpb.NewAdminServiceClient(grpcTo(t, address, credentials.NewTLS(config)))
		stream, err := c.Backup(t.Context(), &lockpb.BackupRequest{})
		for err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	if err := ask(mutual(t, operators)); !errors.Is(err, io.EOF) {
		t.Errorf("an operator: %v", err)
	}
	client := mutual(t, clients)
	client.RootCAs = trust(t, operators)
	if err := ask(client); errors.Is(err, io.EOF) {
		t.Error("a client's certificate gets a backup")
	}
	if err := ask(&tls.Config{RootCAs: trust(t, operators), ServerName: "localhost"}); errors.Is(err, io.EOF) {
		t.Error("a client without a certificate gets a backup")
	}
}
