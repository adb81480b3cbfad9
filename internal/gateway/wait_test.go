package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// soon sends a request in the background.
func (d *door) soon(ctx context.Context, path, body string) <-chan reply {
	out := make(chan reply, 1)
	go func() { out <- d.send(ctx, http.MethodPost, path, body) }()
	synctest.Wait()
	return out
}

func (d *door) queued(got reply) Queued {
	d.t.Helper()
	var q Queued
	if err := json.Unmarshal([]byte(got.text), &q); err != nil || got.status != http.StatusAccepted ||
		q.State != "QUEUED" {
		d.t.Fatalf("answer %d %s, want a place in the queue", got.status, got.text)
	}
	return q
}

func (d *door) waiters(want int) {
	d.t.Helper()
	var s State
	if err := json.Unmarshal([]byte(d.get("/v1/locks/x").text), &s); err != nil || s.Waiters != want {
		d.t.Errorf("%d wait, want %d (%v)", s.Waiters, want, err)
	}
}

const (
	acquireX = "/v1/locks/x/acquire"
	releaseX = "/v1/locks/x/release"
)

// The validity that a waiter gets counts from the instant at which it sent its request, however long it waited.
func TestWaiting(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		first := d.granted(d.post(acquireX, acquireOf("a", "")))
		waiting := d.soon(t.Context(), acquireX, acquireOf("b", `,"wait":true`))
		time.Sleep(20 * time.Second)
		d.is(d.post(releaseX, released(first)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		second := d.granted(<-waiting)
		if second.FencingToken <= first.FencingToken {
			t.Errorf("token %d after %d", second.FencingToken, first.FencingToken)
		}
		// The client sent it 20 s ago, and the hold remains valid for 30 s less the margin.
		if want := int64(20_000 + 29_650); second.ValidForMillis < want-10_000 || second.ValidForMillis > want {
			t.Errorf("valid for %d ms from when it was sent, want up to %d", second.ValidForMillis, want)
		}
	})
}

