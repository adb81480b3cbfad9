package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/conformance/fault"
)

// The checklist for an interface for locks over HTTP, line by line, over real connections that break. TestMembersAnswer
// in cmd/fencelock has the lines about followers and leaders.
func TestChecklist(t *testing.T) {
	t.Parallel()
	for _, line := range []struct {
		number int
		says   string
		tests  map[string]func(*testing.T)
	}{
		{1, "a client that disconnects ends its wait, unless it asked to keep the place", map[string]func(*testing.T){
			"wait": disconnectEndsTheWait, "waitMillis": disconnectKeepsThePlace,
		}},
		{2, "after a lost answer the same requestId gets the same tokens; after the release nothing",
			map[string]func(*testing.T){
				"acquire": lostAnswer, "release": lostRelease, "late": TestHoldInReleaseIsNotGranted,
			}},
		{3, "the place survives between polls; pollWithinMillis is a third of the TTL", map[string]func(*testing.T){
			"kept": TestThePlaceIsKeptBetweenPolls, "lost": TestPlaceExpiresWithoutPolls,
		}},
		{4, "validForMillis counts from the instant of sending; no wall clock decides", map[string]func(*testing.T){
			"slow network": validFromTheSender,
		}},
		{5, "waits end before a load balancer cuts, a cut connection costs no place, and streams show that they live",
			map[string]func(*testing.T){"cut": balancerCuts, "beat": TestWatch, "cap": waitsAreCapped}},
		{6, "force-release can have a condition", map[string]func(*testing.T){"condition": TestForceReleaseAsksFirst}},
		{7, "any name is one escaped segment, or ?name=", map[string]func(*testing.T){
			"names": TestNames, "sockets": namesOverSockets,
		}},
		{8, "fencingToken is a number that every language reads exactly", map[string]func(*testing.T){
			"exact": tokensAreExact,
		}},
		{9, "bodies, headers and waits are bounded", map[string]func(*testing.T){
			"waits": TestWaitsAreBounded, "body": TestLargeBodies, "slow": TestSlowClients,
		}},
		{10, "the Date of neither side matters", map[string]func(*testing.T){"date": dateIsNotRead}},
		{11, "no other origin is let in, and nothing is remembered in cookies", map[string]func(*testing.T){
			"origins": TestOtherOriginsAreRefused, "headers": noCrossOriginHeaders,
		}},
	} {
		for name, test := range line.tests {
			t.Run(fmt.Sprintf("%d/%s", line.number, name), func(t *testing.T) {
				defer func() {
					if t.Failed() {
						t.Logf("line %d: %s", line.number, line.says)
					}
				}()
				test(t)
			})
		}
	}
}

// patience is the maximum time until a condition becomes true on a busy machine.
const patience = 30 * time.Second

// live is a gateway at a socket, behind a network that can be broken.
type live struct {
	*testing.T
	g     *Gateway
	addr  string // of the gateway itself
	proxy *fault.Proxy
	own   *http.Client
}

