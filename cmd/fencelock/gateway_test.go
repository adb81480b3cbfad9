//go:build unix

package main

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// call sends one request over HTTP.
func call(t *testing.T, method, url, body string) (status int, answer map[string]any) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil {
		err = json.Unmarshal(text, &answer)
	}
	if err != nil {
		t.Fatalf("%s %s: %v: %s", method, url, err, text)
	}
	return resp.StatusCode, answer
}

func keyFile(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte("what all replicas share\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

const acquireBody = `{"ownerId":"a","ttlMillis":20000,"requestId":"req-1"}`

// A member serves HTTP, a gateway does, and each goes on with what the other one was granted, also after its end.
func TestHTTP(t *testing.T) {
	t.Parallel()
	key := keyFile(t)
	_, backend := serving(t, "--data-dir", filepath.Join(t.TempDir(), "data"))
	replica := func() (*program, string) {
		p := start(t, "gateway", "--backend", backend, "--http-listen", "127.0.0.1:0",
			"--http-key", key, "--tier", "correctness")
		return p, p.await("fencelock: serving HTTP at ")
	}
	first, one := replica()
	second, two := replica()
	status, granted := call(t, http.MethodPost, one+"/v1/locks/a%2Fb/acquire", acquireBody)
	if status != 200 {
		t.Fatalf("acquire: %d %v", status, granted)
	}
	status, again := call(t, http.MethodPost, two+"/v1/locks/a%2Fb/acquire", acquireBody)
	if status != 200 || again["lockToken"] != granted["lockToken"] || again["fencingToken"] != granted["fencingToken"] {
		t.Errorf("the same request at another replica: %d %v, want %v", status, again, granted)
	}
	token := `{"lockToken":"` + granted["lockToken"].(string) + `"}`
	if status, got := call(t, http.MethodPost, one+"/v1/locks/a%2Fb/renew", token); status != 200 {
		t.Errorf("renewal back at the first replica: %d %v", status, got)
	}
	first.terminate()
	if status, got := call(t, http.MethodPost, two+"/v1/locks/a%2Fb/renew", token); status != 200 {
		t.Errorf("renewal after the first replica's end: %d %v", status, got)
	}
	if status, got := call(t, http.MethodPost, two+"/v1/locks/a%2Fb/release", token); status != 200 {
		t.Errorf("release: %d %v", status, got)
	}
	second.terminate()
}

func TestServeHTTP(t *testing.T) {
	t.Parallel()
	p := start(t, "serve", "--dev", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--http-key", keyFile(t))
	backend := "fencelock://" + p.await("fencelock: serving clients at ")
	door := p.await("fencelock: serving HTTP at ")
	status, granted := call(t, http.MethodPost, door+"/v1/locks/x/acquire", acquireBody)
	if status != 200 || granted["fencingToken"] != nil { // it keeps nothing, so it does not fence
		t.Fatalf("acquire: %d %v", status, granted)
	}
	if !strings.Contains(succeed(t, "holder", "x", "--backend", backend), " a ") {
		t.Error("the lock that was taken over HTTP is not seen elsewhere")
	}
	status, ready := call(t, http.MethodGet, door+"/readyz", "")
	if status != 200 || ready["backend"] != "builtin" || ready["holdsOutliveReplica"] != true {
		t.Errorf("readyz: %d %v", status, ready)
	}
	p.terminate()
}

func TestGatewayUsage(t *testing.T) {
	t.Parallel()
	short := filepath.Join(t.TempDir(), "short")
	if err := os.WriteFile(short, []byte("short\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct{ args, want string }{
		{"argument", "no arguments"},
		{"--tier best", "efficiency or correctness"},
		{"--http-listen 0.0.0.0:0", "without TLS"},
		{"--http-listen nowhere", "--http-listen"},
		{"--http-key " + short, "fewer than 16"},
		{"--http-key nowhere", "--http-key"},
	} {
		start(t, append([]string{"gateway"}, strings.Fields(x.args)...)...).
			expectExit(exitUsage, x.want, "fencelock help gateway")
	}
	start(t, "gateway", "--backend", "redis://127.0.0.1:1", "--http-listen", "127.0.0.1:0").expectExit(exitUnavailable)
}

// A lock that outlives the command that took it, over a backend and over a gateway.
func TestAcquireRenewRelease(t *testing.T) {
	t.Parallel()
	server := start(t, "serve", "--dev", "--listen", "127.0.0.1:0",
		"--http-listen", "127.0.0.1:0", "--http-key", keyFile(t))
	direct := "fencelock://" + server.await("fencelock: serving clients at ")
	for _, backend := range []string{direct, server.await("fencelock: serving HTTP at ")} {
		at := func(args ...string) *program { return start(t, append(args, "--backend", backend)...) }
		file := filepath.Join(t.TempDir(), "token")
		at("acquire", "a/b", "--ttl", "20s", "--token-file", file).expectExit(exitOK)
		start(t, "holder", "a/b", "--backend", direct).expectExit(exitOK)
		at("acquire", "a/b", "--try").expectExit(exitHeld)
		at("acquire", "a/b", "--wait", "300ms").expectExit(exitHeld)
		at("renew", "a/b", "--token-file", file, "--ttl", "30s").expectExit(exitOK)
		at("release", "x", "--token-file", file).expectExit(exitUsage)
		at("release", "a/b", "--token-file", file).expectExit(exitOK)
		at("renew", "a/b", "--token-file", file).expectExit(exitLost)
		if backend == direct { // a gateway remembers what it released
			at("release", "a/b", "--token-file", file).expectExit(exitLost)
		}

		var lock map[string]any
		if err := json.Unmarshal(
			[]byte(succeed(t, "acquire", "x", "--backend", backend, "--json", "--owner", "me")), &lock,
		); err != nil {
			t.Fatal(err)
		}
		if lock["ownerId"] != "me" || lock["lockKey"] != "x" {
			t.Errorf("--json: %v", lock)
		}
		at("release", "x", "--token", lock["lockToken"].(string)).expectExit(exitOK)
		at("release", "x").expectExit(exitUsage, "--token")
		at("acquire", "x", "--shared", "--permits", "1/2").expectExit(exitUsage, "exclude")
	}
}
