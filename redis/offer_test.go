package redis

import (
	"context"
	"fmt"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/stallmeter"
)

// deadBound is the maximum time of a waiter behind any number of dead waiters.
const deadBound = 3 * time.Second

// ghosts adds waiters of dead clients to the queue of a name.
func ghosts(t *testing.T, c goredis.UniversalClient, r backend.Request, n int, client func(i int) string) {
	t.Helper()
	for i := range n {
		h := redisscript.Hold{
			PX: time.Minute, Client: client(i), Nonce: fmt.Sprint(i), Request: fmt.Sprint("request-", i), Owner: "o",
			Shared: r.Kind == backend.KindShared, Permits: r.Permits, Limit: r.Limit,
		}
		if answer := run(
			t, c, []string{r.Name, codeOf(&r, true, true), h.Value(), redisscript.Millis(h.PX)},
		)[0]; answer != int64(0) {
			t.Fatalf("ghost %d of %s: %v", i, r.Name, answer)
		}
	}
}

// listenToAll subscribes to all channels, as monitoring tools do.
func listenToAll(t *testing.T, c *goredis.Client) {
	t.Helper()
	listen := c.PSubscribe(context.Background(), "*")
	t.Cleanup(func() { listen.Close() })
	if _, err := listen.Receive(within(t, 30*time.Second)); err != nil {
		t.Fatal(err)
	}
}

// Dead waiters at the head of a queue, of one client or of one each, cost the waiters behind them seconds and not a
// TTL, whatever the service reports about subscribers: a cluster reports none, and the PSUBSCRIBE of another client,
// or the open connection of a dead host, makes the report wrong.
func TestDeadHeadOfTheQueue(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]func(t *testing.T) (a, b *Driver, admin goredis.UniversalClient){
		"single": func(t *testing.T) (a, b *Driver, admin goredis.UniversalClient) {
			s := startServer(t)
			return s.open(t), s.open(t), s.admin(t)
		},
		"foreign-psubscribe": func(t *testing.T) (a, b *Driver, admin goredis.UniversalClient) {
			s := startServer(t)
			listenToAll(t, s.admin(t))
			return s.open(t), s.open(t), s.admin(t)
		},
		"cluster": func(t *testing.T) (a, b *Driver, admin goredis.UniversalClient) {
			nodes := startCluster(t)
			c := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{nodes[0].addr}})
			t.Cleanup(func() { c.Close() })
			return openCluster(t, nodes), openCluster(t, nodes), c
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b, admin := setup(t)
			for clients, of := range map[string]func(i int) string{
				"one-client":   func(int) string { return "ghost" },
				"many-clients": func(i int) string { return fmt.Sprint("ghost", i) },
			} {
				for kind, as := range map[string]func(backend.Request) backend.Request{
					"exclusive": func(r backend.Request) backend.Request { return r },
					"writers":   func(r backend.Request) backend.Request { return r },
					"readers":   reading,
					"permits":   func(r backend.Request) backend.Request { return taking(r, 2, 2) },
				} {
					t.Run(clients+"/"+kind, func(t *testing.T) {
						t.Parallel()
						r := as(request(clients+kind, time.Minute, true))
						first := r
						first.RequestID = backend.NewRequestID()
						switch kind {
						case "writers":
							first = reading(first)
						case "readers":
							first.Kind = backend.KindExclusive
						}
						g := mustAcquire(t, a, first)
						ghosts(t, admin, r, 20, of)
						next := inLine(t, a, b, r, 21)
						end := stallmeter.Late(t)
						mustRelease(t, a, g)
						got := <-next
						t.Logf("handed over after %v", end(deadBound, "the hand-over"))
						mustRelease(t, b, got)
					})
				}
				t.Run(clients+"/expired", func(t *testing.T) {
					t.Parallel()
					r := request(clients+"expired", time.Minute, true)
					mustAcquire(t, a, request(r.Name, time.Second, true)) // and never renewed
					ghosts(t, admin, r, 20, of)
					next := inLine(t, a, b, r, 21)
					end := stallmeter.Late(t)
					got := <-next
					t.Logf("handed over after %v", end(time.Second+deadBound, "the hand-over"))
					mustRelease(t, b, got)
				})
			}
		})
	}
}

