package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"log/slog"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
)

// ruled is a gateway with rules, before a lock service in the process.
type ruled struct {
	*door
	driver  *memory.Driver
	service *deciding         // nil if the gateway decides
	tokens  map[string]string // by name
	audit   *audit.Log
	dir     string // of audit
	rules   atomic.Pointer[rules.Rules]
	proofs  atomic.Pointer[principal.Proofs]
}

// withRules runs a test in simulated time. Each of the names has a token.
func withRules(t *testing.T, text string, names []string, test func(t *testing.T, d *ruled)) {
	t.Helper()
	withRulesAt(t, text, names, false, test)
}

// withRulesAt is withRules where the lock service may have the rules.
func withRulesAt(t *testing.T, text string, names []string, service bool, test func(t *testing.T, d *ruled)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d := &ruled{driver: memory.New(&memory.Options{Clock: backend.GoClock()}), tokens: map[string]string{}}
		d.setRules(t, text)
		lines := ""
		for _, name := range names {
			d.tokens[name] = principal.NewToken()
			lines += principal.TokenLine(principal.Principal("token:"+name), d.tokens[name], time.Time{}) + "\n"
		}
		d.setProofs(t, lines)
		d.dir = t.TempDir()
		var err error
		if d.audit, err = audit.Open(audit.Options{
			Dir: d.dir, Locks: true, Keep: 1, Log: slog.New(slog.DiscardHandler),
		}); err != nil {
			t.Fatal(err)
		}
		defer d.audit.Close(context.Background())
		o := Options{
			Driver: d.driver, Key: testKey, Audit: d.audit, AuditAs: "here",
			Access: &Access{Proofs: d.proofs.Load, Rules: d.rules.Load},
		}
		if service {
			d.service = &deciding{Driver: d.driver, all: d.rules.Load()}
			o.Driver, o.Access.Rules = d.service, nil
		}
		g, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		d.door = &door{t, g}
		defer func() {
			g.Close(context.Background())
			if err := d.driver.Close(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		test(t, d)
	})
}

func (d *ruled) setRules(t *testing.T, text string) {
	t.Helper()
	r, err := rules.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	d.rules.Store(r)
}