// The place outlives the requests that wait for it, as long as the client polls in time.
func TestThePlaceIsKeptBetweenPolls(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		first := d.granted(d.post(acquireX, `{"ownerId":"a","ttlMillis":600000}`))
		ask := acquireOf("b", `,"wait":true,"requestId":"req-b"`)
		early := d.soon(t.Context(), acquireX, ask)
		time.Sleep(time.Second)
		late := d.soon(t.Context(), acquireX, acquireOf("c", `,"wait":true,"requestId":"req-c"`))
		began := time.Now()
		q := d.queued(<-early)
		if waited := time.Since(began); waited > pollMost {
			t.Errorf("a request waited for %v", waited)
		}
		if q.RequestID != "req-b" || q.PollWithinMillis != 10_000 {
			t.Errorf("queued: %+v", q)
		}
		time.Sleep(9 * time.Second)
		early = d.soon(t.Context(), acquireX, ask)
		d.queued(<-late)
		late = d.soon(t.Context(), acquireX, acquireOf("c", `,"wait":true,"requestId":"req-c"`))
		d.waiters(2)
		d.is(d.post(releaseX, released(first)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		next := d.granted(<-early)
		if next.OwnerID != "b" {
			t.Errorf("%s got the lock, although b came first", next.OwnerID)
		}
		d.is(d.post(releaseX, released(next)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		d.granted(<-late)
	})
}

// If its client does not poll again, a request loses its place, or the grant that it got in the meantime.
func TestPlaceExpiresWithoutPolls(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		first := d.granted(d.post(acquireX, `{"ownerId":"a","ttlMillis":600000}`))
		ask := acquireOf("b", `,"waitMillis":100,"keepPlace":true,"requestId":"req-b"`)
		d.queued(d.post(acquireX, ask))
		d.waiters(1)
		time.Sleep(11 * time.Second)
		synctest.Wait()
		d.waiters(0)

		d.queued(d.post(acquireX, ask))
		d.is(d.post(releaseX, released(first)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		synctest.Wait()
		if got := d.get("/v1/locks/x"); got.status != 200 {
			t.Errorf("the place became no hold: %s", got.text)
		}
		time.Sleep(5 * time.Second)
		d.granted(d.post(acquireX, ask)) // in time
		time.Sleep(20 * time.Second)
		if got := d.get("/v1/locks/x"); got.status != 200 {
			t.Errorf("a hold that was delivered was taken away: %s", got.text)
		}
		time.Sleep(11 * time.Second)
		d.is(d.get("/v1/locks/x"), 404, `{"locked":false}`)

		first = d.granted(d.post(acquireX, acquireOf("a", "")))
		ask = acquireOf("b", `,"waitMillis":100,"keepPlace":true,"requestId":"req-b2"`)
		d.queued(d.post(acquireX, ask))
		d.is(d.post(releaseX, released(first)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		time.Sleep(11 * time.Second) // less than the TTL
		synctest.Wait()
		d.is(d.get("/v1/locks/x"), 404, `{"locked":false}`)
	})
}

// slowRelease is a driver whose releases wait for the test.
type slowRelease struct {
	*memory.Driver
	may chan struct{}
}

func (d slowRelease) Release(ctx context.Context, g backend.Grant) error {
	select {
	case <-d.may:
		return d.Driver.Release(ctx, g)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A request that comes too late for a grant gets a new grant, never the grant that the gateway is releasing.
func TestHoldInReleaseIsNotGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		driver := slowRelease{memory.New(&memory.Options{Clock: backend.GoClock()}), make(chan struct{}, 1)}
		defer driver.Driver.Close(t.Context())
		d := newDoor(t, driver)
		defer d.g.Close(t.Context())
		first := d.granted(d.post(acquireX, acquireOf("a", "")))
		ask := acquireOf("b", `,"waitMillis":100,"keepPlace":true,"requestId":"req-b"`)
		d.queued(d.post(acquireX, ask))
		driver.may <- struct{}{}
		d.is(d.post(releaseX, released(first)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		time.Sleep(11 * time.Second) // the place is lost, and so is the grant
		d.refuses(d.post(acquireX, ask), 504, codeUnknown)
		late := d.soon(t.Context(), acquireX, ask)
		driver.may <- struct{}{}
		second := d.granted(<-late)
		synctest.Wait()
		var s State
		if err := json.Unmarshal([]byte(d.get("/v1/locks/x").text), &s); err != nil ||
			s.FencingToken != second.FencingToken {
			t.Errorf("token %d was granted, and the lock is %+v (%v)", second.FencingToken, s, err)
		}
	})
}

// A client that disconnects leaves the queue, unless it asked to keep the place.
func TestDisconnect(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		d.granted(d.post(acquireX, `{"ownerId":"a","ttlMillis":600000}`))
		for _, c := range []struct {
			more string
			left int
		}{{`,"wait":true,"requestId":"req-1"`, 0}, {`,"waitMillis":40000,"keepPlace":true,"requestId":"req-2"`, 1}} {
			ctx, hangUp := context.WithCancel(t.Context())
			waiting := d.soon(ctx, acquireX, acquireOf("b", c.more))
			d.waiters(1)
			hangUp()
			<-waiting
			synctest.Wait()
			d.waiters(c.left)
		}
		// The client can cancel the place that it kept.
		leave := "/v1/locks/x/waits/req-2?ownerId="
		d.refuses(d.send(t.Context(), http.MethodDelete, leave+"c", ""), 404, codeNoWait)
		d.is(d.send(t.Context(), http.MethodDelete, leave+"b", ""), 200, `{"status":"CANCELLED"}`)
		synctest.Wait()
		d.waiters(0)
	})
}

// A client that knows a state can wait for the next one.
func TestLookWaits(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		look := func(known, prefer string) reply {
			return d.send(t.Context(), http.MethodGet, "/v1/locks/x", "", func(r *http.Request) {
				r.Header.Set("If-None-Match", known)
				r.Header.Set("Prefer", prefer)
			})
		}
		free := d.get("/v1/locks/x").header.Get("ETag")
		soon := make(chan reply, 1)
		go func() { soon <- look(free, "respond-async, wait=30") }()
		time.Sleep(10 * time.Second)
		l := d.granted(d.post(acquireX, acquireOf("a", "")))
		began := time.Now()
		got := <-soon
		var s State
		if err := json.Unmarshal([]byte(got.text), &s); got.status != 200 || err != nil ||
			s.FencingToken != l.FencingToken {
			t.Fatalf("granted was %+v, and who waits for that sees %d %s", l, got.status, got.text)
		}
		if late := time.Since(began); late > lookPause {
			t.Errorf("it was notified after %v", late)
		}
		held := got.header.Get("ETag")
		for prefer, want := range map[string]time.Duration{"": 0, "wait=7": 7 * time.Second, "wait=x": 0} {
			began := time.Now()
			got := look(held, prefer)
			if took := time.Since(began); got.status != 304 || got.text != "" || got.header.Get("ETag") != held ||
				took != want {
				t.Errorf("%q: %d %q after %v", prefer, got.status, got.text, took)
			}
		}
		if got := look(free, "wait=30"); got.status != 200 {
			t.Errorf("a state that is over is known: %d %s", got.status, got.text)
		}
		go func() { soon <- look(held, "wait=30") }()
		synctest.Wait()
		d.is(d.post(releaseX, released(l)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		if got := <-soon; got.status != 404 || got.header.Get("ETag") == held {
			t.Errorf("released, and who waits for that sees %d %s", got.status, got.text)
		}
	})
}

// A client that leaves the queue too late gets its lock.
func TestLeavingTooLate(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		l := d.granted(d.post(acquireX, acquireOf("a", `,"wait":true,"requestId":"req-1"`)))
		got := d.send(t.Context(), http.MethodDelete, "/v1/locks/x/waits/req-1?ownerId=a", "")
		d.refuses(got, 409, codeGranted)
		var p Problem
		if err := json.Unmarshal([]byte(got.text), &p); err != nil || p.Lock == nil ||
			p.Lock.LockToken != l.LockToken || p.Lock.FencingToken != l.FencingToken ||
			p.Lock.ValidForMillis > l.ValidForMillis {
			t.Fatalf("granted was %+v, and the refusal says %s (%v)", l, got.text, err)
		}
		d.is(d.post(releaseX, released(*p.Lock)), 200, `{"status":"RELEASED","lockKey":"x"}`)
	})
}

// Several requests with one id wait in one place, and all of them get the one hold.
func TestRepeatsWaitTogether(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		first := d.granted(d.post(acquireX, acquireOf("a", "")))
		ask := acquireOf("b", `,"wait":true,"requestId":"req-b"`)
		ctx, hangUp := context.WithCancel(t.Context())
		gone := d.soon(ctx, acquireX, ask)
		one, two := d.soon(t.Context(), acquireX, ask), d.soon(t.Context(), acquireX, ask)
		d.waiters(1)
		hangUp()
		<-gone
		d.waiters(1)
		d.is(d.post(releaseX, released(first)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		a, b := d.granted(<-one), d.granted(<-two)
		if a.LockToken != b.LockToken {
			t.Errorf("two repeats got %+v and %+v", a, b)
		}
	})
}

func TestWaitsAreBounded(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		d.granted(d.post(acquireX, `{"ownerId":"a","ttlMillis":600000}`))
		ctx, hangUp := context.WithCancel(t.Context())
		var all []<-chan reply
		for i := range 3 {
			all = append(all, d.soon(ctx, acquireX, acquireOf(fmt.Sprint("b", i), `,"wait":true`)))
		}
		got := d.post(acquireX, acquireOf("c", `,"wait":true`))
		d.refuses(got, 429, codeQuota)
		if got.header.Get("Retry-After") != "1" {
			t.Errorf("Retry-After: %q", got.header.Get("Retry-After"))
		}
		other := d.send(t.Context(), http.MethodPost, acquireX, acquireOf("c", `,"waitMillis":10,"keepPlace":true`),
			func(r *http.Request) { r.RemoteAddr = "192.0.2.7:1" })
		d.queued(other)
		hangUp()
		for _, c := range all {
			<-c
		}
	})
}

