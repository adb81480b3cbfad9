package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// keeping is a service that keeps holds alive on sessions.
type keeping struct{ *memory.Driver }

func (k keeping) Describe() backend.Description {
	d := k.Driver.Describe()
	d.KeepsHolds = true
	return d
}

// limited runs a test in simulated time with a gateway that has limits.
func limited(t *testing.T, l Limits, test func(t *testing.T, d *door)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		driver := memory.New(&memory.Options{Clock: backend.GoClock()})
		g, err := New(Options{Driver: keeping{driver}, Key: testKey, Limits: l})
		if err != nil {
			t.Fatal(err)
		}
		d := &door{t, g}
		defer func() {
			g.Close(t.Context())
			if err := driver.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}()
		test(t, d)
	})
}

// by sends a request from an address.
func (d *door) by(address, method, path, body string) reply {
	d.t.Helper()
	return d.send(d.t.Context(), method, path, body, func(r *http.Request) { r.RemoteAddr = address + ":1" })
}

// exhausted checks that the answer is an exhausted quota.
func (d *door) exhausted(got reply, name string) {
	d.t.Helper()
	if p := d.refuses(got, http.StatusTooManyRequests, codeQuota); p["quota"] != name || got.header.Get(headerRetry) == "" {
		d.t.Errorf("quota %v, Retry-After %q; want %s", p["quota"], got.header.Get(headerRetry), name)
	}
}

const one, two, three = "192.0.2.1", "192.0.2.2", "192.0.2.3"

func acquirePath(name any) string { return fmt.Sprintf("/v1/locks/%v/acquire", name) }

// The quotas bound the holds of one client and of all clients. An ended hold no longer counts.
func TestHoldsAreShared(t *testing.T) {
	limited(t, Limits{Holds: 3, ClientHolds: 2}, func(t *testing.T, d *door) {
		first := d.granted(d.by(one, http.MethodPost, acquirePath(1), acquireOf("a", "")))
		d.granted(d.by(one, http.MethodPost, acquirePath(2), acquireOf("a", "")))
		d.exhausted(d.by(one, http.MethodPost, acquirePath(3), acquireOf("a", "")), "client-holds")
		d.exhausted(d.by(two, http.MethodPost, "/v1/locks:acquireAll",
			`{"ownerId":"b","ttlMillis":5000,"requests":[{"lockKey":"3"},{"lockKey":"4"}]}`), "holds")
		d.refuses(d.by(two, http.MethodPost, acquirePath(1), acquireOf("b", "")), 409, codeHeld) // and it does not count
		d.granted(d.by(two, http.MethodPost, acquirePath(3), acquireOf("b", "")))
		d.exhausted(d.by(three, http.MethodPost, acquirePath(4), acquireOf("c", "")), "holds")
		d.by(one, http.MethodPost, "/v1/locks/1/release", `{"lockToken":"`+first.LockToken+`"}`)
		d.granted(d.by(three, http.MethodPost, acquirePath(4), acquireOf("c", "")))
		time.Sleep(time.Minute) // all have expired
		synctest.Wait()
		for i := range 2 {
			d.granted(d.by(one, http.MethodPost, acquirePath(i), acquireOf("a", "")))
		}
	})
}