// lively serves d, or a lock service in the process, over HTTP.
func lively(t *testing.T, d backend.Driver, change ...func(*Options)) *live {
	t.Helper()
	if d == nil {
		m := memory.New(nil)
		t.Cleanup(func() { _ = m.Close(context.WithoutCancel(t.Context())) })
		d = m
	}
	o := Options{Driver: d, Key: testKey}
	for _, f := range change {
		f(&o)
	}
	g, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	served := make(chan error, 1)
	go func() { served <- g.Serve(ctx, l, nil) }()
	proxy, err := fault.NewProxy(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	own := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(func() {
		own.CloseIdleConnections()
		_ = proxy.Close()
		stop()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
		g.Close(context.WithoutCancel(t.Context()))
	})
	return &live{t, g, l.Addr().String(), proxy, own}
}

// call sends one request to an address. A reply with status 0 means that there was no answer.
func (l *live) call(ctx context.Context, method, addr, path, body string) reply {
	l.Helper()
	r, err := http.NewRequestWithContext(ctx, method, "http://"+addr+path, strings.NewReader(body))
	if err != nil {
		l.Fatal(err)
	}
	resp, err := l.own.Do(r)
	if err != nil {
		return reply{text: err.Error()}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return reply{text: err.Error()}
	}
	return reply{resp.StatusCode, resp.Header, string(text)}
}

// far sends a request through the network that can be broken; near bypasses it.
func (l *live) far(ctx context.Context, path, body string) reply {
	return l.call(ctx, http.MethodPost, l.proxy.Addr(), path, body)
}

func (l *live) near(path, body string) reply {
	return l.call(l.Context(), http.MethodPost, l.addr, path, body)
}

func (l *live) state(path string) (s State) {
	l.Helper()
	got := l.call(l.Context(), http.MethodGet, l.addr, path, "")
	if err := json.Unmarshal([]byte(got.text), &s); err != nil {
		l.Fatalf("%s: %d %s", path, got.status, got.text)
	}
	return s
}

func (l *live) lock(got reply) (lock Lock) {
	l.Helper()
	if err := json.Unmarshal([]byte(got.text), &lock); err != nil || got.status != http.StatusOK {
		l.Fatalf("answer %d %s, want a grant", got.status, got.text)
	}
	return lock
}

// wants checks the status and, in a refusal, the code.
func (l *live) wants(got reply, status int, code string) {
	l.Helper()
	if got.status != status || !strings.Contains(got.text, code) {
		l.Errorf("answer %d %s, want %d %s", got.status, got.text, status, code)
	}
}

func (l *live) await(what string, true func() bool) {
	l.Helper()
	for end := time.Now().Add(patience); !true(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			l.Fatalf("never: %s", what)
		}
	}
}

const atX = "/v1/locks/x"

// longOf returns the body of an acquire with a TTL longer than any test.
func longOf(owner, more string) string {
	return `{"ownerId":"` + owner + `","ttlMillis":600000` + more + `}`
}

func disconnectEndsTheWait(t *testing.T) {
	t.Parallel()
	l := lively(t, nil)
	l.lock(l.near(acquireX, longOf("a", "")))
	gone := make(chan reply, 1)
	go func() { gone <- l.far(t.Context(), acquireX, longOf("b", `,"wait":true,"requestId":"r"`)) }()
	l.await("b waits", func() bool { return l.state(atX).Waiters == 1 })
	l.proxy.Reset()
	if got := <-gone; got.status != 0 {
		t.Errorf("over a broken connection came %d %s", got.status, got.text)
	}
	l.await("b has left", func() bool { return l.state(atX).Waiters == 0 })
}

func disconnectKeepsThePlace(t *testing.T) {
	t.Parallel()
	l := lively(t, nil)
	first := l.lock(l.near(acquireX, longOf("a", "")))
	ask := longOf("b", `,"waitMillis":50000,"keepPlace":true,"requestId":"r"`)
	gone := make(chan reply, 1)
	go func() { gone <- l.far(t.Context(), acquireX, ask) }()
	l.await("b waits", func() bool { return l.state(atX).Waiters == 1 })
	rival := make(chan reply, 1)
	go func() { rival <- l.near(acquireX, longOf("c", `,"wait":true`)) }()
	l.await("c waits", func() bool { return l.state(atX).Waiters == 2 })
	l.proxy.Reset()
	<-gone
	l.wants(l.near(releaseX, released(first)), 200, "RELEASED")
	l.await("b has it, without a connection", func() bool { return l.state(atX).OwnerID == "b" })
	second := l.lock(l.far(t.Context(), acquireX, ask))
	l.wants(l.near(releaseX, released(second)), 200, "RELEASED")
	l.lock(<-rival)
}

