package builtin_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/testcert"
)

// tokenServer is a server with rules, whose clients have tokens.
type tokenServer struct {
	*server.Server
	t         *testing.T
	authority *testcert.Authority
	proofs    atomic.Pointer[principal.Proofs]
}

func startTokens(t *testing.T, rules string) *tokenServer {
	t.Helper()
	s := &tokenServer{t: t, authority: testcert.New(t)}
	s.knows("")
	config := s.authority.Server(t, "locks.test")
	config.ClientAuth = tls.VerifyClientCertIfGiven
	var err error
	s.Server, err = server.Start(t.Context(), server.Config{
		Listen: "127.0.0.1:0", TLS: config, Rules: rules, Proofs: s.proofs.Load, Log: quiet(t),
		AdminListen: "unix:" + filepath.Join(t.TempDir(), "admin.sock"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	eventually(t, "the rules are in force", s.Ruled)
	return s
}

func (s *tokenServer) knows(lines string) {
	s.t.Helper()
	p, err := principal.ParseProofs([]byte(lines))
	if err != nil {
		s.t.Fatal(err)
	}
	s.proofs.Store(p)
}

func (s *tokenServer) open(file string) (*builtin.Driver, error) {
	options := url.Values{"ca": {s.authority.File}, "server-name": {"locks.test"}, "timeout": {"1m"}}
	if file != "" {
		options.Set("credential", file)
	}
	d, err := builtin.Open(s.t.Context(), "fencelocks://"+s.Addr().String()+"?"+options.Encode())
	if err == nil {
		s.t.Cleanup(func() { _ = d.Close(context.Background()) })
	}
	return d, err
}

// client returns a driver that calls dialled before it opens a connection, and has a certificate for each of names.
func (s *tokenServer) client(file string, dialled func(), names ...string) *builtin.Driver {
	s.t.Helper()
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: s.authority.Server(s.t, "x").ClientCAs, ServerName: "locks.test",
	}
	for _, name := range names {
		pair, err := tls.LoadX509KeyPair(s.authority.Sign(s.t, name))
		if err != nil {
			s.t.Fatal(err)
		}
		config.Certificates = append(config.Certificates, pair)
	}
	d := builtin.New([]string{s.Addr().String()}, &builtin.Options{
		TLS: config, TokenFile: file, Logger: quiet(s.t),
		Dial: func(ctx context.Context, address string) (net.Conn, error) {
			dialled()
			return (&net.Dialer{}).DialContext(ctx, "tcp", address)
		},
	})
	s.t.Cleanup(func() { _ = d.Close(context.Background()) })
	return d
}

// tokenIn replaces a file atomically by one with a token.
func tokenIn(t *testing.T, path, token string) {
	t.Helper()
	if err := os.WriteFile(path+".next", []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".next", path); err != nil {
		t.Fatal(err)
	}
}

// A client without a certificate may do what the rules allow the principal of its token.
func TestTokens(t *testing.T) {
	t.Parallel()
	s := startTokens(t, "allow token:ci acquire,read jobs\n")
	token, other := principal.NewToken(), principal.NewToken()
	s.knows(principal.TokenLine("token:ci", token, time.Time{}) + "\n" +
		principal.TokenLine("token:other", other, time.Now().Add(-time.Hour)) + "\n")
	file := filepath.Join(t.TempDir(), "token")
	tokenIn(t, file, token)
	d, err := s.open(file)
	if err != nil {
		t.Fatal(err)
	}
	take(t, d, request("jobs/1", time.Minute))
	if _, err := d.Acquire(t.Context(), request("else", time.Minute)); !errors.Is(err, backend.ErrDenied) {
		t.Errorf("another name: %v", err)
	}
	nobody, err := s.open("")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := nobody.Acquire(t.Context(), request("jobs/2", time.Minute)); !errors.Is(err, backend.ErrDenied) {
		t.Errorf("without a token: %v", err)
	}
	for what, token := range map[string]string{"expired": other, "unknown": principal.NewToken()} {
		file := filepath.Join(t.TempDir(), "token")
		tokenIn(t, file, token)
		if _, err := s.open(file); !errors.Is(err, backend.ErrDenied) {
			t.Errorf("a token that is %s: %v", what, err)
		}
	}
	tokenIn(t, file, "none")
	if _, err := s.open(file); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("no token: %v", err)
	}
	clear := "fencelock://" + s.Addr().String() + "?" + url.Values{"credential": {file}}.Encode()
	if _, err := builtin.Open(t.Context(), clear); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("without TLS: %v", err)
	}
}

