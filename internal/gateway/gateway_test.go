package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/fencing"
)

var update = flag.Bool("update", false, "write openapi.json anew")

// door is a gateway in front of a lock service in the process.
type door struct {
	t *testing.T
	g *Gateway
}

var testKey = []byte("a key that all replicas share...")

func newDoor(t *testing.T, d backend.Driver) *door {
	t.Helper()
	g, err := New(Options{Driver: d, Key: testKey, Limits: Limits{ClientWaits: 3, ClientWatches: 3}, Hosts: []string{"door"}})
	if err != nil {
		t.Fatal(err)
	}
	return &door{t, g}
}

// simulated runs a test in simulated time.
func simulated(t *testing.T, test func(t *testing.T, d *door)) {
	synctest.Test(t, func(t *testing.T) {
		driver := memory.New(&memory.Options{Clock: backend.GoClock()})
		d := newDoor(t, driver)
		defer func() {
			d.g.Close(t.Context())
			if err := driver.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}()
		test(t, d)
	})
}

type reply struct {
	status int
	header http.Header
	text   string
}

func (d *door) send(ctx context.Context, method, path, body string, change ...func(*http.Request)) reply {
	d.t.Helper()
	r := httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(body))
	r.Host = "localhost"
	r.RemoteAddr, r.Host = "127.0.0.1:9", "localhost:7481"
	for _, f := range change {
		f(r)
	}
	w := httptest.NewRecorder()
	d.g.Handler().ServeHTTP(w, r)
	got := reply{w.Code, w.Result().Header, w.Body.String()}
	d.specified(r, got)
	return got
}

// specified checks that the specification has the status of an answer, and the code of a problem.
func (d *door) specified(r *http.Request, got reply) {
	d.t.Helper()
	var spec struct {
		Paths map[string]map[string]struct {
			Responses map[string]struct {
				Headers map[string]any
				Content map[string]struct {
					Schema struct {
						AllOf []struct {
							Properties struct{ Error struct{ Enum []string } }
						}
					}
				}
			}
		}
	}
	text, err := os.ReadFile("openapi.json")
	if err == nil {
		err = json.Unmarshal(text, &spec)
	}
	if err != nil {
		d.t.Fatal(err)
	}
	segments := strings.Split(r.URL.EscapedPath(), "/")
	for path, calls := range spec.Paths {
		template := strings.Split(path, "/")
		call, ok := calls[strings.ToLower(r.Method)]
		fits := ok && len(template) == len(segments)
		for i := range template {
			fits = fits && (segments[i] == template[i] || strings.HasPrefix(template[i], "{"))
		}
		if !fits {
			continue
		}
		answer, ok := call.Responses[strconv.Itoa(got.status)]
		if !ok {
			d.t.Errorf("%s %s: the specification has no status %d: %s", r.Method, path, got.status, got.text)
		}
		for _, name := range []string{headerRetry, headerETag, headerToken, requestIDHeader} {
			if _, ok := answer.Headers[name]; !ok && got.header.Get(name) != "" {
				d.t.Errorf("%s %s %d: the specification has no header %s", r.Method, path, got.status, name)
			}
		}
		if got.header.Get("Content-Type") != contentProblem {
			continue
		}
		var p Problem
		if err := json.Unmarshal([]byte(got.text), &p); err != nil {
			d.t.Fatal(err)
		}
		all := answer.Content[contentProblem].Schema.AllOf
		if len(all) != 2 || !slices.Contains(all[1].Properties.Error.Enum, p.Code) {
			d.t.Errorf("%s %s: the specification has no code %s", r.Method, path, p.Code)
		}
	}
}

func (d *door) post(path, body string) reply {
	d.t.Helper()
	return d.send(d.t.Context(), http.MethodPost, path, body)
}

func (d *door) get(path string) reply {
	d.t.Helper()
	return d.send(d.t.Context(), http.MethodGet, path, "")
}

// is checks the status and the whole body.
func (d *door) is(got reply, status int, text string) {
	d.t.Helper()
	if got.status != status || got.text != text+"\n" {
		d.t.Errorf("answer %d %s\nwant   %d %s", got.status, got.text, status, text)
	}
}

