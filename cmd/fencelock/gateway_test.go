//go:build unix

package main

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/freeport"
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

const acquireBody = `{"ownerId":"a","ttlMillis":600000,"requestId":"req-1"}`

// Two gateways serve the same locks over HTTP: each continues with the grants of the other, also after the other has
// ended.
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

// The names of --http-host, of which a file may have a list, are answered, and no others; requests are logged.
func TestHTTPHosts(t *testing.T) {
	t.Parallel()
	p := start(t, "serve", "--dev", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
		"--config", configFile(t, "http-host: [locks, \"*.example.com\"]"))
	door := p.await("fencelock: serving HTTP at ")
	for host, want := range map[string]int{
		"locks": 200, "a.example.com:80": 200, "evil.test": http.StatusMisdirectedRequest,
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, door+"/v1/locks", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = host
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%s: %d, want %d", host, resp.StatusCode, want)
		}
		eventually(t, "a line in the log has the id", func() bool {
			return strings.Contains(p.Stderr(), "msg=request id="+resp.Header.Get("X-Request-Id"))
		})
	}
	p.terminate()
}

func TestServeHTTP(t *testing.T) {
	t.Parallel()
	p := start(t, "serve", "--dev", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--http-key", keyFile(t))
	backend := "fencelock://" + p.await("fencelock: serving clients at ")
	door := p.await("fencelock: serving HTTP at ")
	status, granted := call(t, http.MethodPost, door+"/v1/locks/x/acquire", acquireBody)
	if status != 200 || granted["fencingToken"] != nil { // a development server stores nothing, so it does not fence
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

// The page counts the holds of the cluster, also on a member without a listener for metrics.
func TestPageCountsHolds(t *testing.T) {
	t.Parallel()
	p := start(t, "serve", "--dev", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--http-key", keyFile(t))
	door := p.await("fencelock: serving HTTP at ")
	hold := `{"ownerId":"a","ttlMillis":600000}`
	if status, answer := call(t, http.MethodPost, door+"/v1/locks/x/acquire", hold); status != 200 {
		t.Fatalf("acquire: %d %v", status, answer)
	}
	wait := `{"ownerId":"b","ttlMillis":600000,"wait":true,"waitMillis":1,"keepPlace":true,"requestId":"r"}`
	pageCounts(t, door, func() { call(t, http.MethodPost, door+"/v1/locks/x/acquire", wait) })
	p.terminate()
}

// pageCounts awaits that the page shows one hold and one wait, with their limits. wait begins the wait, or keeps its
// place.
func pageCounts(t *testing.T, door string, wait func()) {
	t.Helper()
	eventually(t, "the page shows one hold and one wait", func() bool {
		wait()
		_, shown := call(t, http.MethodGet, door+"/page/service", "")
		all, _ := shown["limits"].([]any)
		used := map[any]any{}
		for _, each := range all {
			if of := each.(map[string]any); of["limit"].(float64) > 0 {
				used[of["what"]] = of["used"]
			}
		}
		return used["holds"] == 1.0 && used["waits"] == 1.0
	})
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
		{"--http-key " + short, "want at least 16"},
		{"--http-key nowhere", "--http-key"},
	} {
		start(t, append([]string{"gateway"}, strings.Fields(x.args)...)...).
			expectExit(exitUsage, x.want, "fencelock help gateway")
	}
	start(t, "gateway", "--backend", "redis://127.0.0.1:1", "--http-listen", "192.0.2.1:0", "--insecure").
		expectExit(exitUnavailable, "192.0.2.1")
	start(t, "gateway", "--backend", "carrier-pigeon://loft", "--http-listen", "127.0.0.1:0").expectExit(exitUsage, "pigeon")
}

// A gateway that starts before its lock service is live, and becomes ready when the service is there.
func TestGatewayWaitsForItsBackend(t *testing.T) {
	t.Parallel()
	addrs := freeport.Addresses(t, 2)
	door := "http://" + addrs[0]
	p := start(t, "gateway", "--backend", "fencelock://"+addrs[1], "--http-listen", addrs[0])
	eventually(t, "the gateway listens", func() bool {
		r, err := http.Get(door + "/livez")
		if err != nil {
			return false
		}
		r.Body.Close()
		return r.StatusCode == http.StatusOK
	})
	if status, answer := call(t, http.MethodGet, door+"/readyz", ""); status != 503 || answer["ready"] != false ||
		answer["detail"] == "" {
		t.Errorf("readyz: %d %v", status, answer)
	}
	if status, answer := call(t, http.MethodPost, door+"/v1/locks/x/acquire", acquireBody); status != 503 ||
		answer["error"] != "UNAVAILABLE" {
		t.Errorf("acquire: %d %v", status, answer)
	}
	server := start(t, "serve", "--dev", "--listen", addrs[1])
	server.await("fencelock: serving clients at ")
	p.await("fencelock: serving HTTP at ")
	if status, answer := call(t, http.MethodGet, door+"/readyz", ""); status != 200 {
		t.Errorf("readyz: %d %v", status, answer)
	}
	if status, answer := call(t, http.MethodPost, door+"/v1/locks/x/acquire", acquireBody); status != 200 {
		t.Errorf("acquire: %d %v", status, answer)
	}
	p.terminate()

	p = start(t, "gateway", "--backend", "redis://127.0.0.1:1", "--http-listen", addrs[0])
	eventually(t, "the log says what is missing", func() bool { return strings.Contains(p.Stderr(), "cannot be reached; trying again") })
	p.terminate()
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
		at("acquire", "a/b", "--ttl", "10m", "--token-file", file).expectExit(exitOK)
		start(t, "holder", "a/b", "--backend", direct).expectExit(exitOK)
		at("acquire", "a/b", "--try").expectExit(exitHeld)
		answered(300*time.Millisecond, func(wait string) *program {
			return at("acquire", "a/b", "--wait", wait)
		}).expectExit(exitHeld)
		at("renew", "a/b", "--token-file", file, "--ttl", "20m").expectExit(exitOK)
		at("release", "x", "--token-file", file).expectExit(exitUsage)
		at("release", "a/b", "--token-file", file).expectExit(exitOK)
		at("renew", "a/b", "--token-file", file).expectExit(exitLost)
		if backend == direct { // a gateway remembers its releases
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

// The key of lock tokens changes while a gateway serves: HUP reads the files, what was granted before is renewed, and a
// repeat is the same request.
func TestGatewayChangesItsKey(t *testing.T) {
	t.Parallel()
	dir, key := t.TempDir(), keyFile(t)
	current, previous := filepath.Join(dir, "current"), filepath.Join(dir, "previous")
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(current, "the first key of all replicas")
	write(previous, "the first key of all replicas")
	_, backend := serving(t, "--dev")
	start(t, "gateway", "--backend", backend, "--http-key", current+","+previous).
		expectExit(exitUsage, "--http-identity-key")
	p := start(t, "gateway", "--backend", backend, "--http-listen", "127.0.0.1:0", "--http-key", current+","+previous,
		"--http-identity-key", key)
	door := p.await("fencelock: serving HTTP at ")
	_, granted := call(t, http.MethodPost, door+"/v1/locks/x/acquire", acquireBody)
	before := granted["lockToken"].(string)
	write(current, "the second key of all replicas")
	if err := syscall.Kill(p.Pid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the keys are read", func() bool { return strings.Contains(p.Stderr(), "the keys of lock tokens were reloaded") })
	if status, got := call(t, http.MethodPost, door+"/v1/locks/x/renew", `{"lockToken":"`+before+`"}`); status != 200 {
		t.Errorf("renewal with the token of before: %d %v", status, got)
	}
	status, again := call(t, http.MethodPost, door+"/v1/locks/x/acquire", acquireBody)
	if status != 200 || again["lockToken"] == before || again["expiresAt"] == nil {
		t.Errorf("the same request: %d %v", status, again)
	}
	write(current, "short")
	if err := syscall.Kill(p.Pid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the short key is refused", func() bool { return strings.Contains(p.Stderr(), "the new keys of lock tokens are invalid") })
	if status, got := call(t, http.MethodPost, door+"/v1/locks/x/release",
		`{"lockToken":"`+again["lockToken"].(string)+`"}`); status != 200 {
		t.Errorf("release: %d %v", status, got)
	}
	p.terminate()
}
