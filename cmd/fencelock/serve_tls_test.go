//go:build unix

package main

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testcert"
)

// tlsOf returns the settings of a client that trusts an authority and has a certificate from it.
func tlsOf(t *testing.T, a *testcert.Authority) *tls.Config {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(a.Sign(t, "client"))
	if err != nil {
		t.Fatal(err)
	}
	pool, err := authority("--tls-client-ca", a.File)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: pool, Certificates: []tls.Certificate{pair}, ServerName: "door",
	}
}

// The set-ups of TLS in which the HTTP server of a member reaches no member over the network.
func TestServeHTTPOverTLS(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		name   string
		uses   []x509.ExtKeyUsage
		mutual bool
		listen string
	}{
		{name: "private authority", listen: "127.0.0.1:0"},
		{name: "host name", listen: "localhost:0"},
		{
			name: "certificate for servers", uses: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, mutual: true,
			listen: "127.0.0.1:0",
		},
		{name: "all addresses", mutual: true, listen: "0.0.0.0:0"},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			a := testcert.New(t)
			cert, key := a.Sign(t, "door", x.uses...)
			args := []string{"serve", "--dev", "--listen", x.listen, "--http-listen", "127.0.0.1:0",
				"--tls-cert", cert, "--tls-key", key}
			if x.mutual {
				args = append(args, "--tls-client-ca", a.File)
			}
			p := start(t, args...)
			url := p.await("fencelock: serving HTTP at ")
			transport := &http.Transport{TLSClientConfig: tlsOf(t, a), ForceAttemptHTTP2: true}
			t.Cleanup(transport.CloseIdleConnections)
			client := &http.Client{Transport: transport}
			eventually(t, "the member is ready over HTTP", func() bool {
				resp, err := client.Get(url + "/readyz")
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				if resp.ProtoMajor != 2 {
					t.Errorf("it speaks %s", resp.Proto)
				}
				return resp.StatusCode == 200
			})
			if warned := strings.Contains(p.Stderr(), "the cluster has no rules"); warned != x.mutual {
				t.Errorf("the leader warns of missing rules: %v, want %v", warned, x.mutual)
			}
			resp, err := client.Post(url+"/v1/locks/x/acquire", "application/json", strings.NewReader(acquireBody))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != 200 {
				t.Errorf("acquire: %s", resp.Status)
			}
			p.terminate()
		})
	}
}

// A member that could serve HTTP only while it leads does not start, and says what to do.
func TestServeHTTPRefusesWhatCannotServe(t *testing.T) {
	t.Parallel()
	a, other := testcert.New(t), testcert.New(t)
	peers := freeport.Addresses(t, 2)
	server, serverKey := a.Sign(t, "localhost", x509.ExtKeyUsageServerAuth)
	both, bothKey := a.Sign(t, "localhost")
	own := " --tls-cert " + server + " --tls-key " + serverKey
	client := " --tls-cert " + both + " --tls-key " + bothKey
	for _, x := range []struct{ args, want string }{
		{"--listen localhost:0" + own, "--cluster-ca"},
		{"--listen 127.0.0.1:0 --cluster-ca " + a.File + own, "--advertise"},
		{"--listen localhost:0 --cluster-ca " + other.File + client, "--cluster-ca"},
		{"--listen localhost:0 --tls-client-ca " + a.File + own, "--cluster-cert"},
		{"--listen :0 --tls-client-ca " + a.File + client, "--advertise"},
		{"--listen 0.0.0.0:0 --insecure", "--advertise"},
		{"--listen localhost:0 --cluster-ca " + a.File, "--tls-cert"},
	} {
		args := append([]string{"serve", "--dev", "--http-listen", "127.0.0.1:0", "--peer-listen", peers[0],
			"--join", strings.Join(peers, ",")}, strings.Fields(x.args)...)
		start(t, args...).expectExit(exitUsage, x.want)
	}
}

// After SIGHUP, every listener serves the new certificate, and the programs run on.
func TestHangup(t *testing.T) {
	t.Parallel()
	a, dir := testcert.New(t), t.TempDir()
	cert, key := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	replace := func(name string) {
		fromCert, fromKey := a.Sign(t, name)
		if err := os.Rename(fromCert, cert); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(fromKey, key); err != nil {
			t.Fatal(err)
		}
	}
	replace("door")
	p := start(t, "serve", "--dev", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
		"--tls-cert", cert, "--tls-key", key, "--peer-listen", "127.0.0.1:0", "--peer-cert", cert,
		"--peer-key", key, "--peer-ca", a.File)
	clients := p.await("fencelock: serving clients at ")
	url := strings.TrimPrefix(p.await("fencelock: serving HTTP at "), "https://")
	g := start(t, "gateway", "--backend", "fencelocks://"+clients+"?ca="+a.File+"&server-name=door",
		"--http-listen", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key)
	gateway := strings.TrimPrefix(g.await("fencelock: serving HTTP at "), "https://")
	names := func(at string) string {
		config := tlsOf(t, a)
		config.InsecureSkipVerify = true // the test looks only at the name
		config.NextProtos = []string{"h2"}
		c, err := tls.Dial("tcp", at, config)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	replace("renewed")
	for _, p := range []*program{p, g} {
		if err := syscall.Kill(p.Pid(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		eventually(t, "SIGHUP is logged", func() bool { return strings.Contains(p.Stderr(), "SIGHUP") })
	}
	for _, at := range []string{clients, url, gateway} {
		eventually(t, "the new certificate is served", func() bool { return names(at) == "renewed" })
	}
	g.terminate()
	p.terminate()
}