// refuses checks the status and the code of a problem.
func (d *door) refuses(got reply, status int, code string) map[string]any {
	d.t.Helper()
	var p map[string]any
	err := json.Unmarshal([]byte(got.text), &p)
	if err != nil || got.status != status || p["error"] != code || got.header.Get("Content-Type") != contentProblem {
		d.t.Errorf("answer %d %v %s, want %d %s", got.status, got.header, got.text, status, code)
	}
	return p
}

func (d *door) granted(got reply) Lock {
	d.t.Helper()
	var l Lock
	if err := json.Unmarshal([]byte(got.text), &l); err != nil || got.status != http.StatusOK || l.LockToken == "" {
		d.t.Fatalf("answer %d %s, want a grant", got.status, got.text)
	}
	return l
}

func acquireOf(owner, more string) string {
	return `{"ownerId":"` + owner + `","ttlMillis":30000` + more + `}`
}

func released(l Lock) string {
	return `{"lockToken":"` + l.LockToken + `","ownerId":"` + l.OwnerID + `"}`
}

// The bodies of the specification, to the byte.
func TestBodies(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		const orders = "/v1/locks/inventory:sku-42"
		d.is(d.get(orders), 404, `{"locked":false}`)

		got := d.post(orders+"/acquire",
			`{"ownerId":"worker-1","ttlMillis":30000,"wait":false,"requestId":"req-12345"}`)
		first := d.granted(got)
		d.is(got, 200, `{"lockKey":"inventory:sku-42","lockToken":"`+first.LockToken+`","ownerId":"worker-1",`+
			`"expiresAt":946684830000,"fencingToken":2,"tokenSpace":"`+first.TokenSpace+
			`","ttlMillis":30000,"validForMillis":29650}`)
		if got.header.Get("Fencing-Token") != "2" {
			t.Errorf("Fencing-Token: %q", got.header.Get("Fencing-Token"))
		}
		again := d.post(orders+"/acquire",
			`{"ownerId":"worker-1","ttlMillis":30000,"wait":false,"requestId":"req-12345"}`)
		d.is(again, 200, strings.TrimSpace(got.text))

		d.is(d.post(orders+"/acquire", `{"ownerId":"worker-2","ttlMillis":30000,"wait":false,"requestId":"req-12345"}`),
			409, `{"error":"LOCK_ALREADY_HELD","currentOwner":"worker-1","retryAfterMillis":30000,`+
				`"type":"urn:fencelock:problem:LOCK_ALREADY_HELD","title":"The lock is held","status":409,`+
				`"detail":"memory: acquire \"inventory:sku-42\": lock is held by worker-1, for another 30s unless renewed"}`)

		got = d.get(orders)
		var state State
		if err := json.Unmarshal([]byte(got.text), &state); err != nil {
			t.Fatal(err)
		}
		d.is(got, 200, `{"locked":true,"lockKey":"inventory:sku-42","ownerId":"worker-1","fencingToken":2,`+
			`"expiresAt":946684830000,"since":946684800000,"revision":2,"holders":[{"ownerId":"worker-1","holdId":"`+state.Holders[0].HoldID+`",`+
			`"nonce":"`+state.Holders[0].Nonce+`","kind":"exclusive","fencingToken":2,"since":946684800000,"expiresInMillis":30000}]}`)
		d.is(d.get("/v1/locks?prefix=inventory"), 200, `{"locks":[`+strings.TrimSpace(got.text)+`]}`)

		time.Sleep(10 * time.Second)
		d.is(d.post(orders+"/renew", `{"lockToken":"`+first.LockToken+`","ownerId":"worker-1","ttlMillis":30000}`), 200,
			`{"lockKey":"inventory:sku-42","expiresAt":946684840000,"validForMillis":29650}`)

		d.is(d.post(orders+"/release", `{"lockToken":"`+first.LockToken+`","ownerId":"worker-2"}`), 403,
			`{"error":"NOT_LOCK_OWNER","type":"urn:fencelock:problem:NOT_LOCK_OWNER",`+
				`"title":"The lock token does not belong to this lock and owner","status":403,`+
				`"detail":"the lock token belongs to another owner"}`)
		d.is(d.post(orders+"/release", released(first)), 200, `{"status":"RELEASED","lockKey":"inventory:sku-42"}`)
		d.is(d.post(orders+"/release", released(first)), 200, `{"status":"RELEASED","lockKey":"inventory:sku-42","alreadyReleased":true}`)
		d.is(d.post(orders+"/renew", `{"lockToken":"`+first.LockToken+`","ownerId":"worker-1","ttlMillis":30000}`), 409,
			`{"error":"LOCK_EXPIRED","type":"urn:fencelock:problem:LOCK_EXPIRED","title":"The hold has ended","status":409,`+
				`"detail":"memory: renew \"inventory:sku-42\": lock is not held by this request"}`)
		d.is(d.get(orders), 404, `{"locked":false}`)

		second := d.granted(d.post(orders+"/acquire", acquireOf("worker-2", "")))
		d.is(d.post(orders+"/force-release", `{"reason":"the pod is gone"}`), 200, `{"status":"FORCE_RELEASED"}`)
		p := d.refuses(d.post(orders+"/renew", released(second)), 409, codeExpired)
		if p["reason"] != "force-released" {
			t.Errorf("the victim learns %v", p)
		}
		d.refuses(d.post(orders+"/force-release", `{"reason":"the pod is gone"}`), 404, codeNotLocked)
	})
}