// When a gateway ends, waiters get an answer, and holds continue.
func TestEnd(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		d.granted(d.post(acquireX, acquireOf("a", "")))
		waiting := d.soon(t.Context(), acquireX, acquireOf("b", `,"wait":true`))
		d.g.End()
		d.refuses(<-waiting, 503, codeUnavailable)
		d.refuses(d.post(acquireX, acquireOf("b", "")), 503, codeUnavailable)
		if held := d.g.Close(t.Context()); held != 0 { // the service itself keeps them
			t.Errorf("%d holds hang on the gateway", held)
		}
		if got := d.get("/v1/locks/x"); got.status != 200 {
			t.Errorf("the hold ended with the gateway: %s", got.text)
		}
	})
}

func TestKinds(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		reader := d.granted(d.post(acquireX, acquireOf("r1", `,"kind":"shared"`)))
		d.granted(d.post(acquireX, acquireOf("r2", `,"kind":"shared"`)))
		d.refuses(d.post(acquireX, acquireOf("w", "")), 409, codeHeld)
		if reader.FencingToken != 0 {
			t.Errorf("a reader has the fencing token %d", reader.FencingToken)
		}
		const pool = "/v1/locks/pool/acquire"
		d.granted(d.post(pool, acquireOf("a", `,"kind":"permits","permits":2,"limit":3`)))
		d.refuses(d.post(pool, acquireOf("b", `,"kind":"permits","permits":2,"limit":3`)), 409, codeHeld)
		d.refuses(d.post(pool, acquireOf("b", `,"kind":"permits","permits":1,"limit":4`)), 409, codeLimit)
		d.granted(d.post(pool, acquireOf("b", `,"kind":"permits","permits":1,"limit":3,"metadata":{"pod":"p"}`)))

		closed := d.granted(d.post("/v1/locks/cron/acquire", acquireOf("a", `,"minHoldMillis":20000`)))
		time.Sleep(5 * time.Second)
		d.is(d.post("/v1/locks/cron/release", released(closed)), 200, `{"status":"RELEASED","lockKey":"cron"}`)
		p := d.refuses(d.post("/v1/locks/cron/acquire", acquireOf("b", "")), 409, codeHeld)
		if p["retryAfterMillis"] != 15_000.0 {
			t.Errorf("closed for %v ms, want 15000", p["retryAfterMillis"])
		}
	})
}