// The quota bounds the TTLs that one client uses at a time. A client can always renew a hold with the TTL of the hold.
func TestSessionsAreShared(t *testing.T) {
	limited(t, Limits{ClientSessions: 2}, func(t *testing.T, d *door) {
		with := func(ttl int) string { return fmt.Sprintf(`{"ownerId":"a","ttlMillis":%d}`, ttl) }
		held := d.granted(d.by(one, http.MethodPost, acquirePath(1), with(10_000)))
		d.granted(d.by(one, http.MethodPost, acquirePath(2), with(20_000)))
		d.exhausted(d.by(one, http.MethodPost, acquirePath(3), with(30_000)), "client-sessions")
		d.granted(d.by(one, http.MethodPost, acquirePath(3), with(20_000)))
		d.granted(d.by(two, http.MethodPost, acquirePath(4), with(30_000)))
		renew := func(from, more string) reply {
			return d.by(from, http.MethodPost, "/v1/locks/1/renew", `{"lockToken":"`+held.LockToken+`"`+more+`}`)
		}
		d.exhausted(renew(one, `,"ttlMillis":30000`), "client-sessions")
		time.Sleep(9 * time.Second)
		if got := renew(one, ""); got.status != 200 {
			t.Errorf("a renewal: %d %s", got.status, got.text)
		}
		d.granted(d.by(two, http.MethodPost, acquirePath(5), with(40_000)))
		if got := renew(two, ""); got.status != 200 { // as at another replica
			t.Errorf("a renewal beyond the share: %d %s", got.status, got.text)
		}
		time.Sleep(15 * time.Second) // the session of 20 s is over
		d.granted(d.by(one, http.MethodPost, acquirePath(6), with(30_000)))
		time.Sleep(time.Hour)
		for i := range 100 { // the gateway forgets inactive clients
			d.by(fmt.Sprintf("198.51.100.%d", i), http.MethodPost, acquirePath(fmt.Sprint("z", i)), with(5_000))
			time.Sleep(time.Minute)
		}
		d.g.mu.Lock()
		defer d.g.mu.Unlock()
		if n := len(d.g.sessions.of); n > 66 {
			t.Errorf("%d clients are remembered", n)
		}
	})
}

// The limits bound the requests a second of each client and of all clients, but not probes.
func TestOperationsAreShared(t *testing.T) {
	limited(t, Limits{Operations: 3, ClientOperations: 2}, func(t *testing.T, d *door) {
		get := func(from string) reply { return d.by(from, http.MethodGet, "/v1/locks", "") }
		for range 2 {
			if got := get(one); got.status != 200 {
				t.Errorf("%d %s", got.status, got.text)
			}
		}
		d.exhausted(get(one), "client-operations")
		if got := get(two); got.status != 200 {
			t.Errorf("another client: %d %s", got.status, got.text)
		}
		d.exhausted(get(two), "operations")
		for range 10 {
			if got := d.by(one, http.MethodGet, livePath, ""); got.status != 200 {
				t.Errorf("a probe: %d", got.status)
			}
		}
		time.Sleep(time.Second)
		if got := get(one); got.status != 200 {
			t.Errorf("a second later: %d %s", got.status, got.text)
		}
		for i := range 100 { // the gateway forgets inactive clients
			get(fmt.Sprintf("198.51.100.%d", i))
			time.Sleep(time.Second)
		}
		if n := len(d.g.rates.of); n > 66 {
			t.Errorf("%d clients are remembered", n)
		}
	})
}

// Watches and waits have separate quotas.
func TestWatchesAreShared(t *testing.T) {
	limited(t, Limits{ClientWaits: 1, ClientWatches: 1}, func(t *testing.T, d *door) {
		ctx, hangUp := context.WithCancel(t.Context())
		watching := make(chan reply)
		go func() { watching <- d.send(ctx, http.MethodGet, "/v1/locks/x/watch", "") }()
		synctest.Wait()
		d.exhausted(d.get("/v1/locks/x/watch"), "client-watches")
		d.granted(d.post(acquireX, acquireOf("a", "")))
		waiting := d.soon(ctx, acquireX, acquireOf("b", `,"wait":true`))
		synctest.Wait()
		d.exhausted(d.post(acquireX, acquireOf("c", `,"wait":true`)), "client-waits")
		hangUp()
		<-waiting
		<-watching
	})
}

// full is an error of a service that has a limit.
type full string

func (f full) Error() string   { return "the service takes no more " + string(f) }
func (f full) Is(e error) bool { return e == backend.ErrUnavailable }
func (f full) Quota() string   { return string(f) }

// The gateway reports an exhausted limit of the service as a quota, not as an outage.
func TestLimitsOfTheService(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]string{
		full("client-sessions"): codeQuota, errors.Join(full("waiters-per-name"), backend.ErrQueueFull): codeQueueFull,
		backend.ErrUnavailable: codeUnavailable,
	} {
		p := problemOf(&backend.CallError{Driver: "some", Call: "acquire", Name: "x", Err: err})
		var of interface{ Quota() string }
		if errors.As(err, &of); p.Code != want || (of != nil) != (p.Quota != "") || p.headers.Get(headerRetry) == "" {
			t.Errorf("%v: %+v", err, p)
		}
	}
}