func lostAnswer(t *testing.T) {
	t.Parallel()
	l := lively(t, nil)
	ask := longOf("a", `,"requestId":"req-12345"`)
	ctx, giveUp := context.WithCancel(t.Context())
	lost := make(chan reply, 1)
	l.proxy.Drop(fault.Replies)
	go func() { lost <- l.far(ctx, acquireX, ask) }()
	l.await("it was granted", func() bool { return l.state(atX).Locked })
	l.await("it was answered", func() bool { return l.proxy.Seen(fault.Replies) > 0 })
	giveUp()
	if got := <-lost; got.status != 0 {
		t.Fatalf("the answer was to be lost: %+v", got)
	}
	l.proxy.Pass()
	before := l.state(atX).FencingToken
	again := l.lock(l.far(t.Context(), acquireX, ask))
	once := l.lock(l.far(t.Context(), acquireX, ask))
	if again.FencingToken != before || once.LockToken != again.LockToken || once.FencingToken != before {
		t.Errorf("token %d was granted, and the repeats got %d and %d", before, again.FencingToken, once.FencingToken)
	}
	l.wants(l.far(t.Context(), releaseX, released(again)), 200, "RELEASED")
	l.wants(l.far(t.Context(), acquireX, ask), 409, codeDone)
	l.lock(l.far(t.Context(), acquireX, longOf("a", `,"requestId":"req-12346"`)))
}

func lostRelease(t *testing.T) {
	t.Parallel()
	l := lively(t, nil)
	lock := l.lock(l.near(acquireX, longOf("a", "")))
	ctx, giveUp := context.WithCancel(t.Context())
	lost := make(chan reply, 1)
	l.proxy.Drop(fault.Replies)
	go func() { lost <- l.far(ctx, releaseX, released(lock)) }()
	l.await("it was released", func() bool { return !l.state(atX).Locked })
	giveUp()
	<-lost
	l.proxy.Pass()
	l.await("the repeat says so", func() bool {
		return l.far(t.Context(), releaseX, released(lock)).text == `{"status":"RELEASED","lockKey":"x","alreadyReleased":true}`+"\n"
	})
}

// Over a slow network, the holder counts the validity from the instant at which it sent the request: nobody else gets
// the lock earlier.
func validFromTheSender(t *testing.T) {
	t.Parallel()
	l := lively(t, nil)
	l.proxy.Delay(fault.Both, 400*time.Millisecond)
	sent := time.Now()
	lock := l.lock(l.far(t.Context(), acquireX, `{"ownerId":"a","ttlMillis":6000}`))
	until := sent.Add(time.Duration(lock.ValidForMillis) * time.Millisecond)
	if lock.ValidForMillis <= 0 || lock.ValidForMillis >= 6000 {
		t.Errorf("valid for %d ms of a TTL of 6000", lock.ValidForMillis)
	}
	l.lock(l.near(acquireX, longOf("b", `,"wait":true`)))
	if now := time.Now(); now.Before(until) {
		t.Errorf("b was granted the lock %v before a's validity was over", until.Sub(now))
	}
}

// With a load balancer that cuts every connection after a while, a client only has to send more requests.
func balancerCuts(t *testing.T) {
	t.Parallel()
	l := lively(t, nil)
	first := l.lock(l.near(acquireX, longOf("a", "")))
	got := make(chan reply, 1)
	go func() {
		for t.Context().Err() == nil {
			answer := l.far(t.Context(), acquireX, longOf("b", `,"waitMillis":50000,"keepPlace":true,"requestId":"r"`))
			if answer.status != 0 {
				got <- answer
				return
			}
		}
	}()
	l.await("b waits", func() bool { return l.state(atX).Waiters == 1 })
	rival := make(chan reply, 1)
	go func() { rival <- l.near(acquireX, longOf("c", `,"wait":true`)) }()
	l.await("c waits", func() bool { return l.state(atX).Waiters == 2 })
	for range 5 {
		cut := l.proxy.Severed()
		l.await("a connection to cut", func() bool { l.proxy.Reset(); return l.proxy.Severed() > cut })
	}
	l.wants(l.near(releaseX, released(first)), 200, "RELEASED")
	second := l.lock(<-got)
	if second.OwnerID != "b" || second.FencingToken <= first.FencingToken {
		t.Errorf("after %+v came %+v", first, second)
	}
	l.wants(l.near(releaseX, released(second)), 200, "RELEASED")
	l.lock(<-rival)
}