func TestSeveralNames(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		all := func(owner, more string) string {
			return `{"ownerId":"` + owner + `","ttlMillis":30000` + more +
				`,"requests":[{"lockKey":"x"},{"lockKey":"y","kind":"shared"}]}`
		}
		const path = "/v1/locks:acquireAll"
		got := d.post(path, all("a", `,"requestId":"req-1"`))
		var set Locks
		if err := json.Unmarshal([]byte(got.text), &set); err != nil || got.status != 200 || len(set.Locks) != 2 {
			t.Fatalf("answer %d %s", got.status, got.text)
		}
		d.is(d.post(path, all("a", `,"requestId":"req-1"`)), 200, strings.TrimSpace(got.text))
		if p := d.refuses(d.post(path, all("b", "")), 409, codeHeld); p["lockKey"] != "x" {
			t.Errorf("what is in the way of several: %v", p)
		}
		waiting := d.soon(t.Context(), path, all("b", `,"wait":true`))
		for _, l := range set.Locks {
			d.is(d.post("/v1/locks/"+l.LockKey+"/release", released(l)), 200,
				`{"status":"RELEASED","lockKey":"`+l.LockKey+`"}`)
		}
		if got := <-waiting; got.status != 200 {
			t.Errorf("a set that became free: %d %s", got.status, got.text)
		}
	})
}

