package redis

import (
	"context"
	"fmt"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/stall"
)

// offerBound is how long a waiter may stand behind waiters of one client that is gone.
const offerBound = redisscript.OfferTime + slack

// ghosts puts waiters into the queue of a name whose client is gone, ahead of those who come later.
func ghosts(t *testing.T, c goredis.UniversalClient, name, client string, n int) {
	t.Helper()
	k := redisscript.KeysOf("fencelock:", name)
	for i := range n {
		ghost := redisscript.Hold{
			PX: time.Minute, Client: client, Nonce: fmt.Sprint(i), Request: fmt.Sprint("request-of-", client, "-", i), Owner: "o",
		}
		if err := c.RPush(context.Background(), k.Queue, ghost.Value()).Err(); err != nil {
			t.Fatal(err)
		}
	}
}

// A waiter whose client is gone without a word, with others of the same client behind it, is offered the lock once, and
// not for its whole TTL, whatever the service tells about subscriptions: a cluster tells nothing, and somebody's
// PSUBSCRIBE, as a vanished host's open connection, makes it tell what is wrong.
func TestDeadWaitersAreOfferedOnce(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]func(t *testing.T) (a, b *Driver, admin goredis.UniversalClient){
		"single": func(t *testing.T) (a, b *Driver, admin goredis.UniversalClient) {
			s := startServer(t)
			c := s.admin(t)
			listen := c.PSubscribe(context.Background(), "*")
			t.Cleanup(func() { listen.Close() })
			if _, err := listen.Receive(within(t, 30*time.Second)); err != nil {
				t.Fatal(err)
			}
			return s.open(t), s.open(t), c
		},
		"cluster": func(t *testing.T) (a, b *Driver, admin goredis.UniversalClient) {
			nodes := startCluster(t)
			open := func() *Driver {
				d, err := Open(within(t, 20*time.Second), "redis+cluster://"+nodes[0].addr)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { d.Close(within(t, 5*time.Second)) })
				return d
			}
			c := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{nodes[0].addr}})
			t.Cleanup(func() { c.Close() })
			return open(), open(), c
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b, admin := setup(t)
			for what, kind := range map[string]func(backend.Request) backend.Request{
				"released": func(r backend.Request) backend.Request { return r },
				"shared":   reading,
			} {
				t.Run(what, func(t *testing.T) {
					t.Parallel()
					g := mustAcquire(t, a, kind(request(what, time.Minute, true)))
					ghosts(t, admin, what, "ghost", 20)
					next := inLine(t, a, b, request(what, time.Minute, true), 21)
					<-time.After(shortHold + 100*time.Millisecond) // short holds are handed over without an offer
					end := stall.Late(t)
					mustRelease(t, a, g)
					got := <-next
					end(offerBound, "the hand-over")
					mustRelease(t, b, got)
				})
			}
			t.Run("expired", func(t *testing.T) {
				t.Parallel()
				mustAcquire(t, a, request("expired", shortHold, true)) // and never renewed
				ghosts(t, admin, "expired", "ghost", 20)
				next := inLine(t, a, b, request("expired", time.Minute, true), 21)
				end := stall.Late(t)
				got := <-next
				end(shortHold+offerBound, "the hand-over")
				mustRelease(t, b, got)
			})
		})
	}
}

// An offer that is accepted is a hold of the whole TTL, and it is offered to nobody else.
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
		<-time.After(shortHold + 100*time.Millisecond)
		mustRelease(t, a, g)
		got := <-next
		if left := pttl(t, admin, what); left < 50*time.Second {
			t.Errorf("%s: %v are left of a minute after the hand-over", what, left)
		}
		if n := admin.HLen(context.Background(), redisscript.KeysOf("fencelock:", what).Seen).Val(); n > 1 {
			t.Errorf("%s: the offer is still noted", what)
		}
		mustRelease(t, b, got)
	}
	nothingLeft(t, s)
}
