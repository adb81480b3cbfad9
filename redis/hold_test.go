package redis

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

func pttl(t *testing.T, c *goredis.Client, name string) time.Duration {
	t.Helper()
	d, err := c.PTTL(context.Background(), redisscript.KeysOf("fencelock:", name).Lock).Result()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestHoldExcludesAndReleaseFrees(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	a, b, admin := s.open(t), s.open(t), s.admin(t)
	r := request("n", time.Minute, false)
	before := backend.SystemClock().Now()
	g := mustAcquire(t, a, r)
	if g.SentAt < before || g.Token != 0 || g.TTL != r.TTL || g.Owner != r.Owner || g.RequestID != r.RequestID {
		t.Errorf("grant %+v of %+v, made after %v", g, r, before)
	}
	_, err := b.Acquire(within(t, 30*time.Second), request("n", 10*time.Second, false))
	var held *backend.HeldError
	if !errors.Is(err, backend.ErrHeld) || !errors.As(err, &held) {
		t.Fatalf("second acquire: %v", err)
	}
	if held.Holder != r.Owner || held.RetryAfter <= 30*time.Second || held.RetryAfter > r.TTL {
		t.Errorf("held: %+v", held)
	}
	var call *backend.CallError
	if !errors.As(err, &call) || call.Call != "acquire" || call.Name != "n" || call.Driver != "redis" {
		t.Errorf("no call error with call and name: %#v", err)
	}
	mustRelease(t, a, g)
	if err := a.Release(within(t, 30*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("second release: %v", err)
	}
	if found := keys(t, admin); len(found) != 0 {
		t.Errorf("left: %v", found)
	}
}

// Request ids are compared in full: an id with the same prefix as the holder's does not get the lock.
func TestRequestIDPrefixes(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	long := request("n", 10*time.Second, false)
	long.RequestID = "worker-1-aaaaaaaaaa0"
	long.Fresh = false
	short := long
	short.RequestID = "worker-1-aaaaaaaaaa"
	g := mustAcquire(t, d, long)
	if _, err := d.Acquire(within(t, 30*time.Second), short); !errors.Is(err, backend.ErrHeld) {
		t.Fatalf("acquired by a prefix: %v", err)
	}
	for _, stranger := range []backend.Grant{
		short.Grant(),
		{Name: "n", RequestID: short.RequestID, Incarnation: g.Incarnation, TTL: g.TTL},
		{Name: "n", RequestID: g.RequestID, Incarnation: g.Incarnation[:len(g.Incarnation)-1], TTL: g.TTL},
	} {
		if err := d.Release(within(t, 30*time.Second), stranger); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("released by %+v: %v", stranger, err)
		}
		if err := d.Renew(
			within(t, 30*time.Second), []backend.Grant{stranger},
		)[0].Err; !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("renewed by %+v: %v", stranger, err)
		}
	}
	mustRelease(t, d, g)
}

func TestAcquireIsIdempotentByRequestID(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	a, b, admin := s.open(t), s.open(t), s.admin(t)
	for _, wait := range []bool{false, true} {
		r := request("n", 10*time.Second, wait)
		r.Fresh = false
		first := mustAcquire(t, a, r)
		second := mustAcquire(t, a, r)
		if first.Incarnation != second.Incarnation || first.Nonce != second.Nonce {
			t.Error("the later grant replaced the earlier one")
		}
		if through := mustAcquire(t, b, r); through.Incarnation != second.Incarnation {
			t.Error("another driver's grant replaced the hold")
		}
		for _, d := range []*Driver{a, b} { // each may assume that no other client wants the name
			if err := d.Expire(within(t, 30*time.Second), second); !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("a hold that two drivers were granted expires: %v", err)
			}
		}
		if again := mustAcquire(t, a, r); again.Incarnation != second.Incarnation {
			t.Error("the hold was replaced although two drivers were granted it")
		}
		mustRelease(t, b, second)
		alone := mustAcquire(t, a, r)
		if err := a.Expire(within(t, 30*time.Second), alone); err != nil {
			t.Errorf("expire: %v", err)
		}
		third := mustAcquire(t, a, r)
		mustRelease(t, b, r.Grant())
		if err := a.Release(within(t, 30*time.Second), third); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("release after release by request: %v", err)
		}
	}
	if found := keys(t, admin); len(found) != 0 {
		t.Errorf("left: %v", found)
	}
}