// A client survives the replacement of its token: the server ends the connection when the token was removed, and the
// client connects with the token that its file has by then.
func TestTokenIsReplaced(t *testing.T) {
	t.Parallel()
	s := startTokens(t, "allow token:ci acquire,read jobs\n")
	first, second := principal.NewToken(), principal.NewToken()
	firstLine, secondLine := principal.TokenLine("token:ci", first, time.Time{})+"\n",
		principal.TokenLine("token:ci", second, time.Time{})+"\n"
	s.knows(firstLine + secondLine)
	file := filepath.Join(t.TempDir(), "token")
	tokenIn(t, file, first)
	var dialled atomic.Int64
	d := s.client(file, func() { dialled.Add(1) })
	var lost atomic.Bool
	r := request("jobs/1", 10*time.Minute)
	r.Lost = func(backend.Loss) { lost.Store(true) }
	g := take(t, d, r)
	tokenIn(t, file, second)
	before := dialled.Load()
	s.knows(secondLine)
	eventually(t, "the client connects anew", func() bool { return dialled.Load() > before })
	eventually(t, "the client renews", func() bool {
		return d.Renew(t.Context(), []backend.Grant{g})[0].Err == nil
	})
	if lost.Load() {
		t.Error("the hold is lost")
	}
	s.knows("")
	eventually(t, "the token is denied", func() bool {
		_, err := d.Acquire(t.Context(), request("jobs/2", time.Minute))
		return errors.Is(err, backend.ErrDenied)
	})
}

// A client with both a token and a certificate is identified by the token.
func TestTokenBesideACertificate(t *testing.T) {
	t.Parallel()
	s := startTokens(t, "allow token:ci acquire jobs\nallow cert:pay acquire pay\n")
	token := principal.NewToken()
	s.knows(principal.TokenLine("token:ci", token, time.Time{}) + "\n")
	file := filepath.Join(t.TempDir(), "token")
	tokenIn(t, file, token)
	for file, names := range map[string][2]string{file: {"jobs", "pay"}, "": {"pay", "jobs"}} {
		d := s.client(file, func() {}, "pay")
		take(t, d, request(names[0]+file, time.Minute))
		if _, err := d.Acquire(t.Context(), request(names[1], time.Minute)); !errors.Is(err, backend.ErrDenied) {
			t.Errorf("with the token in %q: %s: %v", file, names[1], err)
		}
	}
}

// A connection outlasts its token by the grace period, and then the client connects with the present token in its
// file. Meanwhile, and while tokens and rules are replaced, no call fails and no hold is lost.
func TestCredentialsAreReplacedUnderLoad(t *testing.T) {
	t.Parallel()
	const (
		grace = 30 * time.Second
		rules = "allow token:ci acquire,read jobs\n"
	)
	s := startTokens(t, rules)
	first, second, third := principal.NewToken(), principal.NewToken(), principal.NewToken()
	line := func(token string, expires time.Time) string {
		return principal.TokenLine("token:ci", token, expires) + "\n"
	}
	s.knows(line(first, time.Now().Add(time.Hour)) + line(second, time.Time{}))
	file := filepath.Join(t.TempDir(), "token")
	tokenIn(t, file, first)
	var dialled atomic.Int64
	d := s.client(file, func() { dialled.Store(time.Now().UnixNano()) })
	r := request("jobs/kept", 10*time.Minute)
	r.Lost = func(l backend.Loss) { t.Errorf("the hold is lost: %+v", l) }
	kept := take(t, d, r)

	var rounds [3]atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer stop()
	for i := range rounds {
		clients.Go(func() {
			for ctx.Err() == nil {
				g, err := d.Acquire(t.Context(), request(fmt.Sprint("jobs/", i), 10*time.Minute))
				if err == nil {
					_, err = d.Look(t.Context(), g.Name)
				}
				if err == nil {
					err = errors.Join(d.Renew(t.Context(), []backend.Grant{g, kept})[1].Err, d.Release(t.Context(), g))
				}
				if err != nil {
					t.Errorf("client %d: %v", i, err)
					return
				}
				rounds[i].Add(1)
			}
		})
	}
	works := func(after string) {
		t.Helper()
		for i := range rounds {
			before := rounds[i].Load()
			eventually(t, "clients go on after "+after, func() bool { return rounds[i].Load() > before+1 || t.Failed() })
		}
	}
	works("the start")
	tokenIn(t, file, second)
	began := dialled.Load()
	end := time.Now().Truncate(time.Second).Add(2 * time.Second) // the end of the grace period
	s.knows(line(first, end.Add(-grace)) + line(second, time.Time{}))
	works("the token has expired")
	eventually(t, "the client connects anew", func() bool { return dialled.Load() > began })
	if at := time.Unix(0, dialled.Load()); at.Before(end) {
		t.Errorf("the connection ended %v before the grace period did", end.Sub(at))
	}
	works("the grace period")
	s.knows(line(second, time.Time{}) + line(third, time.Time{}))
	tokenIn(t, file, third)
	began = dialled.Load()
	s.knows(line(third, time.Time{}))
	eventually(t, "the client connects anew", func() bool { return dialled.Load() > began })
	works("the token was removed")
	admin := builtin.NewAdmin([]string{s.AdminAddr()}, nil)
	for i := range 3 {
		if _, err := admin.SetRules(t.Context(), fmt.Sprintf("# round %d\n%s", i, rules)); err != nil {
			t.Fatal(err)
		}
		works("other rules")
	}
}
