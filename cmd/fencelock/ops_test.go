//go:build unix

package main

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testcert"
)

// Probes and scrapes need no certificate where clients need one, and reach no other route.
func TestOpsListenerNeedsNoCertificate(t *testing.T) {
	t.Parallel()
	a := testcert.New(t)
	cert, key := a.Sign(t, "localhost")
	withTLS := []string{"--tls-cert", cert, "--tls-key", key, "--tls-client-ca", a.File, "--ops-listen", "127.0.0.1:0"}
	member := start(t, append([]string{"serve", "--data-dir", filepath.Join(t.TempDir(), "data"), "--peer-listen",
		"127.0.0.1:0", "--listen", "127.0.0.1:0"}, withTLS...)...)
	memberOps := member.await("fencelock: serving probes at ")
	url := "fencelocks://" + member.await("fencelock: serving clients at ") + "?server-name=localhost&ca=" + a.File +
		"&cert=" + cert + "&key=" + key
	gateway := start(t, append([]string{"gateway", "--backend", url, "--http-listen", "127.0.0.1:0"}, withTLS...)...)
	gatewayOps := gateway.await("fencelock: serving probes at ")
	gateway.await("fencelock: serving HTTP at ")
	for _, at := range []string{memberOps, gatewayOps} {
		eventually(t, at+" is ready", func() bool {
			status, _ := fetch(t, at+"/readyz")
			return status == http.StatusOK
		})
		for path, want := range map[string]int{
			"/livez": http.StatusOK, "/metrics": http.StatusOK, "/v1/locks": http.StatusNotFound, "/docs": http.StatusNotFound,
		} {
			if status, text := fetch(t, at+path); status != want {
				t.Errorf("%s%s: %d %s", at, path, status, text)
			}
		}
		exports(t, at, `fencelock_certificate_expiry_timestamp_seconds{use="clients"}`)
	}
	gateway.terminate()
	member.terminate()
}

// From INT or TERM on a process is not ready, and serves until the drain period is over; the next signal ends it.
func TestDrain(t *testing.T) {
	t.Parallel()
	addrs := freeport.Addresses(t, 2)
	p := start(t, "serve", "--dev", "--listen", "127.0.0.1:0", "--http-listen", addrs[0], "--ops-listen", addrs[1],
		"--drain", "10m")
	url := "fencelock://" + p.await("fencelock: serving clients at ")
	p.await("fencelock: serving HTTP at ")
	g := start(t, "gateway", "--backend", url, "--http-listen", "127.0.0.1:0", "--drain", "10m")
	door := g.await("fencelock: serving HTTP at ")
	for _, x := range []struct {
		of     *program
		probed []string
		lock   string
	}{
		{g, []string{door}, door + "/v1/locks/x"},
		{p, []string{"http://" + addrs[0], "http://" + addrs[1]}, "http://" + addrs[0] + "/v1/locks/y"},
	} {
		for _, at := range x.probed {
			eventually(t, at+" is ready", func() bool {
				status, _ := fetch(t, at+"/readyz")
				return status == http.StatusOK
			})
		}
		if err := x.of.Terminate(); err != nil {
			t.Fatal(err)
		}
		for _, at := range x.probed {
			eventually(t, at+" is not ready", func() bool {
				status, text := fetch(t, at+"/readyz")
				return status == http.StatusServiceUnavailable && strings.Contains(text, "stopping")
			})
			if status, _ := fetch(t, at+"/livez"); status != http.StatusOK {
				t.Errorf("%s is not live: %d", at, status)
			}
		}
		if status, answer := call(t, http.MethodPost, x.lock+"/acquire", acquireBody); status != 200 {
			t.Errorf("acquire while it drains: %d %v", status, answer)
		}
		if err := x.of.Terminate(); err != nil {
			t.Fatal(err)
		}
		if err := x.of.end(); err == nil {
			t.Error("the second signal is waited out")
		}
	}
	p, _ = serving(t, "--dev", "--drain", "1ms")
	p.terminate()
}