// A sub-second TTL reaches the server unchanged, and every key expires.
func TestTTLIsExact(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	for _, ttl := range []time.Duration{
		100 * time.Millisecond, 900 * time.Millisecond, 1234 * time.Millisecond, 61_234 * time.Millisecond, d.Describe().MaxTTL,
	} {
		began := time.Now()
		g := mustAcquire(t, d, request("n", ttl, true))
		if left, passed := pttl(t, admin, "n"), time.Since(began); left > ttl || left < ttl-passed-2*time.Millisecond {
			t.Errorf("TTL %v: %v left after %v", ttl, left, passed)
		}
		if ttl > time.Minute {
			if err := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0].Err; err != nil {
				t.Error(err)
			}
			if left := pttl(t, admin, "n"); left > ttl || left < ttl-time.Minute {
				t.Errorf("TTL %v renewed: %v left", ttl, left)
			}
		}
		if err := d.Release(within(t, 30*time.Second), g); err != nil && ttl > time.Minute {
			t.Error(err)
		}
	}
	for _, ttl := range []time.Duration{
		0, -1, time.Microsecond, 99 * time.Millisecond, time.Second + 1, d.Describe().MaxTTL + time.Hour,
	} {
		r := request("n", ttl, false)
		if _, err := d.Acquire(within(t, 30*time.Second), r); !errors.Is(err, backend.ErrInvalidTTL) {
			t.Errorf("TTL %v: %v", ttl, err)
		}
	}
}

func TestRenewAfterAGapIsALoss(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	a, b, admin := s.open(t), s.open(t), s.admin(t)
	lost := mustAcquire(t, a, request("n", 100*time.Millisecond, false))
	kept := mustAcquire(t, a, request("kept", time.Minute, false))
	between := mustAcquire(t, b, request("n", 10*time.Second, true)) // waits for the expiry
	if err := a.Renew(within(t, 30*time.Second), []backend.Grant{lost})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("renewed under a rival: %v", err)
	}
	mustRelease(t, b, between)
	answers := a.Renew(within(t, 30*time.Second), []backend.Grant{lost, kept})
	var notHeld *backend.NotHeldError
	if err := answers[0].Err; !errors.As(err, &notHeld) || notHeld.Reason != backend.ReasonExpired {
		t.Errorf("renewed after a gap: %v", err)
	}
	if answers[1].Err != nil || answers[1].TTL != kept.TTL || answers[1].SentAt < kept.SentAt {
		t.Errorf("the other one: %+v", answers[1])
	}
	if pttl(t, admin, "n") >= 0 {
		t.Error("the renewal made the key again")
	}
	if err := admin.Del(context.Background(), redisscript.KeysOf("fencelock:", "kept").Lock).Err(); err != nil {
		t.Fatal(err)
	}
	err := a.Renew(within(t, 30*time.Second), []backend.Grant{kept})[0].Err
	if !errors.As(err, &notHeld) || notHeld.Reason != backend.ReasonEvicted {
		t.Errorf("renewed what was deleted: %v", err)
	}
}

func TestRenewManyInOneRoundTrip(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	const n = 1000
	var grants []backend.Grant
	for i := range n {
		g := mustAcquire(t, d, request(fmt.Sprint("n", i), time.Minute, false))
		grants = append(grants, g)
	}
	before := calls(t, admin, "evalsha")
	for i, answer := range d.Renew(within(t, 30*time.Second), grants) {
		if answer.Err != nil || answer.TTL != time.Minute {
			t.Errorf("%d: %+v", i, answer)
		}
	}
	if n := calls(t, admin, "evalsha") - before; n > (1000+lines.MaxSteps-1)/lines.MaxSteps {
		t.Errorf("%d calls of the script", n)
	}
	for _, g := range grants {
		mustRelease(t, d, g)
	}
}

