package redis

import (
	"context"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/redisscript"
)

// run calls the script with one step for each lock: its name, the step and the arguments.
func run(t *testing.T, c goredis.UniversalClient, steps ...[]string) []any {
	t.Helper()
	answers, err := runSource(c, redisscript.Source, steps...)
	if err != nil {
		t.Fatal(err)
	}
	return answers
}

func runSource(c goredis.UniversalClient, source string, steps ...[]string) ([]any, error) {
	var locks []string
	args := []any{redisscript.Channel("fencelock:", ""), "0"}
	if _, cluster := c.(*goredis.ClusterClient); cluster {
		args[1] = "1"
	}
	for _, s := range steps {
		keys := redisscript.KeysOf("fencelock:", s[0])
		locks = append(locks, keys.Lock, keys.Queue, keys.Seen)
		args = append(args, s[1], len(s)-2)
		for _, a := range s[2:] {
			args = append(args, a)
		}
	}
	return c.Eval(context.Background(), source, locks, args...).Slice()
}

// A release on a name that is now used for permits does not get the waiter of an earlier step in the same call.
func TestStepsOfOneCallAreSeparate(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	hold := func(client string) redisscript.Hold {
		return redisscript.Hold{PX: time.Minute, Client: client, Nonce: "1", Request: "request-of-" + client}
	}
	a, b, waiter := hold("a"), hold("b"), hold("waiter")
	ctx := within(t, 30*time.Second)
	keysA, keysB := redisscript.KeysOf("fencelock:", "A"), redisscript.KeysOf("fencelock:", "B")
	if err := admin.Set(ctx, keysA.Lock, a.Value(), time.Minute).Err(); err != nil {
		t.Fatal(err)
	}
	if err := admin.RPush(ctx, keysA.Queue, waiter.Value()).Err(); err != nil {
		t.Fatal(err)
	}
	// b's hold was deleted by hand, and the name has been acquired for permits since.
	permits := mustAcquire(t, d, taking(request("B", time.Minute, false), 1, 2))
	listen := admin.Subscribe(ctx, redisscript.Channel("fencelock:", "waiter"))
	defer listen.Close()
	if _, err := listen.Receive(ctx); err != nil {
		t.Fatal(err)
	}
	answers := run(t, admin,
		[]string{"A", redisscript.Release, a.Start(), "0"}, []string{"B", redisscript.Release, b.Start(), "0"})
	if answers[0] != int64(redisscript.Offered) || answers[1] != int64(0) {
		t.Errorf("released: %v, want 3 and 0", answers)
	}
	if v := admin.Get(ctx, keysA.Lock).Val(); v != waiter.Value() {
		t.Errorf("A is %q, want the waiter's", v)
	}
	if kind := admin.Type(ctx, keysB.Lock).Val(); kind != "hash" {
		t.Errorf("B is a %s, want the hash of permits", kind)
	}
	mustRelease(t, d, permits)
}
