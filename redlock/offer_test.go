package redlock

import (
	"context"
	"fmt"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/stallmeter"
)

// Waiters of a dead client at the head of the queue cost the waiters behind them an offer and a look, and not a TTL,
// even if the subscription of another client hides that they have no subscriber.
func TestDeadWaiters(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	d, other := s.driver(t, nil), s.driver(t, nil)
	r := request("name")
	g := take(t, d, r)
	eventually(t, "all servers vote", func() bool { return s.votes(t, r.Name) == 3 })
	for i := range s {
		listener := goredis.NewClient(&goredis.Options{Addr: s[i].Addr()})
		defer listener.Close()
		listen := listener.PSubscribe(context.Background(), "*")
		defer listen.Close()
		if _, err := listen.Receive(within(t, 30*time.Second)); err != nil {
			t.Fatal(err)
		}
		s.admin(t, i, func(ctx context.Context, c *goredis.Client) error {
			for n := range 20 {
				ghost := redisscript.Hold{
					PX: time.Minute, Client: "ghost", Nonce: fmt.Sprint(n), Request: fmt.Sprint("request-", n),
				}
				if err := c.RPush(
					ctx, redisscript.KeysOf("fencelock:", r.Name).Queue, ghost.Value(),
				).Err(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	got := make(chan error, 1)
	next := request(r.Name)
	next.Wait = true
	go func() {
		g, err := other.Acquire(within(t, 40*time.Second), next)
		if err == nil {
			err = other.Release(within(t, 30*time.Second), g)
		}
		got <- err
	}()
	eventually(t, "it waits", func() bool {
		state, err := d.Look(within(t, 30*time.Second), r.Name)
		return err == nil && state.Waiters == 21
	})
	end := stallmeter.Late(t)
	if err := d.Release(within(t, 30*time.Second), g); err != nil {
		t.Error(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
	t.Logf("granted after %v", end(15*time.Second, "the grant")) // the TTL is twice that
}