func waitsAreCapped(t *testing.T) {
	const balancers = 60 * time.Second // the usual timeout
	if pollMost >= balancers || beatTime >= balancers/2 {
		t.Errorf("a wait takes %v, and a stream is silent for %v", pollMost, beatTime)
	}
	simulated(t, func(t *testing.T, d *door) {
		d.granted(d.post(acquireX, longOf("a", "")))
		for _, more := range []string{`,"wait":true`, `,"waitMillis":3600000`} {
			began := time.Now()
			d.queued(d.post(acquireX, longOf("b", more)))
			if took := time.Since(began); took != pollMost {
				t.Errorf("a wait with %s took %v", more, took)
			}
		}
	})
}

func namesOverSockets(t *testing.T) {
	t.Parallel()
	l := lively(t, nil)
	for _, name := range []string{"a/b", "a//b", "a%b", "a%2Fb", "a b", "a;b", "a?b", "ü", "鎖", "a/../b"} {
		path := "/v1/locks/" + url.PathEscape(name)
		lock := l.lock(l.far(t.Context(), path+"/acquire", longOf("a", "")))
		if lock.LockKey != name {
			t.Errorf("%s is %q, want %q", path, lock.LockKey, name)
		}
		l.wants(l.far(t.Context(), path+"/release", released(lock)), 200, "RELEASED")
	}
	for _, name := range []string{".", "..", "/"} {
		query := "?name=" + url.QueryEscape(name)
		lock := l.lock(l.far(t.Context(), "/v1/locks/-/acquire"+query, longOf("a", "")))
		if lock.LockKey != name || !l.state("/v1/locks/-"+query).Locked {
			t.Errorf("%s is %q, want %q", query, lock.LockKey, name)
		}
	}
}

func tokensAreExact(t *testing.T) {
	const most = 1<<53 - 1 // the greatest that JavaScript reads exactly
	simulated(t, func(t *testing.T, d *door) {
		var spec map[string]any
		if err := json.Unmarshal([]byte(d.get("/openapi.json").text), &spec); err != nil {
			t.Fatal(err)
		}
		field := spec
		for _, step := range []string{"components", "schemas", "Lock", "properties", "fencingToken"} {
			field, _ = field[step].(map[string]any)
		}
		if field["maximum"] != float64(most) || field["type"] != "integer" {
			t.Errorf("the specification says %v", field)
		}
		text, err := json.Marshal(Lock{FencingToken: most})
		if err != nil || !bytes.Contains(text, []byte(`"fencingToken":9007199254740991,`)) {
			t.Errorf("%s (%v)", text, err)
		}
	})
}

func dateIsNotRead(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		for _, date := range []string{"Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 31 Dec 2099 23:59:59 GMT", "tomorrow"} {
			l := d.granted(d.send(t.Context(), http.MethodPost, acquireX, acquireOf("a", ""), func(r *http.Request) {
				r.Header.Set("Date", date)
				r.Header.Set("If-Unmodified-Since", date)
			}))
			if l.ValidForMillis != 29_650 {
				t.Errorf("with the Date %s it is valid for %d ms", date, l.ValidForMillis)
			}
			d.is(d.post(releaseX, released(l)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		}
	})
}

func noCrossOriginHeaders(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		answers := []reply{d.post(acquireX, acquireOf("a", "")), d.get(atX), d.get("/v1/locks"), d.get("/docs")}
		answers = append(answers, d.send(t.Context(), http.MethodOptions, acquireX, "", func(r *http.Request) {
			r.Header.Set("Origin", "https://example.com")
			r.Header.Set("Access-Control-Request-Method", http.MethodPost)
		}))
		for _, a := range answers {
			for name := range a.header {
				if name == "Set-Cookie" || strings.HasPrefix(name, "Access-Control-") {
					t.Errorf("%s: %q", name, a.header[name])
				}
			}
		}
		if last := answers[len(answers)-1]; last.status < 400 {
			t.Errorf("a browser's preflight request returns %d", last.status)
		}
	})
}