// The answer to a refused request for several names has the held name, at whatever position it is.
func TestRefusalOfSeveralNamesTheLock(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		const path = "/v1/locks:acquireAll"
		names := []string{"u", "v", "w"}
		several := func(kind string) string {
			var all []string
			for _, name := range names {
				all = append(all, `{"lockKey":"`+name+`"`+kind+`}`)
			}
			return `{"ownerId":"b","ttlMillis":30000,"requests":[` + strings.Join(all, ",") + `]}`
		}
		for _, name := range names {
			l := d.granted(d.post("/v1/locks/"+name+"/acquire", acquireOf("a", "")))
			if p := d.refuses(d.post(path, several("")), 409, codeHeld); p["lockKey"] != name || p["currentOwner"] != "a" {
				t.Errorf("%s is held, and the answer is %v", name, p)
			}
			p := d.refuses(d.post(path, several(`,"kind":"permits","permits":1,"limit":2`)), 409, codeLimit)
			if p["lockKey"] != name {
				t.Errorf("%s is in use with another kind, and the answer is %v", name, p)
			}
			d.is(d.post("/v1/locks/"+name+"/release", released(l)), 200, `{"status":"RELEASED","lockKey":"`+name+`"}`)
		}
	})
}

// pipe is a response that can be read while it is written.
type pipe struct {
	header http.Header
	status chan int
	lines  chan string
}

func (p *pipe) Header() http.Header  { return p.header }
func (p *pipe) WriteHeader(code int) { p.status <- code }
func (p *pipe) Flush()               {}

// Write takes one event or several.
func (p *pipe) Write(b []byte) (int, error) {
	for each := range strings.SplitAfterSeq(strings.TrimSuffix(string(b), "\n\n"), "\n\n") {
		p.lines <- strings.TrimSuffix(each, "\n\n") + "\n\n"
	}
	return len(b), nil
}

// watch begins a watch, and returns its response. If change is not nil, it edits the request.
func (d *door) watch(ctx context.Context, path string, change func(*http.Request)) *pipe {
	p := &pipe{http.Header{}, make(chan int, 1), make(chan string, 64)}
	r := httptest.NewRequestWithContext(ctx, http.MethodGet, path, nil)
	r.Host = "localhost"
	if change != nil {
		change(r)
	}
	go func() {
		d.g.Handler().ServeHTTP(p, r)
		close(p.lines)
	}()
	return p
}

func TestWatch(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		ctx, hangUp := context.WithCancel(t.Context())
		live := d.watch(ctx, "/v1/locks/x/watch", nil)
		if got := <-live.lines; got != ": watching\n\n" {
			t.Errorf("the first line is %q", got)
		}
		l := d.granted(d.post(acquireX, acquireOf("a", "")))
		d.is(d.post(releaseX, released(l)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		first, second := <-live.lines, <-live.lines
		if want := "id: 2\nevent: acquired\ndata: {\"type\":\"acquired\",\"lockKey\":\"x\",\"ownerId\":\"a\",\"fencingToken\":2,\"at\":946684800150,\"revision\":2}\n\n"; first != want {
			t.Errorf("event %q, want %q", first, want)
		}
		if !strings.Contains(second, "event: released\n") {
			t.Errorf("event %q, want a release", second)
		}
		time.Sleep(beatTime)
		if got := <-live.lines; !strings.HasPrefix(got, ":") {
			t.Errorf("a silent stream said %q", got)
		}
		if live.header.Get("Content-Type") != "text/event-stream" || live.header.Get("X-Accel-Buffering") != "no" {
			t.Errorf("headers %v", live.header)
		}
		hangUp()
		for range live.lines {
		}

		ctx, hangUp = context.WithCancel(t.Context())
		again := d.watch(ctx, "/v1/locks/x/watch", func(r *http.Request) { r.Header.Set("Last-Event-ID", "2") })
		<-again.lines
		if got := <-again.lines; got != second {
			t.Errorf("the replay says %q, want %q", got, second)
		}
		hangUp()
		for range again.lines {
		}
		d.refuses(d.send(t.Context(), http.MethodGet, "/v1/locks/x/watch", "", func(r *http.Request) {
			r.Header.Set("Last-Event-ID", "x")
		}), 400, codeRequest)

		ended := d.watch(t.Context(), "/v1/locks/x/watch", nil)
		<-ended.lines
		d.g.End()
		for range ended.lines {
		}
	})
}