// A retry after the release must not acquire again, and another owner cannot use the request id.
func TestARequestIsCarriedOutOnce(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		l := d.granted(d.post("/v1/locks/x/acquire", acquireOf("a", `,"requestId":"req-1"`)))
		d.refuses(d.post("/v1/locks/x/acquire", acquireOf("b", `,"requestId":"req-1"`)), 409, codeHeld)
		d.refuses(d.post("/v1/locks/x/acquire", acquireOf("a", `,"requestId":"req-1","kind":"shared"`)),
			422, codeMismatch)
		time.Sleep(20 * time.Second)
		again := d.granted(d.post("/v1/locks/x/acquire", acquireOf("a", `,"requestId":"req-1"`)))
		if again.LockToken != l.LockToken || again.FencingToken != l.FencingToken || again.ValidForMillis < 20_000 {
			t.Errorf("a repeat got %+v after %+v", again, l)
		}
		d.is(d.post("/v1/locks/x/release", released(l)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		d.refuses(d.post("/v1/locks/x/acquire", acquireOf("a", `,"requestId":"req-1"`)), 409, codeDone)
		d.granted(d.post("/v1/locks/x/acquire", acquireOf("a", `,"requestId":"req-2"`)))
	})
}

func TestIdempotencyKey(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		with := func(key string) func(*http.Request) {
			return func(r *http.Request) { r.Header.Set("Idempotency-Key", key) }
		}
		const path = "/v1/locks/x/acquire"
		l := d.granted(d.send(t.Context(), http.MethodPost, path, acquireOf("a", ""), with("req-1")))
		again := d.granted(d.post(path, acquireOf("a", `,"requestId":"req-1"`)))
		if again.LockToken != l.LockToken {
			t.Errorf("the body's requestId got %+v, the header %+v", again, l)
		}
		body := acquireOf("a", `,"requestId":"req-1"`)
		d.granted(d.send(t.Context(), http.MethodPost, path, body, with("req-1")))
		d.refuses(d.send(t.Context(), http.MethodPost, path, body, with("req-2")), 400, codeRequest)
		all := `{"ownerId":"a","ttlMillis":30000,"requests":[{"lockKey":"y"},{"lockKey":"z"}]}`
		for range 2 {
			if got := d.send(
				t.Context(), http.MethodPost, "/v1/locks:acquireAll", all, with("req-3"),
			); got.status != 200 {
				t.Errorf("several with the same key: %d %s", got.status, got.text)
			}
		}
	})
}

// bound is a driver that keeps holds alive, so that only the replica that acquired a hold can renew it.
type bound struct{ *memory.Driver }

func (d bound) Describe() backend.Description {
	about := d.Driver.Describe()
	about.KeepsHolds = true
	return about
}

// With a bound driver, a replica knows which of its own holds have ended, and knows nothing about other holds.
func TestHoldsOfAnotherReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		drivers := []*memory.Driver{store.Driver(), store.Driver()}
		one, two := newDoor(t, bound{drivers[0]}), newDoor(t, bound{drivers[1]})
		defer func() {
			for i, d := range []*door{one, two} {
				d.g.Close(t.Context())
				if err := drivers[i].Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
		}()
		l := one.granted(one.post("/v1/locks/x/acquire", acquireOf("a", "")))
		two.refuses(two.post("/v1/locks/x/renew", released(l)), 503, codeElsewhere)
		time.Sleep(31 * time.Second)
		one.refuses(one.post("/v1/locks/x/renew", released(l)), 409, codeExpired)
		one.is(one.get("/v1/locks/x"), 404, `{"locked":false}`)
	})
}

