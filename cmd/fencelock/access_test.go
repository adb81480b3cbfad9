//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/testcert"
)

// replace replaces a file in one step, as tools that replace secrets do.
func replace(t *testing.T, path, text string) {
	t.Helper()
	next := path + ".next"
	if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, path); err != nil {
		t.Fatal(err)
	}
}

func lineOf(who principal.Principal, token string) string {
	return principal.TokenLine(who, token, time.Time{}) + "\n"
}

// The command line uses a gateway as a principal, with the token of a file or a certificate, and exits with 77 where the
// rules deny it.
func TestGatewayWithRules(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	cert, key := authority.Sign(t, "localhost")
	ci, other := principal.NewToken(), principal.NewToken()
	principals := lineOf("token:ci", ci) + lineOf("token:other", other) + "cert:pay \"CN=localhost\"\n"
	gateway := start(t, "gateway", "--backend", startServer(t), "--http-listen", "127.0.0.1:0", "--tls-cert", cert,
		"--tls-key", key, "--tls-client-ca", authority.File, "--principals", fileOf(t, "principals", principals),
		"--rules", fileOf(t, "rules", "allow token:ci acquire jobs\nallow cert:pay acquire pay\n"))
	addr := gateway.await("fencelock: serving HTTP at ")
	url := "https://localhost" + addr[strings.LastIndex(addr, ":"):] + "?ca=" + authority.File + "&cert=" + cert +
		"&key=" + key
	as := func(token string) string { return url + "&credential=" + fileOf(t, "credential", token+"\n") }
	lock := filepath.Join(t.TempDir(), "lock")
	call := func(word, name, url string) *program {
		return start(t, word, name, "--backend", url, "--token-file", lock)
	}
	call("acquire", "pay/1", as(ci)).expectExit(exitDenied, "token:ci may not acquire")
	call("acquire", "jobs/1", url).expectExit(exitDenied, "cert:pay may not acquire")
	call("acquire", "pay/1", url).expectExit(exitOK)
	call("release", "pay/1", url).expectExit(exitOK)
	call("acquire", "jobs/1", as(ci)).expectExit(exitOK)
	call("renew", "jobs/1", as(other)).expectExit(exitUsage, "another principal")
	call("renew", "jobs/1", as(principal.NewToken())).expectExit(exitDenied, "the token is unknown")
	call("release", "jobs/1", as(ci)).expectExit(exitOK)
	gateway.terminate()
}

func TestGatewayWithRulesThatMakeNoSense(t *testing.T) {
	t.Parallel()
	good, wrong := fileOf(t, "good", ""), fileOf(t, "wrong", "# one\nallow all\n")
	for args, want := range map[string]string{
		"--rules " + good:                                     "--rules needs --principals",
		"--principals " + good:                                "--principals needs --rules",
		"--rules " + wrong + " --principals " + good:          "--rules " + wrong + `: line 2: "all": the verbs are missing`,
		"--rules " + good + " --principals " + wrong:          "--principals " + wrong + `: line 2: "allow": want KIND:NAME`,
		"--rules " + good + " --principals " + good + ".none": "no such file",
	} {
		args := append([]string{"gateway", "--backend", "memory://", "--http-listen", "127.0.0.1:0"}, strings.Fields(args)...)
		start(t, args...).expectExit(exitUsage, want)
	}
	credential := fileOf(t, "credential", principal.NewToken())
	for url, want := range map[string]string{
		"http://192.0.2.1:7481?credential=" + credential: "a credential needs https",
		"http://127.0.0.1:1?credential=" + good:          "it is not a token",
		"http://127.0.0.1:1?credential=/none":            "no such file",
	} {
		start(t, "acquire", "x", "--backend", url).expectExit(exitUsage, want)
	}
}