func calls(t *testing.T, c *goredis.Client, command string) int {
	t.Helper()
	text, err := c.Info(context.Background(), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(text, "cmdstat_"+command+":calls=")
	n := 0
	for _, c := range rest {
		if c < '0' || c > '9' {
			break
		}
		n = n*10 + int(c-'0')
	}
	return n
}

func TestMinimumHold(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	a, b, admin := s.open(t), s.open(t), s.admin(t)
	r := request("n", 200*time.Millisecond, false)
	r.MinHold = 600 * time.Millisecond
	start := time.Now()
	g := mustAcquire(t, a, r)
	if g.MinHoldUntil.Sub(g.SentAt) < r.MinHold {
		t.Errorf("minimum hold until %v, granted after %v", g.MinHoldUntil, g.SentAt)
	}
	mustRelease(t, a, g)
	if err := a.Release(within(t, 30*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("second release: %v", err)
	}
	if _, err := b.Acquire(
		within(t, 30*time.Second), request("n", time.Minute, false),
	); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("open before its time: %v", err)
	}
	next := mustAcquire(t, b, request("n", time.Minute, true))
	if d := time.Since(start); d < r.MinHold {
		t.Errorf("open after %v", d)
	}
	mustRelease(t, b, next)

	// A holder dies while a waiter waits.
	start = time.Now()
	g = mustAcquire(t, a, r)
	done := make(chan time.Duration, 1)
	go func() {
		g, err := b.Acquire(within(t, 30*time.Second), request("n", time.Minute, true))
		if err == nil {
			err = b.Release(within(t, 30*time.Second), g)
		}
		if err != nil {
			t.Error(err)
		}
		done <- time.Since(start)
	}()
	awaitQueue(t, admin, "n", 1)
	mustRelease(t, a, g)
	if d := <-done; d < r.MinHold {
		t.Errorf("handed over after %v", d)
	}
	start = time.Now()
	mustAcquire(t, a, r)
	mustRelease(t, b, mustAcquire(t, b, request("n", time.Minute, true)))
	if d := time.Since(start); d < r.MinHold {
		t.Errorf("free %v after its holder died", d)
	}
}

func awaitQueue(t testing.TB, c *goredis.Client, name string, n int64) {
	t.Helper()
	eventually(t, "the queue has its length", func() bool {
		l, err := c.LLen(context.Background(), redisscript.KeysOf("fencelock:", name).Queue).Result()
		return err == nil && l == n
	})
}

func TestInspectAndMetadata(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	info, err := d.Look(within(t, 30*time.Second), "n")
	if err != nil || info.Held || info.Waiters != 0 {
		t.Errorf("free: %+v, %v", info, err)
	}
	r := request("n", time.Minute, false)
	r.Owner = "host|1|with separators"
	r.Metadata = map[string]string{"why": "a|b\nc", "": "x"}
	g := mustAcquire(t, d, r)
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan error, 1)
	go func() {
		_, err := d.Acquire(ctx, request("n", 10*time.Second, true))
		gone <- err
	}()
	awaitQueue(t, admin, "n", 1)
	info, err = d.Look(within(t, 30*time.Second), "n")
	if err != nil || !info.Held || info.Waiters != 1 || len(info.Holders) != 1 {
		t.Fatalf("held: %+v, %v", info, err)
	}
	h := info.Holders[0]
	if h.Owner != r.Owner || h.HoldID != r.HoldID || h.Metadata["why"] != "a|b\nc" || len(h.Metadata) != 2 ||
		h.ExpiresIn > r.TTL || h.ExpiresIn < 30*time.Second {
		t.Errorf("holder: %+v", h)
	}
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	awaitQueue(t, admin, "n", 0)
	mustRelease(t, d, g)
}

func TestUnsupportedRequests(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	for what, change := range map[string]func(*backend.Request){
		"an unknown kind": func(r *backend.Request) { r.Kind = backend.KindPermits + 1 },
		"hierarchical":    func(r *backend.Request) { r.Hierarchical = true },
	} {
		r := request("n", time.Minute, false)
		change(&r)
		if _, err := d.Acquire(within(t, 30*time.Second), r); !errors.Is(err, backend.ErrUnsupported) {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := d.AcquireAll(
			within(t, 30*time.Second), []backend.Request{r},
		); !errors.Is(err, backend.ErrUnsupported) {
			t.Errorf("%s, in a set: %v", what, err)
		}
	}
	if found := keys(t, admin); len(found) != 0 {
		t.Errorf("left: %v", found)
	}
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	for _, name := range []string{"", strings.Repeat("x", 513), "a\x00", "a\n", "\xff"} {
		if _, err := d.Acquire(
			within(t, 30*time.Second), request(name, time.Minute, false),
		); !errors.Is(err, backend.ErrInvalidName) {
			t.Errorf("name %q: %v", name, err)
		}
	}
	r := request("n", time.Minute, false)
	r.RequestID = "worker-1"
	if _, err := d.Acquire(within(t, 30*time.Second), r); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("short request id: %v", err)
	}
	d = New(goredis.NewClient(fitOptions(s.addr)), &Options{KeyPrefix: "a{b}"})
	d.service.own = true
	defer d.Close(context.Background())
	if err := d.Ping(within(t, 30*time.Second)); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("prefix with braces: %v", err)
	}
}

