package etcd

import (
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
)

func TestParseURL(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]struct {
		endpoints      []string
		user, password string
		prefix         string
	}{
		"etcd://a":                      {endpoints: []string{"a:2379"}},
		"etcd://a:1,b:2,[::1]:3/":       {endpoints: []string{"a:1", "b:2", "[::1]:3"}},
		"etcd://u:p%40ss@a:1?prefix=q/": {endpoints: []string{"a:1"}, user: "u", password: "p@ss", prefix: "q/"},
		"etcds://a,b":                   {endpoints: []string{"https://a:2379", "https://b:2379"}},
	} {
		config, o, err := parseURL(raw)
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		if !slices.Equal(config.Endpoints, want.endpoints) || config.Username != want.user ||
			config.Password != want.password || o.KeyPrefix != want.prefix {
			t.Errorf("%s: %v %s %s %+v", raw, config.Endpoints, config.Username, config.Password, o)
		}
		if strings.HasPrefix(raw, "etcds") != (config.TLS != nil) {
			t.Errorf("%s: TLS is %v", raw, config.TLS)
		}
	}
	for _, raw := range []string{
		"etcd://", "etcd://a,,b", "etcd://a:0", "etcd://a:99999", "etcd://a:x", "etcd://::1", "etcd://a/path",
		"etcd://a?nosuch=1", "etcd://a?dial-timeout=1s", "etcd://a?prefix=q", "etcd://a?prefix=",
		"etcd://a?prefix=a/%2Bb/", "etcd://a?prefix=1&prefix=2", "etcd://a?timeout=-1s", "etcd://a?cert=x",
		"etcd://a?ca=/no/such/file", "etcd://u:secret%zz@a", "http://a", "etcd://a?x=%zz",
	} {
		_, _, err := parseURL(raw)
		if !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%s: %v, want ErrInvalidOption", raw, err)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the message contains the password: %v", raw, err)
		}
	}
}

func TestLeaseDefects(t *testing.T) {
	t.Parallel()
	for version, fixed := range map[string]bool{
		"3.4.23": false, "3.4.38": true, "3.5.0": false, "3.5.22": false, "3.5.23": true, "3.6.4": false, "3.6.5": true,
		"3.6.10": true, "3.7.0": true, "3.7.3-rc.1": true, "4.0.0": true, "3.3.1": false, "": false,
	} {
		if _, ok := leaseDefects(version); ok != fixed {
			t.Errorf("leaseDefects(%q) says fixed: %v, want %v", version, ok, fixed)
		}
	}
}

func FuzzKeysAreInjective(f *testing.F) {
	f.Add("a", "a/b")
	f.Add("a%2Fb", "a/b")
	f.Add("", "..")
	f.Fuzz(func(t *testing.T, a, b string) {
		d := New(nil, nil).service
		if back, ok := d.nameOf(dirOf(a) + "request"); !ok || back != a {
			t.Errorf("%q comes back as %q", a, back)
		}
		if a != b && (strings.HasPrefix(dirOf(b), dirOf(a)) || dirOf(a) == dirOf(b)) {
			t.Errorf("the directory of %q lies in that of %q", b, a)
		}
		if strings.HasPrefix(b, a) && !strings.HasPrefix(dirOf(b), d.locksDir()+url.PathEscape(a)) {
			t.Errorf("List(%q) does not find %q", a, b)
		}
	})
}

// The error describes the fault of the address or its port.
func TestOpenSaysWhyItIsNotConnected(t *testing.T) {
	t.Parallel()
	closed := freeport.Addresses(t, 1)[0]
	plain, secure := httptest.NewServer(http.NotFoundHandler()), httptest.NewUnstartedServer(http.NotFoundHandler())
	t.Cleanup(plain.Close) // after the parallel subtests
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.StartTLS()
	t.Cleanup(secure.Close)
	for url, want := range map[string]string{
		"etcd://" + closed:                           "connection refused",
		"etcd://no-such-host.invalid":                "no such host",
		"etcd://" + plain.Listener.Addr().String():   "HTTP/1.1",
		"etcds://" + plain.Listener.Addr().String():  "does not look like a TLS handshake",
		"etcds://" + secure.Listener.Addr().String(): "handshake failed",
		"etcd://" + secure.Listener.Addr().String():  "server preface",
	} {
		t.Run(url, func(t *testing.T) {
			t.Parallel()
			d, err := Open(context.Background(), url+"?timeout=1s")
			if err == nil {
				_ = d.Close(context.Background())
				t.Fatal("it is open")
			}
			if !errors.Is(err, backend.ErrUnavailable) || !strings.Contains(err.Error(), want) {
				t.Errorf("%v; want ErrUnavailable with %q", err, want)
			}
		})
	}
}

// Behind a proxy that answers keepalives itself, no answer proves a lease.
func TestProxyIsRefused(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t, containers.AsProcess())
	addr := freeport.Addresses(t, 1)[0]
	fault.Start(t, exec.Command("etcd", "grpc-proxy", "start", "--endpoints", server.Addr(), "--listen-addr", addr,
		"--data-dir", t.TempDir()))
	direct := dial(t, server.Addr())
	proxied := dial(t, addr)
	eventually(t, "the proxy serves", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := proxied.Get(ctx, "x")
		return err == nil
	})
	for name, c := range map[string]struct {
		client *clientv3.Client
		want   error
	}{"etcd": {direct, nil}, "proxy": {proxied, backend.ErrMisconfigured}} {
		d := New(c.client, nil)
		defer d.Close(t.Context())
		if err := d.Ping(t.Context()); !errors.Is(err, c.want) {
			t.Errorf("Ping of %s = %v, want %v", name, err, c.want)
		}
		if _, err := d.Acquire(t.Context(), request("x", false)); !errors.Is(err, c.want) {
			t.Errorf("Acquire from %s = %v, want %v", name, err, c.want)
		}
	}
}