// Tokens, rules and a file that makes no sense are replaced while clients work: no call fails, and no hold is lost.
func TestAccessFilesAreReplacedUnderLoad(t *testing.T) {
	t.Parallel()
	const rulesText = "allow token:ci acquire,read jobs\n"
	token := principal.NewToken()
	principals := fileOf(t, "principals", lineOf("token:ci", token))
	rules := fileOf(t, "rules", rulesText)
	gateway := start(t, "gateway", "--backend", startServer(t), "--http-listen", "127.0.0.1:0",
		"--principals", principals, "--rules", rules, "--access-log=false")
	addr := gateway.await("fencelock: serving HTTP at ")
	credential := fileOf(t, "credential", token)
	by := &bearer{http.DefaultTransport, credential}
	at := func(name, call string) string { return addr + "/v1/locks/" + name + "/" + call }
	ask := func(name, call string, body map[string]any) (lock map[string]any, err error) {
		text, _, err := exchange(context.WithoutCancel(t.Context()), by, at("jobs%2F"+name, call), body)
		if err == nil {
			err = json.Unmarshal(text, &lock)
		}
		return lock, err
	}
	kept, err := ask("kept", "acquire", map[string]any{"ownerId": "o", "ttlMillis": 600_000})
	if err != nil {
		t.Fatal(err)
	}
	var calls [4]atomic.Int64 // of each client
	done := make(chan struct{})
	var clients sync.WaitGroup
	for i := range calls {
		clients.Go(func() {
			name := fmt.Sprint("client-", i)
			for {
				select {
				case <-done:
					return
				default:
				}
				lock, err := ask(name, "acquire", map[string]any{"ownerId": name, "ttlMillis": 600_000})
				for _, call := range []string{"renew", "release"} {
					if err == nil {
						_, err = ask(name, call, map[string]any{"lockToken": lock["lockToken"]})
					}
				}
				if err == nil && i == 0 {
					_, err = ask("kept", "renew", map[string]any{"lockToken": kept["lockToken"]})
				}
				if err != nil {
					t.Errorf("%s: %v", name, err)
					return
				}
				calls[i].Add(1)
			}
		})
	}
	// accepted reports whether the gateway knows a token.
	accepted := func(token string) bool {
		with := &bearer{http.DefaultTransport, fileOf(t, "probe", token)}
		_, _, err := exchange(t.Context(), with, at("jobs%2Fkept", "renew"), map[string]any{"lockToken": kept["lockToken"]})
		return err == nil
	}
	// works waits until each client has begun and ended a round: it has read its files since.
	works := func() {
		t.Helper()
		for i := range calls {
			before := calls[i].Load()
			eventually(t, "the client goes on", func() bool { return calls[i].Load() > before+1 || t.Failed() })
		}
	}
	works()
	for round := range 3 {
		fresh := principal.NewToken()
		replace(t, principals, lineOf("token:ci", token)+lineOf("token:ci", fresh))
		eventually(t, "the fresh token is accepted", func() bool { return accepted(fresh) })
		replace(t, credential, fresh)
		works() // by now all requests have it
		replace(t, principals, lineOf("token:ci", fresh))
		eventually(t, "the old token is refused", func() bool { return !accepted(token) })
		token = fresh
		works()
		replace(t, rules, "what is this\n")
		replace(t, principals, "token:ci\n")
		warnings := 2 * (round + 1)
		eventually(t, "the files are refused", func() bool {
			accepted(token) // a request has them looked at
			return strings.Count(gateway.Stderr(), "a changed file is invalid") >= warnings
		})
		works()
		replace(t, principals, lineOf("token:ci", token))
		replace(t, rules, fmt.Sprintf("# round %d\n%s", round, rulesText))
		works()
	}
	close(done)
	clients.Wait()
	if _, err := ask("kept", "release", map[string]any{"lockToken": kept["lockToken"]}); err != nil {
		t.Errorf("the hold that was kept: %v", err)
	}
	replace(t, rules, "deny * acquire \"\"\n")
	eventually(t, "new rules count", func() bool {
		_, err := ask("kept", "acquire", map[string]any{"ownerId": "o", "ttlMillis": 10_000})
		return errors.Is(err, fencelock.ErrDenied)
	})
	gateway.terminate()
}