// Foreign keys of other types at the driver's keys cause an error and no panic, and their data does not change.
func TestForeignKeys(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	ctx := within(t, 20*time.Second)
	k := redisscript.KeysOf("fencelock:", "n")
	for _, key := range []string{k.Lock, k.Queue} {
		if err := admin.HSet(ctx, key, "field", "value").Err(); err != nil {
			t.Fatal(err)
		}
		for _, r := range []backend.Request{request("n", time.Minute, false), request("n", time.Minute, true)} {
			if key == k.Lock && r.Wait {
				continue // it waits, as behind any holder
			}
			_, err := d.Acquire(ctx, r)
			var config *backend.ConfigError
			if key == k.Queue && r.Wait && !errors.As(err, &config) || err == nil {
				t.Errorf("%s, wait %v: %v", key, r.Wait, err)
			}
			r.Fresh = false
			if _, err := d.Acquire(ctx, r); err == nil {
				t.Errorf("%s, wait %v: acquired", key, r.Wait)
			}
			if err := d.Release(ctx, r.Grant()); err == nil {
				t.Errorf("%s: released", key)
			}
		}
		if v, err := admin.HGetAll(ctx, key).Result(); err != nil || v["field"] != "value" {
			t.Errorf("%s was changed: %v, %v", key, v, err)
		}
		g := mustAcquire(t, d, request("other", time.Minute, true)) // in the same batches as before
		mustRelease(t, d, g)
		admin.Del(ctx, key)
	}

	// A foreign string counts as an unknown holder; foreign elements of the queue are dropped.
	if err := admin.Set(ctx, k.Lock, "foreign", 5*time.Second).Err(); err != nil {
		t.Fatal(err)
	}
	if err := admin.RPush(ctx, k.Queue, "foreign", "1|2|3").Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Acquire(ctx, request("n", time.Minute, false)); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("foreign holder: %v", err)
	}
	mustRelease(t, d, mustAcquire(t, d, request("n", time.Minute, true)))
}

func TestClosedDriver(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	g := mustAcquire(t, d, request("n", time.Minute, true))
	waited := make(chan error, 1)
	go func() {
		_, err := d.Acquire(context.Background(), request("n", time.Minute, true))
		waited <- err
	}()
	admin := s.admin(t)
	awaitQueue(t, admin, "n", 1)
	mustRelease(t, d, mustAcquire(t, d, request("other", time.Minute, true)))
	if err := d.Close(within(t, 5*time.Second)); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; !errors.Is(err, backend.ErrClosed) {
		t.Errorf("waiter: %v", err)
	}
	awaitQueue(t, admin, "n", 0)
	ctx := within(t, 30*time.Second)
	_, err1 := d.Acquire(ctx, request("n", time.Minute, true))
	_, err2 := d.Look(ctx, "n")
	for i, err := range []error{err1, err2, d.Release(ctx, g), d.Ping(ctx), d.Renew(ctx, []backend.Grant{g})[0].Err} {
		if !errors.Is(err, backend.ErrClosed) {
			t.Errorf("%d after close: %v", i, err)
		}
	}
	if err := d.Close(ctx); err != nil {
		t.Errorf("second close: %v", err)
	}
}

// A call on a hold with an ended context sends no request, so that no answer can come before the end is noticed.
func TestCallsWithAnEndedContextSendNothing(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	g := mustAcquire(t, d, request("n", time.Minute, false))
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	scripts := func() string { // the number of scripts that the server has run
		stats, err := admin.Info(within(t, 20*time.Second), "commandstats").Result()
		if err != nil {
			t.Fatal(err)
		}
		var calls []string
		for line := range strings.Lines(stats) {
			if name, rest, ok := strings.Cut(line, ":calls="); ok && (name == "cmdstat_evalsha" || name == "cmdstat_fcall") {
				n, _, _ := strings.Cut(rest, ",")
				calls = append(calls, name+" "+n)
			}
		}
		return strings.Join(calls, ", ")
	}
	before := scripts()
	for range 50 {
		if r := d.Renew(ended, []backend.Grant{g})[0]; !errors.Is(r.Err, context.Canceled) {
			t.Fatalf("Renew = %v, want context.Canceled", r.Err)
		}
		if err := d.Release(ended, g); !errors.Is(err, context.Canceled) {
			t.Fatalf("Release = %v, want context.Canceled", err)
		}
	}
	if after := scripts(); before == "" || after != before {
		t.Errorf("scripts run: %q, want %q as before", after, before)
	}
	mustRelease(t, d, g)
}