// forgetful is a driver of a service that resets its token counter.
type forgetful struct {
	*memory.Driver
	tokens []fencing.Token // for the next grants
}

func (d *forgetful) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	g, err := d.Driver.Acquire(ctx, r)
	if err == nil && len(d.tokens) > 0 {
		g.Token, d.tokens = d.tokens[0], d.tokens[1:]
	}
	return g, err
}

// Release ignores the token, since the service has another one for the hold.
func (d *forgetful) Release(ctx context.Context, g backend.Grant) error {
	return d.ForceRelease(ctx, backend.ForceRequest{Name: g.Name, Reason: "release"})
}

// A replica never issues a token that is not greater than an earlier one.
func TestAServiceThatForgotIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		driver := &forgetful{memory.New(&memory.Options{Clock: backend.GoClock()}), []fencing.Token{7, 3, 7}}
		defer driver.Driver.Close(t.Context())
		d := newDoor(t, driver)
		defer d.g.Close(t.Context())
		const x, y = "/v1/locks/x", "/v1/locks/y"
		d.is(d.post(x+"/release", released(d.granted(d.post(x+"/acquire", acquireOf("a", ""))))),
			200, `{"status":"RELEASED","lockKey":"x"}`)
		kept := d.granted(d.post(y+"/acquire", acquireOf("a", ""))) // no earlier token of this name to compare it with
		d.refuses(d.post(x+"/acquire", acquireOf("a", "")), 503, codeHistory)
		synctest.Wait()
		d.is(d.get(x), 404, `{"locked":false}`)
		d.refuses(d.post("/v1/locks/z/acquire", acquireOf("a", "")), 503, codeHistory)
		d.is(d.post(y+"/release", released(kept)), 200, `{"status":"RELEASED","lockKey":"y"}`)
		if got := d.get("/readyz"); got.status != 503 || !strings.Contains(got.text, "restart this process") {
			t.Errorf("readyz: %d %s", got.status, got.text)
		}
	})
}

// A replica renews and releases a hold that another replica acquired.
func TestReplicasShareHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		drivers := []*memory.Driver{store.Driver(), store.Driver()}
		one, two := newDoor(t, drivers[0]), newDoor(t, drivers[1])
		defer func() {
			for i, d := range []*door{one, two} {
				d.g.Close(t.Context())
				if err := drivers[i].Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
		}()
		l := one.granted(one.post("/v1/locks/x/acquire", acquireOf("a", `,"requestId":"req-1"`)))
		for range 5 { // beyond the TTL
			time.Sleep(20 * time.Second)
			if got := two.post("/v1/locks/x/renew", released(l)); got.status != 200 {
				t.Fatalf("renewal through another replica: %d %s", got.status, got.text)
			}
		}
		two.is(two.get("/v1/locks/x"), 200, strings.TrimSpace(one.get("/v1/locks/x").text))
		two.is(two.post("/v1/locks/x/release", released(l)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		one.refuses(one.post("/v1/locks/x/renew", released(l)), 409, codeExpired)
	})
}

func TestForgedTokens(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		l := d.granted(d.post("/v1/locks/x/acquire", acquireOf("a", "")))
		sealer, err := NewSealer([]byte("some other key than the gateway's"))
		if err != nil {
			t.Fatal(err)
		}
		grant, _, _, err := d.g.sealer.Open(l.LockToken)
		if err != nil {
			t.Fatal(err)
		}
		forged := []string{"", "x", "AAAA", l.LockToken[:len(l.LockToken)-1], l.LockToken + "A", sealer.Seal(&grant, 0, "")}
		flipped := []byte(l.LockToken)
		flipped[40] ^= 1
		for _, token := range append(forged[1:], string(flipped)) {
			d.refuses(d.post("/v1/locks/x/release", `{"lockToken":"`+token+`"}`), 403, codeNotOwner)
			d.refuses(d.post("/v1/locks/x/renew", `{"lockToken":"`+token+`"}`), 403, codeNotOwner)
		}
		d.refuses(d.post("/v1/locks/y/release", released(l)), 403, codeNotOwner)
		d.is(d.post("/v1/locks/x/release", `{"lockToken":"`+l.LockToken+`"}`), 200, `{"status":"RELEASED","lockKey":"x"}`)
	})
}