// Live waiters keep their places and their order behind a waiter of a dead host.
func TestLiveWaitersBehindADeadOne(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	holder := s.open(t)
	vanished, link := s.linked(t)
	g := mustAcquire(t, holder, request("n", time.Minute, true))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	dead, gone := request("n", time.Minute, true), make(chan error, 1)
	go func() {
		_, err := vanished.Acquire(ctx, dead)
		gone <- releasedIfUnknown(holder, dead, err)
	}()
	awaitQueue(t, s.admin(t), "n", 1)
	var line []<-chan backend.Grant
	var drivers []*Driver
	for i := range 3 {
		drivers = append(drivers, s.open(t))
		line = append(line, waitInLine(t, s, drivers[i], request("n", time.Minute, true), int64(i+2)))
	}
	link.Drop(fault.Both)
	end := stallmeter.Late(t)
	mustRelease(t, holder, g)
	got := <-line[0]
	end(deadBound, "the hand-over")
	awaitQueue(t, s.admin(t), "n", 2)
	eventually(t, "those behind have answered", func() bool {
		return s.admin(t).HLen(context.Background(), redisscript.KeysOf("fencelock:", "n").Seen).Val() == 0
	})
	for i := range 2 {
		mustRelease(t, drivers[i], got)
		got = <-line[i+1]
	}
	mustRelease(t, drivers[2], got)
	link.Pass()
	cancel()
	<-gone
	nothingLeft(t, s)
}

// A look may settle the queue and so offer the name to the client that looks; the client then takes the offer. An
// offer that it ignored would count against the client's other places.
func TestLookTakesWhatItBrings(t *testing.T) {
	t.Parallel()
	c := startServer(t).admin(t)
	listenToAll(t, c) // an offer without a subscriber would pass to the next waiter
	for what, r := range map[string]backend.Request{
		"exclusive": request("exclusive", time.Minute, true),
		"shared":    reading(request("shared", time.Minute, true)),
		"permits":   taking(request("permits", time.Minute, true), 2, 2),
	} {
		keys := redisscript.KeysOf("fencelock:", what)
		first := redisscript.Hold{
			PX: time.Minute, Client: "first", Nonce: "0", Request: "request-first", Owner: "o",
			Permits: r.Permits, Limit: r.Limit,
		}
		if answer := run(t, c, []string{
			what, codeOf(&r, true, true), first.Value(), redisscript.Millis(first.PX),
		})[0]; answer != int64(1) {
			t.Fatalf("%s: the first one: %v", what, answer)
		}
		ghosts(t, c, r, 1, func(int) string { return "me" })
		if err := c.Del(context.Background(), keys.Lock).Err(); err != nil { // its TTL is over
			t.Fatal(err)
		}
		found, ok := redisscript.ParseLooked(run(t, c, []string{what, redisscript.Look, "me", "0"})[0], 1)
		if !ok || found.Places[0] != redisscript.PlaceHolds {
			t.Fatalf("%s: the look = %+v, %v", what, found, ok)
		}
		if noted := c.HGetAll(context.Background(), keys.Seen).Val(); len(noted) > 0 {
			t.Errorf("%s: after the look %v is noted", what, noted)
		}
	}
}

// An accepted offer is a hold of the whole TTL, and is not offered to another waiter.
func TestAcceptedOffer(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	a, b, admin := s.open(t), s.open(t), s.admin(t)
	for what, kind := range map[string]func(backend.Request) backend.Request{
		"exclusive": func(r backend.Request) backend.Request { return r },
		"shared":    reading,
		"permits":   func(r backend.Request) backend.Request { return taking(r, 2, 2) },
	} {
		first := request(what, time.Minute, true)
		if what == "permits" {
			first = taking(first, 1, 2)
		}
		g := mustAcquire(t, a, first)
		next := inLine(t, a, b, kind(request(what, time.Minute, true)), 1)
		released := backend.SystemClock().Now()
		mustRelease(t, a, g)
		got := <-next
		if left := pttl(t, admin, what); left < 50*time.Second {
			t.Errorf("%s: %v are left of a minute after the hand-over", what, left)
		}
		if got.SentAt < released {
			t.Errorf("%s: the validity rests on a proof %v before the release", what, released.Sub(got.SentAt))
		}
		if n := admin.HLen(context.Background(), redisscript.KeysOf("fencelock:", what).Seen).Val(); n > 0 {
			t.Errorf("%s: the offer is still noted", what)
		}
		mustRelease(t, b, got)
	}
	nothingLeft(t, s)
}
