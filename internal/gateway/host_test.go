package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/backend/memory"
)

// logging is a gateway with a log that the test reads.
func logging(t *testing.T, o Options) (*door, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	driver := memory.New(nil)
	o.Driver, o.Key, o.Log = driver, testKey, slog.New(slog.NewTextHandler(&log, nil))
	g, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		g.Close(context.Background())
		driver.Close(context.Background())
	})
	return &door{t, g}, &log
}

// A page whose host name resolves to the gateway has the gateway's origin, and must not use locks.
func TestHosts(t *testing.T) {
	t.Parallel()
	d, log := logging(t, Options{
		Hosts:       []string{"locks", "*.Example.com"},
		Certificate: func() *x509.Certificate { return &x509.Certificate{DNSNames: []string{"door.test"}} },
	})
	verified := func(r *http.Request) {
		r.TLS = &tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{{}}}}
	}
	for _, x := range []struct {
		host, path string
		change     func(*http.Request)
		permitted  bool
	}{
		{host: "evil.test:7481"}, {host: "localhost.evil.test"}, {host: "127.0.0.1.evil.test"}, {host: "a.b.example.com"},
		{host: "evil.test", path: docsPath}, {host: "127.1"}, {host: "[::1" + ".evil.test]"},
		{host: "evil.test", path: "/livez", permitted: true}, {host: "pod-0.test", path: "/readyz", permitted: true},
		{host: "evil.test", change: verified, permitted: true},
		{host: "127.0.0.1:7481", permitted: true}, {host: "10.1.2.3", permitted: true}, {host: "[::1]:7481", permitted: true},
		{host: "[fe80::1]", permitted: true}, {host: "LOCALHOST:1", permitted: true}, {host: "localhost.:1", permitted: true},
		{host: "locks:7481", permitted: true}, {host: "a.example.com", permitted: true}, {host: "door.test", permitted: true},
		{host: "", permitted: true},
	} {
		path := x.path
		if path == "" {
			path = "/v1/locks"
		}
		got := d.send(t.Context(), http.MethodGet, path, "", func(r *http.Request) {
			r.Host = x.host
			if x.change != nil {
				x.change(r)
			}
		})
		if (got.status != http.StatusMisdirectedRequest) != x.permitted {
			t.Errorf("%q at %s: %d %s, want it permitted: %v", x.host, path, got.status, got.text, x.permitted)
		}
		if !x.permitted {
			p := d.refuses(got, 421, codeMisdirected)
			if !strings.Contains(p["detail"].(string), "--http-host") {
				t.Errorf("the answer names no option: %v", p)
			}
		}
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 1 || !strings.Contains(log.String(), "evil.test") {
		t.Errorf("%d warnings, want one: %s", n, log)
	}
}

// The gateway refuses requests that a browser sends for a page of another origin, except for the documentation.
func TestCrossSiteReadsAreRefused(t *testing.T) {
	t.Parallel()
	d, _ := logging(t, Options{})
	get := func(path, site string) reply {
		return d.send(t.Context(), http.MethodGet, path, "", func(r *http.Request) {
			r.Header.Set("Sec-Fetch-Site", site)
		})
	}
	for _, site := range []string{"cross-site", "same-site"} {
		for _, path := range []string{"/v1/locks", "/v1/locks/x", "/v1/locks/x/watch", readyPath} {
			d.refuses(get(path, site), 403, codeDenied)
		}
		for _, path := range []string{docsPath, specificationPath} {
			if got := get(path, site); got.status != 200 {
				t.Errorf("%s for a %s page: %d", path, site, got.status)
			}
		}
	}
	for _, site := range []string{"", "none", "same-origin"} {
		if got := get("/v1/locks", site); got.status != 200 {
			t.Errorf("%q: %d", site, got.status)
		}
	}
}

// The log has a line for each request, with the request id of the answer; probes have no line.
func TestAccessLog(t *testing.T) {
	t.Parallel()
	d, log := logging(t, Options{AccessLog: true})
	with := func(id string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set(requestIDHeader, id) }
	}
	d.granted(d.send(t.Context(), http.MethodPost, "/v1/locks/a%2Fb/acquire", acquireOf("a", ""), with("from-a-proxy")))
	forced := d.send(t.Context(), http.MethodPost, "/v1/locks/a%2Fb/force-release", `{"reason":"stuck"}`)
	forged := d.send(t.Context(), http.MethodGet, "/v1/locks/x", "", with("two\nlines"))
	d.get("/livez")
	d.get("/readyz")
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	if len(lines) != 4 {
		t.Fatalf("%d lines, want 4: %s", len(lines), log)
	}
	for i, parts := range [][]string{
		{"id=from-a-proxy", `client="address 127.0.0.1"`, "method=POST", "path=/v1/locks/a%2Fb/acquire", "status=200"},
		{"a lock was force-released", "id=" + forced.header.Get(requestIDHeader), "lock=a/b", "reason=stuck"},
		{"id=" + forced.header.Get(requestIDHeader), "status=200"},
		{"id=" + forged.header.Get(requestIDHeader), "status=404"},
	} {
		for _, part := range parts {
			if !strings.Contains(lines[i], part) {
				t.Errorf("no %q in %s", part, lines[i])
			}
		}
	}
	if id := forged.header.Get(requestIDHeader); len(id) < 16 || strings.Contains(id, "\n") {
		t.Errorf("id %q", id)
	}
}
