package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/serverfault"
	"github.com/fencelock/fencelock/internal/testcert"
)

func grpcTo(t *testing.T, address string, creds credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestHealth(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	leader := c.leader()
	for i := range c.servers {
		health := grpc_health_v1.NewHealthClient(grpcTo(t, c.configs[i].Listen, insecure.NewCredentials()))
		is := func(service string) bool {
			r, err := health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: service})
			if err != nil {
				t.Fatal(err)
			}
			return r.Status == grpc_health_v1.HealthCheckResponse_SERVING
		}
		if !is("") {
			t.Errorf("server %d is not healthy", i)
		}
		eventually(t, fmt.Sprintf("server %d says whether it is %d, which leads", i, leader), func() bool {
			return is("fencelock.v1.LockService") == (i == leader)
		})
	}
}

func TestReflection(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{Listen: "127.0.0.1:0"})
	conn := grpcTo(t, s.Addr().String(), insecure.NewCredentials())
	stream, err := grpc_reflection_v1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = stream.Send(&grpc_reflection_v1.ServerReflectionRequest{
		MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_FileContainingSymbol{
			FileContainingSymbol: "fencelock.v1.LockService",
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := stream.Recv(); err != nil || r.GetFileDescriptorResponse() == nil {
		t.Errorf("%v, %v", r, err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Error(err)
	}
}

// A call for a page in a browser is refused. Any authority is answered: clients set it as they like.
func TestOrigin(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{Listen: "127.0.0.1:0"})
	conn, err := grpc.NewClient(s.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("evil.test"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	page := metadata.AppendToOutgoingContext(t.Context(), "origin", "http://evil.test")
	for _, x := range []struct {
		ctx  context.Context
		want codes.Code
	}{{t.Context(), codes.OK}, {page, codes.PermissionDenied}} {
		_, err := lockpb.NewAdminServiceClient(conn).Status(x.ctx, &lockpb.StatusRequest{})
		stream, streamErr := lockpb.NewLockServiceClient(conn).Connect(x.ctx)
		if streamErr != nil {
			t.Fatal(streamErr)
		}
		streamErr = stream.Send(&lockpb.ClientMessage{Requests: []*lockpb.Request{
			{Number: 1, Call: &lockpb.Request_Hello{Hello: &lockpb.Hello{}}},
		}})
		if streamErr == nil || errors.Is(streamErr, io.EOF) {
			_, streamErr = stream.Recv()
		}
		if status.Code(err) != x.want || status.Code(streamErr) != x.want {
			t.Errorf("a call is answered with %v and a stream with %v, want %v", err, streamErr, x.want)
		}
	}
}

// mutual returns what both sides of a connection use.
func mutual(t *testing.T, a *testcert.Authority) *tls.Config {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(a.Sign(t, "localhost"))
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{pair}, ServerName: "localhost",
		RootCAs: trust(t, a), ClientCAs: trust(t, a), ClientAuth: tls.RequireAndVerifyClientCert,
	}
}

func trust(t *testing.T, a *testcert.Authority) *x509.CertPool {
	t.Helper()
	text, err := os.ReadFile(a.File)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return pool
}

func TestTLS(t *testing.T) {
	t.Parallel()
	clients, members, strangers := testcert.New(t), testcert.New(t), testcert.New(t)
	c := newCluster(t, 3, func(config *Config) {
		config.TLS = mutual(t, clients)
		peer := mutual(t, members) // GetConfigForClient returns it, as for reloaded files
		config.PeerTLS = &tls.Config{
			MinVersion: tls.VersionTLS13, ServerName: "localhost",
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return peer, nil },
		}
	})
	leader := c.leader()
	hello := func(config *tls.Config) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		conn := grpcTo(t, c.configs[leader].Listen, credentials.NewTLS(config))
		stream, err := lockpb.NewLockServiceClient(conn).Connect(ctx)
		if err != nil {
			return err
		}
		if err := stream.Send(&lockpb.ClientMessage{Requests: []*lockpb.Request{
			{Number: 1, Call: &lockpb.Request_Hello{Hello: &lockpb.Hello{}}},
		}}); err != nil {
			return err
		}
		_, err = stream.Recv()
		return err
	}
	if err := hello(mutual(t, clients)); err != nil {
		t.Errorf("a client with a certificate: %v", err)
	}
	if hello(&tls.Config{RootCAs: trust(t, clients), ServerName: "localhost"}) == nil {
		t.Error("a client without a certificate is served")
	}
	foreign := mutual(t, strangers)
	foreign.RootCAs = trust(t, clients)
	if hello(foreign) == nil {
		t.Error("a client with a stranger's certificate is served")
	}
	pretender := start(t, Config{
		PeerListen: "127.0.0.1:0", Join: []string{c.servers[leader].PeerAddr()}, PeerTLS: mutual(t, strangers),
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if pretender.WaitLeader(ctx) == nil || len(c.servers[leader].replica.Members()) != 3 {
		t.Error("a member with a stranger's certificate is taken in")
	}
}

// The disk of a leader stands still: its clients are sent to the one who leads instead, and come back when it goes on.
func TestStalledServerSendsClientsAway(t *testing.T) {
	t.Parallel()
	logs := make([]*serverfault.SlowLog, 0, 3)
	c := newCluster(t, 3, func(config *Config) {
		calm(config)
		slow := &serverfault.SlowLog{}
		logs = append(logs, slow)
		config.Rig = &serverfault.Rig{Log: func(log raft.LogStore) raft.LogStore {
			slow.LogStore = log
			return slow
		}}
	})
	leader := c.leader()
	s := c.servers[leader]
	x := dial(t, c.configs[leader].Listen)
	session := x.open(time.Minute)
	goOn := logs[leader].Hang()
	defer goOn()
	x.send(acquireOf(session, "x", backend.NewRequestID(), false))
	if g := x.next().GetGoodbye(); g == nil {
		t.Errorf("it said %v", g)
	}
	if s.Leads() {
		t.Error("it serves")
	}
	eventually(t, "another serves", func() bool {
		for i, other := range c.servers {
			if i != leader && other.Leads() {
				return true
			}
		}
		return false
	})
	goOn()
	newCaller(t, c.connect).lock("x")
}
