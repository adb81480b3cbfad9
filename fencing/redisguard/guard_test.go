package redisguard_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/redisguard"
)

const space = "cluster-1"

func TestMain(m *testing.M) {
	guardtest.RunChild(map[string]guardtest.Open{"redis": open})
	goleak.VerifyTestMain(m)
}

var set = redisguard.NewWrite(`redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1] -- a comment at the end must not swallow the check`)

func open(_ context.Context, addr string) (*guardtest.Client, error) {
	client := redis.NewClient(&redis.Options{Addr: addr, PoolSize: 1, ContextTimeoutEnabled: true, MaxRetries: -1})
	guard, err := redisguard.New(client, nil)
	if err != nil {
		return nil, err
	}
	key := func(resource string) string { return "value:{" + resource + "}" }
	return &guardtest.Client{
		Keeper: guard,
		SetTerms: func(ctx context.Context, text string) error {
			if text == "" {
				return client.Del(ctx, guard.TermsKey()).Err()
			}
			return client.Set(ctx, guard.TermsKey(), text, 0).Err()
		},
		Wipe: func(ctx context.Context) error { return client.FlushAll(ctx).Err() },
		Pinned: func(ctx context.Context, id fencing.Nonce, c fencing.Claim) error {
			pinned, err := redisguard.New(client, &redisguard.Options{ID: id})
			if err != nil {
				return err
			}
			return pinned.Check(ctx, c)
		},
		Update: func(ctx context.Context, claims fencing.Claims, resource string, f guardtest.Change) error {
			return guard.Update(ctx, claims, key(resource), func(old []byte) ([]byte, error) {
				value, err := f(ctx, string(old))
				return []byte(value), err
			})
		},
		Check: func(ctx context.Context, c fencing.Claim) error { return guard.Check(ctx, c) },
		Write: func(ctx context.Context, c fencing.Claim, value string, _ func()) error {
			_, err := guard.Do(ctx, c, set, []string{key(c.Resource)}, value)
			return err
		},
		Read: func(ctx context.Context, resource string) (string, error) {
			value, err := client.Get(ctx, key(resource)).Result()
			if errors.Is(err, redis.Nil) {
				return "", nil
			}
			return value, err
		},
		Close: client.Close,
	}, nil
}

func TestGuard(t *testing.T) {
	// What was answered must be there after a crash, as on a server that is set up with care.
	server := containers.Redis(t, containers.Args("--appendonly", "yes", "--appendfsync", "always"))
	client := redis.NewClient(&redis.Options{Addr: server.Addr(), MaxRetries: -1})
	t.Cleanup(func() { client.Close() })
	if err := must(t, client, nil).Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	guardtest.Run(t, guardtest.Harness{
		Name: "redis", Open: open, Address: server.Addr(), Space: space, Ordered: true,
		Restart: containers.Within(server.Restart),
	})
	t.Run("results", func(t *testing.T) { results(t, client) })
	t.Run("ring", func(t *testing.T) { ringed(t, client) })
	t.Run("probe", func(t *testing.T) { probe(t, client) })
}