// After waitMillis a request leaves neither a place nor a hold, and the answer names the holder.
func TestAWaitEndsWhenItSaysSo(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		first := d.granted(d.post(acquireX, acquireOf("a", "")))
		began := time.Now()
		p := d.refuses(d.post(acquireX, acquireOf("b", `,"wait":true,"waitMillis":100`)), 409, codeHeld)
		if time.Since(began) != 100*time.Millisecond || p["currentOwner"] != "a" || p["retryAfterMillis"] != 29_900.0 {
			t.Errorf("after %v: %v", time.Since(began), p)
		}
		d.waiters(0)
		all := `{"ownerId":"b","ttlMillis":30000,"waitMillis":100,"requests":[{"lockKey":"w"},{"lockKey":"x"}]}`
		if p := d.refuses(d.post("/v1/locks:acquireAll", all), 409, codeHeld); p["lockKey"] != "x" {
			t.Errorf("of several: %v", p)
		}
		d.waiters(0)
		d.is(d.post(releaseX, released(first)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		synctest.Wait()
		d.granted(d.post(acquireX, acquireOf("c", "")))
		d.is(d.get("/v1/locks/w"), 404, `{"locked":false}`)
		d.refuses(d.post("/v1/locks/y/acquire", acquireOf("c", `,"keepPlace":true`)), 400, codeRequest)
	})
}

// A waiter with a cancelled place gets CANCELLED, not UNAVAILABLE.
func TestACancelledWaitSaysSo(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		d.granted(d.post(acquireX, acquireOf("a", "")))
		waiting := d.soon(t.Context(), acquireX, acquireOf("b", `,"wait":true,"requestId":"r"`))
		d.is(d.send(t.Context(), http.MethodDelete, "/v1/locks/x/waits/r?ownerId=b", ""), 200, `{"status":"CANCELLED"}`)
		got := <-waiting
		d.refuses(got, 409, codeCancelled)
		if got.header.Get("Retry-After") != "" {
			t.Error("it is asked to come again")
		}
	})
}

// An owner does not wait for itself.
func TestAnOwnerDoesNotWaitForItself(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		l := d.granted(d.post(acquireX, acquireOf("a", `,"requestId":"one"`)))
		p := d.refuses(d.post(acquireX, acquireOf("a", `,"wait":true,"requestId":"two"`)), 409, codeHeld)
		if p["sameOwner"] != true || p["currentOwner"] != "a" {
			t.Errorf("it gets %v", p)
		}
		again := d.granted(d.post(acquireX, acquireOf("a", `,"wait":true,"requestId":"one"`)))
		if again.LockToken != l.LockToken {
			t.Error("its own request is another one")
		}
		d.is(d.post(releaseX, released(l)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		d.granted(d.post(acquireX, acquireOf("a", `,"wait":true,"requestId":"two"`)))
	})
}

// The gateway reports the reason why a hold ended, and does not repeat its request.
func TestReasonsAreKept(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		l := d.granted(d.post(acquireX, acquireOf("a", `,"requestId":"one"`)))
		time.Sleep(31 * time.Second)
		for _, call := range []string{"/renew", "/release"} {
			if p := d.refuses(d.post("/v1/locks/x"+call, released(l)), 409, codeExpired); p["reason"] != "expired" {
				t.Errorf("%s after the end: %v", call, p)
			}
		}
	})
}

// The memory of finished requests is bounded in total, per principal, and in time.
func TestRecent(t *testing.T) {
	t.Parallel()
	var m recent[int]
	for i := range finishedOfOne + 10 {
		m.add(remembered{fmt.Sprint("many", i), "many", 100}, i)
	}
	m.add(remembered{"one", "one", 50}, 7)
	if m.has("many9", 0) || !m.has("many10", 0) || len(m.in) != finishedOfOne+1 {
		t.Errorf("%d are remembered of one principal", len(m.in)-1)
	}
	if v, ok := m.get("one", 49); !ok || v != 7 || m.has("one", 50) {
		t.Error("one is not remembered until its time")
	}
	for i := range finishedMost + 10 {
		m.add(remembered{fmt.Sprint("all", i), fmt.Sprint(i % 100), 100}, i)
	}
	if len(m.in) != finishedMost || m.order.Len() != finishedMost || len(m.of) != 100 {
		t.Errorf("%d are remembered, of %d principals", len(m.in), len(m.of))
	}
}