func (d *ruled) setProofs(t *testing.T, text string) {
	t.Helper()
	p, err := principal.ParseProofs([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	d.proofs.Store(p)
}

// as sends a request with the token of a name, or without one.
func (d *ruled) as(name, method, path, body string) reply {
	d.t.Helper()
	return d.send(d.t.Context(), method, path, body, d.bears(name))
}

func (d *ruled) bears(name string) func(*http.Request) {
	return func(r *http.Request) {
		r.Header.Del("Authorization")
		if name != "" {
			r.Header.Set("Authorization", "Bearer "+d.tokens[name])
		}
	}
}

// state returns the whole state of the lock service.
func (d *ruled) state(t *testing.T) (all []backend.State) {
	t.Helper()
	for s, err := range d.driver.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	return all
}

const matrixRules = `
allow token:acquirer acquire            a
allow token:reader   read               a
allow token:forcer   force              a
allow token:peer     acquire,read,force a
allow token:other    acquire,read,force b
allow token:auditor  read               ""
allow token:admin    admin,proxy        ""
`

// matrix has the principals that may use each route; nil means everybody. TOKEN in a body stands for the lock token of
// the acquirer's hold.
var matrix = map[string]struct {
	method, path, body string
	may                []string
	code               string // of the refusal; DENIED if it is empty
	always             bool   // served with an invalid token too
}{
	"POST /v1/locks/{name}/acquire": {
		method: "POST", path: "/v1/locks/a%2Ffree/acquire", body: acquireOf("o", ""), may: []string{"acquirer", "peer"},
	},
	"POST /v1/locks:acquireAll": {
		method: "POST", path: "/v1/locks:acquireAll",
		body: acquireOf("o", `,"requests":[{"lockKey":"a/x"},{"lockKey":"a/y"}]`), may: []string{"acquirer", "peer"},
	},
	"DELETE /v1/locks/{name}/waits/{requestId}": {
		method: "DELETE", path: "/v1/locks/a%2Fheld/waits/some-request?ownerId=o", may: []string{"acquirer", "peer"},
	},
	"POST /v1/locks/{name}/renew": {
		method: "POST", path: "/v1/locks/a%2Fheld/renew", body: `{"lockToken":"TOKEN"}`, may: []string{"acquirer"},
		code: codeNotOwner,
	},
	"POST /v1/locks/{name}/release": {
		method: "POST", path: "/v1/locks/a%2Fheld/release", body: `{"lockToken":"TOKEN"}`, may: []string{"acquirer"},
		code: codeNotOwner,
	},
	"POST /v1/locks/{name}/force-release": {
		method: "POST", path: "/v1/locks/a%2Fheld/force-release", body: `{"reason":"a test"}`,
		may: []string{"forcer", "peer"},
	},
	"GET /v1/locks/{name}": {
		method: "GET", path: "/v1/locks/a%2Fheld", may: []string{"reader", "peer", "auditor"},
	},
	"GET /v1/locks/{name}/watch": {
		method: "GET", path: "/v1/locks/a%2Fheld/watch", may: []string{"reader", "peer", "auditor"},
	},
	// A principal that may read only other names gets a list without these names.
	"GET /v1/locks": {method: "GET", path: "/v1/locks", may: []string{"reader", "peer", "auditor", "other"}},
	"GET /livez":    {method: "GET", path: "/livez", always: true},
	"GET /readyz":   {method: "GET", path: "/readyz", always: true},

	"GET /{$}":          {method: "GET", path: "/"},
	"GET /page.js":      {method: "GET", path: "/page.js"},
	"GET /page.css":     {method: "GET", path: "/page.css"},
	"GET /page/service": {method: "GET", path: "/page/service", may: []string{"reader", "peer", "auditor", "other"}},

	"GET /docs":         {method: "GET", path: "/docs"},
	"GET /openapi.json": {method: "GET", path: "/openapi.json"},
	"/":                 {method: "GET", path: "/else"},
}

// Each route serves the principals that the rules allow, and does nothing for others. The test fails for a route
// without a row.
func TestMatrix(t *testing.T) {
	names := []string{"acquirer", "reader", "forcer", "peer", "other", "auditor", "admin", "unknown", "expired"}
	var patterns []string
	withRules(t, matrixRules, nil, func(_ *testing.T, d *ruled) { patterns = d.g.patterns })
	if len(patterns) != len(matrix) {
		t.Errorf("%d routes, %d rows", len(patterns), len(matrix))
	}
	for _, pattern := range patterns {
		row, found := matrix[pattern]
		if !found {
			t.Errorf("the route %q has no row", pattern)
			continue
		}
		for _, name := range append([]string{""}, names...) {
			withRules(t, matrixRules, names, func(t *testing.T, d *ruled) {
				lines := principal.TokenLine("token:acquirer", d.tokens["expired"], time.Now()) + "\n"
				for _, name := range names[:7] {
					lines += principal.TokenLine(principal.Principal("token:"+name), d.tokens[name], time.Time{}) + "\n"
				}
				d.setProofs(t, lines)
				held := d.granted(d.as("acquirer", "POST", "/v1/locks/a%2Fheld/acquire", acquireOf("holder", "")))
				before := d.state(t)
				ctx, cancel := context.WithTimeout(t.Context(), time.Second) // ends a watch
				defer cancel()
				got := d.send(ctx, row.method, row.path, strings.ReplaceAll(row.body, "TOKEN", held.LockToken), d.bears(name))
				invalid := name == "unknown" || name == "expired"
				switch may := row.may == nil || slices.Contains(row.may, name); {
				case invalid && !row.always:
					d.refuses(got, http.StatusUnauthorized, codeUnauthenticated)
					if got.header.Get("WWW-Authenticate") == "" {
						t.Error("401 without WWW-Authenticate")
					}
				case may && (got.status == http.StatusUnauthorized || got.status == http.StatusForbidden):
					t.Errorf("%s for %q: %d %s", pattern, name, got.status, got.text)
				case !may:
					code := codeDenied
					if row.code != "" {
						code = row.code
					}
					d.refuses(got, http.StatusForbidden, code)
				}
				if allowed := slices.Contains(row.may, name); !allowed && !reflect.DeepEqual(before, d.state(t)) {
					t.Errorf("%s for %q changed something: %+v, %+v", pattern, name, before, d.state(t))
				}
				if !slices.Contains([]string{"reader", "peer", "auditor"}, name) && strings.Contains(got.text, "holder") &&
					!slices.Contains([]string{"/openapi.json", "/docs", "/", "/page.js"}, row.path) {
					t.Errorf("%s shows %q who holds what: %s", pattern, name, got.text)
				}
			})
		}
	}
}

// A hierarchical name requires the right to everything under it, and several names require the right to all of them.
func TestRightsToSeveralNames(t *testing.T) {
	const text = "allow token:ci acquire a\ndeny token:ci acquire a/b/secret\nallow token:ci acquire c"
	withRules(t, text, []string{"ci"}, func(t *testing.T, d *ruled) {
		for name, may := range map[string]bool{
			"a": false, "a%2Fb": false, "a%2Fb%2Fsecret": false, "a%2Fb%2Fc": true, "c": true,
		} {
			got := d.as("ci", "POST", "/v1/locks/"+name+"/acquire", acquireOf("o", `,"hierarchical":true`))
			if may {
				d.as("ci", "POST", "/v1/locks/"+name+"/release", released(d.granted(got)))
				continue
			}
			d.refuses(got, 403, codeDenied)
		}
		got := d.as("ci", "POST", "/v1/locks:acquireAll",
			acquireOf("o", `,"requests":[{"lockKey":"c"},{"lockKey":"account"},{"lockKey":"a"}]`))
		if p := d.refuses(got, 403, codeDenied); p["lockKey"] != "account" {
			t.Errorf("the answer names %v", p["lockKey"])
		}
		if all := d.state(t); len(all) != 0 {
			t.Errorf("held: %+v", all)
		}
	})
}

// A principal that may acquire a name but not read it cannot see the holder.
func TestHolderIsHidden(t *testing.T) {
	const text = "allow token:blind acquire a\nallow token:seer acquire,read a"
	withRules(t, text, []string{"blind", "seer"}, func(t *testing.T, d *ruled) {
		d.granted(d.as("seer", "POST", "/v1/locks/a/acquire", acquireOf("somebody", "")))
		for _, more := range []string{"", `,"waitMillis":1000`} {
			for name, shown := range map[string]bool{"blind": false, "seer": true} {
				got := d.as(name, "POST", "/v1/locks/a/acquire", acquireOf("asker", more))
				p := d.refuses(got, 409, codeHeld)
				if shows := strings.Contains(got.text, "somebody"); shows != shown {
					t.Errorf("%s%s: %s", name, more, got.text)
				}
				if p["retryAfterMillis"] == nil {
					t.Errorf("%s%s: the answer has no time: %s", name, more, got.text)
				}
			}
		}
		got := d.as("blind", "POST", "/v1/locks:acquireAll",
			acquireOf("somebody", `,"requests":[{"lockKey":"a/x"},{"lockKey":"a"}]`))
		if p := d.refuses(got, 409, codeHeld); p["currentOwner"] != nil || p["sameOwner"] != nil {
			t.Errorf("a set: %s", got.text)
		}
	})
}

func TestListIsFiltered(t *testing.T) {
	const text = "allow token:a acquire,read a\nallow token:b acquire,read b\ndeny token:b read b/secret\n" +
		"allow token:b read a/public"
	withRules(t, text, []string{"a", "b"}, func(t *testing.T, d *ruled) {
		for _, name := range []string{"a/1", "a/2", "a/public/1", "b/1", "b/secret/1", "b/z"} {
			path := "/v1/locks/" + strings.ReplaceAll(name, "/", "%2F") + "/acquire"
			d.granted(d.as(name[:1], "POST", path, acquireOf("o", "")))
		}
		for name, want := range map[string]string{"a": "a/1 a/2 a/public/1", "b": "a/public/1 b/1 b/z"} {
			var all []string
			for after := ""; ; {
				var page List
				got := d.as(name, "GET", "/v1/locks?limit=2&after="+after, "")
				if err := json.Unmarshal([]byte(got.text), &page); err != nil || got.status != 200 {
					t.Fatal(got.status, got.text, err)
				}
				for _, s := range page.Locks {
					all = append(all, s.LockKey)
				}
				if after = strings.ReplaceAll(page.NextAfter, "/", "%2F"); after == "" {
					break
				}
			}
			if got := strings.Join(all, " "); got != want {
				t.Errorf("%s lists %q, want %q", name, got, want)
			}
		}
	})
}

// Request ids and lock tokens are bound to their principal: other principals cannot use them, even if they know them. A
// principal keeps its holds with another token.
func TestHoldsBelongToAPrincipal(t *testing.T) {
	const text = "allow token:* acquire a"
	withRules(t, text, []string{"ann", "bob"}, func(t *testing.T, d *ruled) {
		mine := d.granted(d.as("ann", "POST", "/v1/locks/a/acquire", acquireOf("o", `,"requestId":"known"`)))
		d.refuses(d.as("bob", "POST", "/v1/locks/a/acquire", acquireOf("o", `,"requestId":"known"`)), 409, codeHeld)
		for _, name := range []string{"bob", ""} {
			for _, call := range []string{"renew", "release"} {
				d.refuses(d.as(name, "POST", "/v1/locks/a/"+call, released(mine)), 403, codeNotOwner)
			}
		}
		fresh := principal.NewToken()
		d.setProofs(t, principal.TokenLine("token:ann", fresh, time.Time{}))
		d.refuses(d.as("ann", "POST", "/v1/locks/a/renew", released(mine)), 401, codeUnauthenticated)
		d.tokens["ann"] = fresh
		again := d.granted(d.as("ann", "POST", "/v1/locks/a/acquire", acquireOf("o", `,"requestId":"known"`)))
		if again.LockToken != mine.LockToken {
			t.Error("the same request with a fresh token has another lock token")
		}
		for _, call := range []string{"renew", "release"} {
			if got := d.as("ann", "POST", "/v1/locks/a/"+call, released(mine)); got.status != 200 {
				t.Errorf("%s with a fresh token: %d %s", call, got.status, got.text)
			}
		}
	})
}

// Changed rules apply to the next call, to waiters, and to watches. A release requires no right.
func TestRulesChange(t *testing.T) {
	const text = "allow token:ci acquire,read a\nallow token:other acquire a"
	withRules(t, text, []string{"ci", "other"}, func(t *testing.T, d *ruled) {
		mine := d.granted(d.as("ci", "POST", "/v1/locks/a/acquire", acquireOf("o", "")))
		waited, watched := make(chan reply, 1), make(chan reply, 1)
		go func() {
			waited <- d.as("other", "POST", "/v1/locks/a/acquire", acquireOf("waiter", `,"wait":true`))
		}()
		go func() { watched <- d.as("ci", "GET", "/v1/locks/a/watch", "") }()
		synctest.Wait()
		d.setRules(t, "allow token:ci read b")
		d.refuses(d.as("ci", "POST", "/v1/locks/a/renew", released(mine)), 403, codeDenied)
		if got := d.as("ci", "POST", "/v1/locks/a/release", released(mine)); got.status != 200 {
			t.Errorf("release: %d %s", got.status, got.text)
		}
		d.refuses(<-waited, 403, codeDenied)
		if got := <-watched; !strings.Contains(got.text, "event: error") || !strings.Contains(got.text, codeDenied) ||
			strings.Contains(got.text, "waiter") {
			t.Errorf("the watch: %s", got.text)
		}
		synctest.Wait()
		if all := d.state(t); len(all) != 0 {
			t.Errorf("held: %+v", all)
		}
	})
}

// A watch outlives its token by exactly the grace period.
func TestWatchEndsAfterItsToken(t *testing.T) {
	withRules(t, "allow token:ci acquire,read a", []string{"ci"}, func(t *testing.T, d *ruled) {
		const life = time.Minute
		began := time.Now()
		d.setProofs(t, principal.TokenLine("token:ci", d.tokens["ci"], began.Add(life)))
		got := d.as("ci", "GET", "/v1/locks/a/watch", "")
		lasted := time.Since(began)
		if lasted < life+tokenGrace || lasted > life+tokenGrace+beatTime {
			t.Errorf("the watch lasted %v", lasted)
		}
		if !strings.Contains(got.text, codeUnauthenticated) {
			t.Errorf("its end: %s", got.text)
		}
	})
}

// A certificate is a principal only if it has a line, and a token takes precedence over a certificate. A request with a
// credential may name any host.
func TestCertificateIsAPrincipal(t *testing.T) {
	const text = "allow cert:pay acquire a\nallow token:ci acquire b"
	withRules(t, text, []string{"ci"}, func(t *testing.T, d *ruled) {
		d.setProofs(t, principal.TokenLine("token:ci", d.tokens["ci"], time.Time{})+"\ncert:pay \"CN=pay,O=corp\"")
		with := func(name, token, host, path string) reply {
			return d.send(t.Context(), "POST", path, acquireOf("o", ""), func(r *http.Request) {
				leaf := &x509.Certificate{
					RawSubject: []byte(name), Subject: pkix.Name{CommonName: name, Organization: []string{"corp"}},
				}
				r.TLS = &tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{leaf}}}
				r.Host = host
				if token != "" {
					r.Header.Set("Authorization", "bearer "+token)
				}
			})
		}
		d.granted(with("pay", "", "localhost", "/v1/locks/a%2F1/acquire"))
		d.granted(with("pay", "", "evil.test", "/v1/locks/a%2F2/acquire"))
		d.refuses(with("payer", "", "localhost", "/v1/locks/a%2F3/acquire"), 403, codeDenied)
		d.refuses(with("pay", d.tokens["ci"], "localhost", "/v1/locks/a%2F4/acquire"), 403, codeDenied)
		d.granted(with("pay", d.tokens["ci"], "localhost", "/v1/locks/b%2F1/acquire"))
		d.refuses(with("pay", "flk_x", "localhost", "/v1/locks/a%2F5/acquire"), 401, codeUnauthenticated)
		twice := "Bearer " + d.tokens["ci"]
		for _, header := range [][]string{{"Basic eDp5"}, {"Bearer"}, {twice, twice}} {
			got := d.send(t.Context(), "POST", "/v1/locks/b%2F2/acquire", acquireOf("o", ""), func(r *http.Request) {
				r.Header["Authorization"] = header
			})
			d.refuses(got, 401, codeUnauthenticated)
		}
		got := d.send(t.Context(), "POST", "/v1/locks/b%2F3/acquire", acquireOf("o", ""), d.bears("ci"),
			func(r *http.Request) { r.Host = "evil.test" })
		d.granted(got)
		d.refuses(d.send(t.Context(), "GET", "/v1/locks", "", func(r *http.Request) { r.Host = "evil.test" }),
			421, codeMisdirected)
	})
}

// The log contains no token.
func TestLogHasNoToken(t *testing.T) {
	d, out := logging(t, Options{AccessLog: true, Access: &Access{
		Proofs: func() *principal.Proofs { return &principal.Proofs{} }, Rules: emptyRules(t),
	}})
	token := principal.NewToken()
	for _, given := range []string{token, token + "x"} {
		got := d.send(t.Context(), "GET", "/v1/locks/a", "", func(r *http.Request) {
			r.Header.Set("Authorization", "Bearer "+given)
		})
		d.refuses(got, 401, codeUnauthenticated)
		if all := out.String() + got.text; strings.Contains(all, token) {
			t.Errorf("the token is in the log or the answer: %s", all)
		}
	}
}

func emptyRules(t *testing.T) func() *rules.Rules {
	r, err := rules.Parse(nil)
	if err != nil {
		t.Fatal(err)
	}
	return func() *rules.Rules { return r }
}

// The client gets a denial by the lock service as a denial, not as an outage.
func TestDeniedByTheService(t *testing.T) {
	t.Parallel()
	if p := problemOf(&backend.CallError{Driver: "some", Call: "acquire", Name: "x", Err: backend.ErrDenied}); p.Code != codeDenied {
		t.Errorf("%+v", p)
	}
}