func must(t testing.TB, client redis.UniversalClient, o *redisguard.Options) *redisguard.Guard {
	t.Helper()
	g, err := redisguard.New(client, o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// What the write returns is what Do returns, and its error is no refusal.
func results(t *testing.T, client *redis.Client) {
	ctx, guard := t.Context(), must(t, client, nil)
	claim := fencing.Claim{Resource: "results", Token: 5, Space: space}
	for lua, want := range map[string]any{
		`return {KEYS[1], ARGV[1], #KEYS, #ARGV}`: []any{"a", "x", int64(2), int64(2)},
		`return 7`:   int64(7),
		`return nil`: nil,
		``:           nil,
	} {
		got, err := guard.Do(ctx, claim, redisguard.NewWrite(lua), []string{"a", "b"}, "x", "y")
		if list, ok := want.([]any); ok {
			gotten, _ := got.([]any)
			for i := range list {
				if len(gotten) != len(list) || gotten[i] != list[i] {
					t.Fatalf("%q returns %v, %v; want %v", lua, got, err, want)
				}
			}
		} else if got != want || err != nil {
			t.Errorf("%q returns %v, %v; want %v", lua, got, err, want)
		}
	}
	claim.Token = 6
	_, err := guard.Do(ctx, claim,
		redisguard.NewWrite(`return redis.call('INCR', KEYS[1], 'too', 'many')`), []string{"a"})
	if err == nil || errors.Is(err, fencing.ErrStale) || !strings.Contains(err.Error(), `"results"`) {
		t.Errorf("a write that fails: %v", err)
	}
	for _, lua := range []string{
		`return redis.error_reply('ERR insufficient funds')`, `return redis.pcall('INCR', KEYS[1], 'too', 'many')`,
	} {
		if got, err := guard.Do(ctx, claim, redisguard.NewWrite(lua), []string{"a"}); err == nil {
			t.Errorf("%s: %v, and no error", lua, got)
		}
	}
	claim.Token = 5
	if _, err := guard.Do(ctx, claim, set, []string{"a"}, "late"); !errors.Is(err, fencing.ErrStale) {
		t.Errorf("after a write that failed its token is forgotten: %v", err)
	}
	if _, err := guard.Do(ctx, claim, nil, nil); !errors.Is(err, fencing.ErrInvalid) {
		t.Errorf("without a write: %v, want ErrInvalid", err)
	}
	if err := errors.Join(
		client.HSet(ctx, guard.Key("foreign"), "epoch", "0", "token", "many").Err(),
		client.Set(ctx, guard.Key("words"), "0 0 many - 0", 0).Err(), client.RPush(ctx, guard.Key("list"), "0").Err(),
	); err != nil {
		t.Fatal(err)
	}
	for _, foreign := range []string{"foreign", "words", "list"} {
		err := guard.Check(ctx, fencing.Claim{Resource: foreign, Token: 1, Space: space})
		if err == nil || fencing.Refusal(err) {
			t.Errorf("a key that no guard wrote: %v", err)
		}
	}
}

// On Redis Cluster the terms are in another slot, and read in a step of their own. A Ring takes the same way.
func ringed(t *testing.T, client *redis.Client) {
	ctx := t.Context()
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"one": client.Options().Addr}})
	defer ring.Close()
	options := &redisguard.Options{Prefix: "ring:"}
	guard := must(t, ring, options)
	claim := func(token fencing.Token, space string) fencing.Claim {
		return fencing.Claim{Resource: "r", Token: token, Space: space}
	}
	if err := guard.Check(ctx, claim(5, space)); !errors.Is(err, fencing.ErrTermsLost) {
		t.Errorf("before Create: %v, want ErrTermsLost", err)
	}
	if err := errors.Join(guard.Create(ctx), guard.Check(ctx, claim(5, space))); err != nil {
		t.Fatal(err)
	}
	for c, want := range map[fencing.Claim]error{
		claim(4, space): fencing.ErrStale, claim(9, "another"): fencing.ErrSpace, claim(5, space): nil,
	} {
		if err := guard.Check(ctx, c); !errors.Is(err, want) {
			t.Errorf("check of %+v: %v, want %v", c, err, want)
		}
	}
	if err := must(t, client, options).Accept(ctx, "another", 6); err != nil {
		t.Fatal(err)
	}
	if err := guard.Check(ctx, claim(6, "another")); err != nil {
		t.Errorf("after an operator has accepted the space: %v", err)
	}
	terms, err := guard.Terms(ctx)
	if err != nil {
		t.Fatal(err)
	}
	terms.Epoch = 0 // as after a restore of this key
	if err := client.Set(ctx, guard.TermsKey(), terms.String(), 0).Err(); err != nil {
		t.Fatal(err)
	}
	if err := guard.Check(ctx, claim(7, "another")); !errors.Is(err, fencing.ErrTermsLost) {
		t.Errorf("after the terms went back: %v, want ErrTermsLost", err)
	}
	if err := client.Del(ctx, guard.TermsKey()).Err(); err != nil {
		t.Fatal(err)
	}
	if err := guard.Create(ctx); !errors.Is(err, fencing.ErrTermsLost) {
		t.Errorf("create after the terms were deleted: %v, want ErrTermsLost", err)
	}
}

func probe(t *testing.T, client *redis.Client) {
	ctx := t.Context()
	set := func(name, value string) {
		t.Helper()
		if err := client.ConfigSet(ctx, name, value).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for policy, want := range map[string]error{
		"noeviction": nil, "volatile-lru": nil, "allkeys-lru": redisguard.ErrEvicts,
		"allkeys-random": redisguard.ErrEvicts,
	} {
		set("maxmemory", "100mb")
		set("maxmemory-policy", policy)
		if err := redisguard.Probe(ctx, client); !errors.Is(err, want) {
			t.Errorf("probe with %s: %v, want %v", policy, err, want)
		}
		set("maxmemory", "0")
		if err := redisguard.Probe(ctx, client); err != nil {
			t.Errorf("probe with %s and no limit: %v", policy, err)
		}
	}
	set("appendfsync", "no")
	if err := redisguard.Probe(ctx, client); !errors.Is(err, redisguard.ErrForgets) {
		t.Errorf("probe of a server that does not write to its disk: %v, want ErrForgets", err)
	}
	set("appendfsync", "always")
	set("appendonly", "no")
	if err := redisguard.Probe(ctx, client); !errors.Is(err, redisguard.ErrForgets) {
		t.Errorf("probe of a server without an append-only file: %v, want ErrForgets", err)
	}
	set("appendonly", "yes")
	for master, want := range map[string]error{"127.0.0.1 1": redisguard.ErrReplica, "NO ONE": nil} {
		host, port, _ := strings.Cut(master, " ")
		if err := client.ReplicaOf(ctx, host, port).Err(); err != nil {
			t.Fatal(err)
		}
		if err := redisguard.Probe(ctx, client); !errors.Is(err, want) {
			t.Errorf("probe of a replica of %s: %v, want %v", master, err, want)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	for what, o := range map[string]redisguard.Options{"prefix": {Prefix: "{a}"}} {
		_, err := redisguard.New(client, &o)
		var invalid *fencing.InvalidError
		if !errors.As(err, &invalid) || invalid.What != what {
			t.Errorf("New(%+v) = %v, want an error about the %s", o, err, what)
		}
	}
	if _, err := redisguard.New(nil, nil); !errors.Is(err, fencing.ErrInvalid) {
		t.Errorf("New(nil) = %v, want ErrInvalid", err)
	}
}