func TestNames(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		for _, name := range []string{
			"a/b", "a//b", "/a/", "a%b", "a%2Fb", "a b", "a;b", "a?b", "a#b", "a+b", "ü", "鎖", "acquire", "-",
			"...", "a:b", "a/../b",
		} {
			path := "/v1/locks/" + url.PathEscape(name)
			l := d.granted(d.post(path+"/acquire", acquireOf("a", "")))
			if l.LockKey != name {
				t.Errorf("%s is %q, want %q", path, l.LockKey, name)
			}
			if got := d.get(path); got.status != 200 {
				t.Errorf("GET %s: %d %s", path, got.status, got.text)
			}
			if got := d.post(path+"/release", released(l)); got.status != 200 {
				t.Errorf("release of %q: %d %s", name, got.status, got.text)
			}
		}
		for _, name := range []string{".", "..", "/", "a/b"} { // no path can have the first three
			query := "?name=" + url.QueryEscape(name)
			l := d.granted(d.post("/v1/locks/-/acquire"+query, acquireOf("a", "")))
			if l.LockKey != name {
				t.Errorf("%s is %q", query, l.LockKey)
			}
			d.is(d.post("/v1/locks/-/release"+query, released(l)), 200, `{"status":"RELEASED","lockKey":"`+name+`"}`)
			d.refuses(d.post("/v1/locks/public/force-release"+query, `{"reason":"r"}`), 400, codeName)
			d.refuses(d.get("/v1/locks/-"+query+"&name=other"), 400, codeName)
		}
	})
}

func TestBadRequests(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		const acquire = "/v1/locks/x/acquire"
		for _, c := range []struct {
			path, body string
			status     int
			code       string
		}{
			{acquire, `{`, 400, codeRequest},
			{acquire, `{}`, 400, codeRequest},
			{acquire, `{"ownerId":"a","ttlMillis":"30000"}`, 400, codeRequest},
			{acquire, `{"ownerId":"a","ttlMilis":30000}`, 400, codeRequest},
			{acquire, `{"ownerId":"a","ttlMillis":0}`, 400, codeRequest},
			{acquire, `{"ownerId":"a","ttlMillis":1}`, 400, codeTTL},
			{acquire, `{"ownerId":"a","ttlMillis":9223372036854775807}`, 400, codeRequest},
			{acquire, `{"ownerId":"a\u0000","ttlMillis":30000}`, 400, codeRequest},
			{"/v1/locks/a%00b/acquire", acquireOf("a", ""), 400, codeName},
			{"/v1/locks/" + strings.Repeat("n", 513) + "/acquire", acquireOf("a", ""), 400, codeName},
			{acquire, acquireOf("a", `,"kind":"other"`), 400, codeRequest},
			{acquire, acquireOf("a", `,"permits":1`), 400, codeRequest},
			{acquire, acquireOf("a", `,"kind":"permits","permits":3,"limit":2`), 400, codeRequest},
			{acquire, acquireOf("a", `,"metadata":{"k":"`+strings.Repeat("v", 5000)+`"}`), 400, codeRequest},
			{acquire, acquireOf("a", `,"metadata":{"k":"`+strings.Repeat("v", 70_000)+`"}`), 413, codeTooLarge},
			{acquire + "?nmae=y", acquireOf("a", ""), 400, codeRequest},
			{"/v1/locks:acquireAll", `{"ownerId":"a","ttlMillis":30000,"requests":[]}`, 400, codeRequest},
			{
				"/v1/locks:acquireAll",
				`{"ownerId":"a","ttlMillis":30000,"requests":[{"lockKey":"x"},{"lockKey":"x"}]}`, 400, codeRequest,
			},
			{"/v2/locks", `{}`, 404, codeNotFound},
			{"/v1/locks/x/force-release", `{"reason":""}`, 400, codeRequest},
		} {
			d.refuses(d.post(c.path, c.body), c.status, c.code)
		}
		d.is(d.get("/v1/locks"), 200, `{"locks":[]}`)
	})
}

