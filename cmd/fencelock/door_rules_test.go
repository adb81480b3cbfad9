//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/testcert"
)

// ruledDoor is an HTTP server before a cluster with rules.
type ruledDoor struct {
	t      *testing.T
	url    string
	client *http.Client
	tokens map[string]string
}

func (d *ruledDoor) send(ctx context.Context, who, method, path, body string) *http.Response {
	d.t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, d.url+path, bytes.NewBufferString(body))
	if err != nil {
		d.t.Fatal(err)
	}
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	if who != "" {
		r.Header.Set("Authorization", "Bearer "+d.tokens[who])
	}
	resp, err := d.client.Do(r)
	if err != nil {
		d.t.Fatal(err)
	}
	return resp
}

// want sends a request with the token of a name, or without one, and returns the answer, which has that status.
func (d *ruledDoor) want(status int, who, method, path, body string) string {
	d.t.Helper()
	resp := d.send(d.t.Context(), who, method, path, body)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != status {
		d.t.Errorf("%s %s by %q: %d, %v, want %d: %s", method, path, who, resp.StatusCode, err, status, text)
	}
	return string(text)
}

// watch follows a lock, and returns the next line with text of the watch.
func (d *ruledDoor) watch(who, path string) (next func(text string) string) {
	d.t.Helper()
	resp := d.send(d.t.Context(), who, "GET", path, "")
	d.t.Cleanup(func() { resp.Body.Close() })
	lines := bufio.NewScanner(resp.Body)
	return func(text string) string {
		for lines.Scan() {
			if strings.Contains(lines.Text(), text) {
				return lines.Text()
			}
		}
		d.t.Errorf("the watch ends before %q: %v", text, lines.Err())
		return ""
	}
}

// The rules of a cluster decide for the users of a member's HTTP server, and of a gateway that may act for others: what a
// user may do, at names that the gateway may proxy.
func TestDoorsUnderRules(t *testing.T) {
	t.Parallel()
	const rules = "allow token:gateway proxy jobs\nallow token:ci acquire jobs\nallow token:seer read jobs\n" +
		"allow token:ops acquire,read,force,admin,proxy \"\"\n"
	authority := testcert.New(t)
	cert, key := authority.Sign(t, "localhost")
	tokens := map[string]string{"stranger": principal.NewToken()}
	lines := ""
	for _, name := range []string{"gateway", "ci", "seer", "ops"} {
		tokens[name] = principal.NewToken()
		lines += lineOf(principal.Principal("token:"+name), tokens[name])
	}
	principals := fileOf(t, "principals", lines)
	data, audit := filepath.Join(t.TempDir(), "data"), t.TempDir()
	member := start(t, "serve", "--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0", "--data-dir", data,
		"--tls-cert", cert, "--tls-key", key, "--cluster-ca", authority.File, "--http-listen", "127.0.0.1:0",
		"--principals", principals, "--rules", fileOf(t, "rules", rules), "--audit", audit)
	address := member.await("fencelock: serving clients at ")
	at := "localhost" + address[strings.LastIndex(address, ":"):]
	door := member.await("fencelock: serving HTTP at ")
	backend := "fencelocks://" + at + "?ca=" + authority.File + "&credential="
	gateway := start(t, "gateway", "--backend", backend+fileOf(t, "credential", tokens["gateway"]),
		"--http-listen", "127.0.0.1:0", "--principals", principals)

	pool := x509.NewCertPool()
	if text, err := os.ReadFile(authority.File); err != nil || !pool.AppendCertsFromPEM(text) {
		t.Fatal(err)
	}
	secure := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, ServerName: "localhost"},
	}}
	const acquire = `{"ownerId":"%","ttlMillis":600000}`
	as := func(owner string) string { return strings.Replace(acquire, "%", owner, 1) }
	doors := map[string]*ruledDoor{
		"member":  {t, door, secure, tokens},
		"gateway": {t, gateway.await("fencelock: serving HTTP at "), http.DefaultClient, tokens},
	}
	for name, d := range doors {
		eventually(t, "the rules are in force", func() bool {
			resp := d.send(t.Context(), "", "GET", "/v1/locks/else", "")
			resp.Body.Close()
			return resp.StatusCode == http.StatusForbidden
		})
		lock := "/v1/locks/jobs%2F" + name
		d.want(401, "stranger", "GET", lock, "")
		if text := d.want(403, "", "POST", lock+"/acquire", as("o")); !strings.Contains(text, "address:127.0.0.1 may not acquire") {
			t.Errorf("without a credential: %s", text)
		}
		d.want(403, "seer", "POST", lock+"/acquire", as("o"))
		d.want(403, "ci", "POST", "/v1/locks/else/acquire", as("o"))
		d.want(403, "ci", "POST", "/v1/locks:acquireAll", strings.Replace(as("o"), "{",
			`{"requests":[{"lockKey":"jobs/x"},{"lockKey":"else"}],`, 1))
		status := 200 // a member may proxy each name
		if name == "gateway" {
			status = 403
		}
		d.want(status, "ops", "POST", "/v1/locks/else/acquire", as("o"))
		d.want(status, "ops", "GET", "/v1/locks/else", "")

		next := d.watch("seer", lock+"/watch")
		next("watching")
		var held struct {
			LockToken string `json:"lockToken"`
		}
		if err := json.Unmarshal([]byte(d.want(200, "ci", "POST", lock+"/acquire", as("somebody"))), &held); err != nil {
			t.Fatal(err)
		}
		next(`"ownerId":"somebody"`)
		for who, shown := range map[string]bool{"ci": false, "ops": true} {
			if text := d.want(409, who, "POST", lock+"/acquire", as("another")); strings.Contains(text, "somebody") != shown {
				t.Errorf("%s: who holds it, for %s: %s", name, who, text)
			}
			if text := d.want(200, who, "GET", "/v1/locks?prefix=jobs", ""); strings.Contains(text, "somebody") != shown {
				t.Errorf("%s: the list for %s: %s", name, who, text)
			}
		}
		for who, status := range map[string]int{"": 403, "ci": 403, "seer": 200, "ops": 200} {
			d.want(status, who, "GET", lock, "")
		}
		d.want(403, "ops", "POST", lock+"/force-release", `{"reason":"a test"}`)
		token := `{"lockToken":"` + held.LockToken + `"}`
		d.want(403, "ops", "POST", lock+"/release", token)
		d.want(200, "ci", "POST", lock+"/renew", token)
		d.want(200, "ci", "POST", lock+"/release", token)
		next(`"type":"released"`)
	}
	gateway.terminate()
	member.terminate()
	text, err := os.ReadFile(filepath.Join(audit, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for want, times := range map[string]int{
		`"event":"acquire","outcome":"denied","principal":"token:seer","via":"token:gateway"`:      1,
		`"event":"acquire","outcome":"denied","principal":"token:seer","via":"process:"`:           1,
		`"event":"force-release","outcome":"denied","principal":"token:ops","via":"token:gateway"`: 1,
		`"event":"acquire","outcome":"denied","principal":"token:seer"`:                            2,
	} {
		if n := bytes.Count(text, []byte(want)); n != times {
			t.Errorf("%d lines of %s, want %d", n, want, times)
		}
	}
}
