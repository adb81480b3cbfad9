package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/testcert"
	"github.com/fencelock/fencelock/internal/testtier"
)

// open is Open with a time limit; the test closes the driver.
func open(t testing.TB, rawURL string) (*Driver, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	d, err := Open(ctx, rawURL)
	if err == nil {
		t.Cleanup(func() { _ = d.Close(context.Background()) })
	}
	return d, err
}

// TestTLS: the server accepts a client with a certificate. A client without a certificate, or without trust in the
// server, fails.
func TestTLS(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	authority := testcert.New(t)
	config := authority.Server(t, "etcd.test")
	config.NextProtos = []string{"h2"}
	addr := testcert.Terminate(t, config, server.Addr())
	certificate, key := authority.Sign(t, "client")
	with := func(options url.Values) string {
		options.Set("timeout", "2s")
		options.Set("server-name", "etcd.test")
		return "etcd://" + addr + "?" + options.Encode()
	}

	d, err := open(t, with(url.Values{"ca": {authority.File}, "cert": {certificate}, "key": {key}}))
	if err != nil {
		t.Fatal(err)
	}
	g := mustAcquire(t, d, request("tls", false))
	if err := d.Release(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	for name, options := range map[string]url.Values{
		"no certificate of the client": {"ca": {authority.File}},
		"an authority of no concern":   {"ca": {testcert.New(t).File}, "cert": {certificate}, "key": {key}},
	} {
		if _, err := open(t, with(options)); !errors.Is(err, backend.ErrUnavailable) {
			t.Errorf("%s: Open = %v, want ErrUnavailable", name, err)
		}
	}
}

// secured returns a server that requires a user and a password, and whose auth tokens expire a second after their last
// use.
func secured(t *testing.T) *containers.EtcdServer {
	t.Helper()
	return securedFor(t, "1")
}

// securedFor is secured with another lifetime of auth tokens, in seconds.
func securedFor(t *testing.T, tokenTTL string) *containers.EtcdServer {
	t.Helper()
	server := containers.Etcd(t, containers.Args("--auth-token-ttl", tokenTTL))
	EnableAuth(t, dial(t, server.Addr()))
	return server
}

// EnableAuth makes a cluster require a user and a password: root with the password master, who may do everything, or
// ann with the password secret, who may read and write below the default prefix.
func EnableAuth(t testing.TB, c *clientv3.Client) {
	t.Helper()
	for _, step := range []func(context.Context) error{
		func(ctx context.Context) error { _, err := c.RoleAdd(ctx, "root"); return err },
		func(ctx context.Context) error { _, err := c.UserAdd(ctx, "root", "master"); return err },
		func(ctx context.Context) error { _, err := c.UserGrantRole(ctx, "root", "root"); return err },
		func(ctx context.Context) error { _, err := c.RoleAdd(ctx, "locks"); return err },
		func(ctx context.Context) error {
			_, err := c.RoleGrantPermission(ctx, "locks", "fencelock/", clientv3.GetPrefixRangeEnd("fencelock/"),
				clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func(ctx context.Context) error { _, err := c.UserAdd(ctx, "ann", "secret"); return err },
		func(ctx context.Context) error { _, err := c.UserGrantRole(ctx, "ann", "locks"); return err },
		func(ctx context.Context) error { _, err := c.AuthEnable(ctx); return err },
	} {
		if err := step(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAuthTokenExpires: a hold and a waiter outlive every token that the client gets for its password.
func TestAuthTokenExpires(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	server := secured(t)
	d, err := open(t, "etcd://ann:secret@"+server.Addr()+"?timeout=20s")
	if err != nil {
		t.Fatal(err)
	}
	r := request("auth", false)
	r.TTL = 9 * time.Second // keepalives are further apart than a token lives
	r.Lost = func(loss backend.Loss) { t.Errorf("the hold was lost: %v", loss.Reason) }
	g := mustAcquire(t, d, r)
	later := request("auth", true)
	later.TTL = r.TTL
	waiter := acquireLater(t, d, later)

	// The test is about time: five lifetimes of an auth token, most of them without a request.
	select {
	case got := <-waiter:
		t.Fatalf("the waiter has got %+v beside a holder", got)
	case <-time.After(5 * time.Second):
	}
	if renewed := d.Renew(t.Context(), []backend.Grant{g})[0]; renewed.Err != nil {
		t.Errorf("Renew = %v", renewed.Err)
	}
	if err := d.Release(t.Context(), g); err != nil {
		t.Errorf("Release = %v", err)
	}
	if got := <-waiter; got.err != nil {
		t.Errorf("the waiter: %v", got.err)
	} else if got.grant.Token <= g.Token {
		t.Errorf("token %v after %v", got.grant.Token, g.Token)
	} else if err := d.Release(t.Context(), got.grant); err != nil {
		t.Errorf("Release = %v", err)
	}
}

// TestServerForgetsAuthTokens: a restarted server does not know its earlier tokens, and all clients keep working.
func TestServerForgetsAuthTokens(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	server := secured(t)
	d, err := open(t, "etcd://ann:secret@"+server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	r := request("auth", false)
	r.TTL = 20 * time.Second
	g := mustAcquire(t, d, r)
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	another := request("another", false)
	var again backend.Grant
	eventually(t, "the driver is connected again", func() bool {
		again, err = d.Acquire(t.Context(), another)
		if err != nil && !errors.Is(err, backend.ErrUnavailable) {
			t.Fatalf("Acquire = %v", err)
		}
		return err == nil
	})
	for _, g := range []backend.Grant{g, again} {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if err := d.Release(ctx, g); err != nil {
			t.Errorf("Release(%s) = %v", g.Name, err)
		}
	}
}

// TestPasswordFileIsReplaced: a client keeps its hold, and gets further holds, across a change of its password in etcd
// and in the file.
func TestPasswordFileIsReplaced(t *testing.T) {
	t.Parallel()
	server := secured(t)
	file := filepath.Join(t.TempDir(), "password")
	write := func(password string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(password+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("secret")
	d, err := open(t, "etcd://ann@"+server.Addr()+"?password-file="+file)
	if err != nil {
		t.Fatal(err)
	}
	held := request("held", false)
	held.TTL = 30 * time.Second // a server is slow to check a password
	g := mustAcquire(t, d, held)
	root, err := clientv3.New(clientv3.Config{
		Endpoints: []string{server.Addr()}, Username: "root", Password: "master", DialTimeout: 20 * time.Second, Logger: quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	write("a new one")
	if _, err := root.UserChangePassword(t.Context(), "ann", "a new one"); err != nil { // ends her tokens
		t.Fatal(err)
	}
	var another backend.Grant
	eventually(t, "the client is known with the new password", func() bool {
		another, err = d.Acquire(t.Context(), request("another", false))
		return err == nil
	})
	for _, g := range []backend.Grant{g, another} {
		if err := d.Release(t.Context(), g); err != nil {
			t.Errorf("Release(%s) = %v", g.Name, err)
		}
	}
}

// TestAuthRefused: the errors distinguish a wrong password and a missing right.
func TestAuthRefused(t *testing.T) {
	t.Parallel()
	server := secured(t)
	for what, rest := range map[string]string{
		"a wrong password": "ann:wrong@" + server.Addr(),
		"no user":          server.Addr(),
		"a missing right":  "ann:secret@" + server.Addr() + "?prefix=elsewhere/",
	} {
		if _, err := open(t, "etcd://"+rest); !errors.Is(err, backend.ErrMisconfigured) {
			t.Errorf("Open with %s = %v, want ErrMisconfigured", what, err)
		}
	}
}

// TestKeepalivesAuthenticateOnce: keepalives use one stream, for which the client authenticates once.
func TestKeepalivesAuthenticateOnce(t *testing.T) {
	t.Parallel()
	addr := securedFor(t, "300").Addr()
	var authenticated, streams, keepalives atomic.Int64
	count := func(method string) {
		if strings.HasSuffix(method, "/Authenticate") {
			authenticated.Add(1)
		}
		if strings.HasSuffix(method, "/LeaseKeepAlive") {
			streams.Add(1)
		}
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{addr}, Username: "ann", Password: "secret", Logger: quiet, DialTimeout: 5 * time.Second,
		DialOptions: []grpc.DialOption{
			grpc.WithChainUnaryInterceptor(func(
				ctx context.Context, method string, q, a any, c *grpc.ClientConn,
				call grpc.UnaryInvoker, o ...grpc.CallOption,
			) error {
				count(method)
				return call(ctx, method, q, a, c, o...)
			}),
			grpc.WithChainStreamInterceptor(func(
				ctx context.Context, desc *grpc.StreamDesc, c *grpc.ClientConn, method string,
				open grpc.Streamer, o ...grpc.CallOption,
			) (grpc.ClientStream, error) {
				count(method)
				s, err := open(ctx, desc, c, method, o...)
				if strings.HasSuffix(method, "/LeaseKeepAlive") {
					s = sending{s, &keepalives}
				}
				return s, err
			}),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	d := New(client, nil)
	defer d.Close(t.Context())
	holds, waits := request("x", false), request("x", true)
	holds.TTL, waits.TTL = 12*time.Second, 12*time.Second
	g := mustAcquire(t, d, holds)
	waiter := acquireLater(t, d, waits)
	atFirst := authenticated.Load()
	eventually(t, "three keepalives are sent", func() bool {
		if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
			t.Fatal(err)
		}
		return keepalives.Load() >= 3
	})
	mustWait(t, "the waiter", waiter)
	if n := streams.Load(); n != 1 {
		t.Errorf("%d keepalives went on %d streams, want 1", keepalives.Load(), n)
	}
	// Once for the stream of keepalives, and once for that of watches.
	if n := authenticated.Load() - atFirst; n > 2 {
		t.Errorf("the client has authenticated %d times more, want at most 2", n)
	}
}

// sending is a stream that counts its messages.
type sending struct {
	grpc.ClientStream
	n *atomic.Int64
}

func (s sending) SendMsg(m any) error {
	s.n.Add(1)
	return s.ClientStream.SendMsg(m)
}

// TestOneTokenServesAllStreams: waits open and close streams, and the client authenticates once.
func TestOneTokenServesAllStreams(t *testing.T) {
	t.Parallel()
	d, err := open(t, "etcd://ann:secret@"+securedFor(t, "300").Addr()+"?timeout=20s")
	if err != nil {
		t.Fatal(err)
	}
	for range 5 { // the watch of each wait is the only one
		g := mustAcquire(t, d, request("x", false))
		waiter := acquireLater(t, d, request("x", true))
		mustWait(t, "the waiter", waiter)
		if err := d.Release(t.Context(), g); err != nil {
			t.Fatal(err)
		}
		got := <-waiter
		if got.err != nil {
			t.Fatal(got.err)
		}
		if err := d.Release(t.Context(), got.grant); err != nil {
			t.Fatal(err)
		}
	}
	if n := d.service.conns.token.inUse(); n != 1 {
		t.Errorf("the client has got %d tokens, want 1", n)
	}
}

// TestSlowCheckOfAPassword: the client asks a slow server for a token once, however many calls need it and however
// soon they stop waiting. If the request fails, the next one gets more time.
func TestSlowCheckOfAPassword(t *testing.T) {
	t.Parallel()
	conns := newConnections("ann")
	var asked atomic.Int64
	answers := make(chan error)
	authenticate := func(ctx context.Context) (string, error) {
		reply := &pb.AuthenticateResponse{}
		err := conns.token.unary(ctx, pb.Auth_Authenticate_FullMethodName, nil, reply, nil, func(
			_ context.Context, _ string, _, reply any, _ *grpc.ClientConn, _ ...grpc.CallOption,
		) error {
			n := asked.Add(1)
			err := <-answers
			reply.(*pb.AuthenticateResponse).Token = fmt.Sprint("token-", n)
			return err
		})
		return reply.Token, err
	}
	all := func(ctx context.Context, want string) {
		t.Helper()
		var work sync.WaitGroup
		for range 20 {
			work.Go(func() {
				if got, err := authenticate(ctx); err != nil || got != want {
					t.Errorf("authenticate = %q, %v, want %q", got, err, want)
				}
			})
		}
		work.Wait()
	}
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	for range 20 {
		if _, err := authenticate(short); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("authenticate = %v, want DeadlineExceeded", err)
		}
	}
	if n := asked.Load(); n > 1 {
		t.Errorf("the server was asked %d times at once", n)
	}
	answers <- status.Error(codes.Unavailable, "the connection was closed")
	eventually(t, "more time", func() bool { return conns.bears.Load() == int64(2*silence) })
	go func() { answers <- nil }()
	all(t.Context(), "token-2")
	if got := conns.bears.Load(); got != int64(silence) {
		t.Errorf("a server may be silent for %v, want %v", time.Duration(got), silence)
	}

	conns.token.forget(conns.token.inUse() - 1) // the refusal of an older token
	all(t.Context(), "token-2")
	conns.token.forget(conns.token.inUse())
	go func() { answers <- nil }()
	all(t.Context(), "token-3")
}