func TestForceReleaseAsksFirst(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		const force = "/v1/locks/x/force-release"
		first := d.granted(d.post("/v1/locks/x/acquire", acquireOf("a", "")))
		tag := d.get("/v1/locks/x").header.Get("ETag")
		far := d.send(t.Context(), http.MethodPost, force, `{"reason":"r"}`,
			func(r *http.Request) { r.RemoteAddr = "192.0.2.1:9" })
		d.refuses(far, 403, codeDenied)
		d.is(d.post("/v1/locks/x/release", released(first)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		next := d.granted(d.post("/v1/locks/x/acquire", acquireOf("b", "")))
		with := func(tag string) func(*http.Request) {
			return func(r *http.Request) { r.Header.Set("If-Match", tag) }
		}
		d.refuses(d.send(t.Context(), http.MethodPost, force, `{"reason":"r"}`, with(tag)), 412, codeChanged)
		d.refuses(d.post(force, `{"reason":"r","fencingToken":1}`), 412, codeChanged)
		tag = d.get("/v1/locks/x").header.Get("ETag")
		d.is(d.send(t.Context(), http.MethodPost, force,
			fmt.Sprintf(`{"reason":"r","fencingToken":%d}`, next.FencingToken), with(tag)),
			200, `{"status":"FORCE_RELEASED"}`)
	})
}

func TestListPages(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		for _, name := range []string{"n:b", "n/a", "nn:c", "m:d", "n:e"} {
			d.granted(d.post("/v1/locks/"+url.PathEscape(name)+"/acquire", acquireOf("a", "")))
		}
		for _, c := range []struct{ query, want string }{
			{"", "m:d n/a n:b n:e nn:c"},
			{"?limit=2", "m:d n/a > n/a"},
			{"?limit=2&after=n/a", "n:b n:e > n:e"},
			{"?limit=2&after=n:e", "nn:c"},
			{"?namespace=n", "n/a n:b n:e"},
			{"?namespace=n&limit=1", "n/a > n/a"},
			{"?prefix=n:", "n:b n:e"},
			{"?name=nn:c", "nn:c"},
		} {
			got := d.get("/v1/locks" + c.query)
			var page List
			if err := json.Unmarshal([]byte(got.text), &page); err != nil || got.status != 200 {
				t.Fatalf("%s: %d %s", c.query, got.status, got.text)
			}
			var names []string
			for _, l := range page.Locks {
				names = append(names, l.LockKey)
			}
			said := strings.Join(names, " ")
			if page.NextAfter != "" {
				said += " > " + page.NextAfter
			}
			if said != c.want {
				t.Errorf("%s lists %q, want %q", c.query, said, c.want)
			}
		}
	})
}

func TestProbesAndDocuments(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		d.is(d.get("/livez"), 200, `{"live":true}`)
		d.is(d.get("/readyz"), 200,
			`{"ready":true,"backend":"memory","exclusion":"in-process","fencing":true,"holdsOutliveReplica":true,`+
				`"minTtlMillis":100,"maxTtlMillis":31536000000,"ttlStepMillis":1}`)
		page := d.get("/docs")
		for _, want := range []string{"POST /v1/locks/{name}/acquire", "ttlMillis", "lockToken"} {
			if !strings.Contains(page.text, want) {
				t.Errorf("/docs lacks %q", want)
			}
		}
		for _, elsewhere := range []string{"<script", "src=", "http://", "https://"} {
			if strings.Contains(page.text, elsewhere) {
				t.Errorf("/docs has %q: it must need nothing from elsewhere", elsewhere)
			}
		}
		spec := d.get("/openapi.json").text
		if *update {
			if err := os.WriteFile("openapi.json", []byte(spec), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		golden, err := os.ReadFile("openapi.json")
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(golden, []byte(spec)) {
			t.Error("openapi.json is not what is served; go test ./internal/gateway -run Documents -update")
		}
		d.g.End()
		if got := d.get("/readyz"); got.status != 503 {
			t.Errorf("a gateway that ends is ready: %s", got.text)
		}
	})
}

// The gateway refuses requests that a browser sends for a page of another origin, even if it trusts the machine.
func TestOtherOriginsAreRefused(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		d.granted(d.post("/v1/locks/x/acquire", acquireOf("a", "")))
		got := d.send(t.Context(), http.MethodPost, "/v1/locks/x/force-release", `{"reason":"r"}`,
			func(r *http.Request) {
				r.Header.Set("Sec-Fetch-Site", "cross-site")
			})
		d.refuses(got, 403, codeDenied)
		d.refuses(d.send(t.Context(), http.MethodPost, "/v1/locks/x/acquire", acquireOf("b", ""),
			func(r *http.Request) {
				r.Header.Set("Content-Type", "text/plain")
			}), 415, codeMedia)
	})
}
