package etcdguard_test

import (
	"context"
	"errors"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/etcd"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/etcdguard"
	"github.com/fencelock/fencelock/fencing/guardtest"
)

const space = "cluster-1"

func TestMain(m *testing.M) {
	guardtest.RunChild(map[string]guardtest.Open{"etcd": open})
	goleak.VerifyTestMain(m)
}

func dial(addr string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 20 * time.Second, Logger: zap.NewNop()})
}

func open(_ context.Context, addr string) (*guardtest.Client, error) {
	client, err := dial(addr)
	if err != nil {
		return nil, err
	}
	guard, err := etcdguard.New(client, nil)
	if err != nil {
		return nil, err
	}
	key := func(resource string) string { return "value/" + resource }
	return &guardtest.Client{
		Keeper: guard,
		SetTerms: func(ctx context.Context, text string) (err error) {
			if text == "" {
				_, err = client.Delete(ctx, guard.TermsKey())
			} else {
				_, err = client.Put(ctx, guard.TermsKey(), text)
			}
			return err
		},
		Wipe: func(ctx context.Context) error {
			_, err := client.Delete(ctx, "fencing/", clientv3.WithPrefix())
			return err
		},
		Pinned: func(ctx context.Context, id fencing.Nonce, c fencing.Claim) error {
			pinned, err := etcdguard.New(client, &etcdguard.Options{ID: id})
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
			_, err := guard.Do(ctx, c, nil, clientv3.OpPut(key(c.Resource), value))
			return err
		},
		Read: func(ctx context.Context, resource string) (string, error) {
			answer, err := client.Get(ctx, key(resource))
			if err != nil || len(answer.Kvs) == 0 {
				return "", err
			}
			return string(answer.Kvs[0].Value), nil
		},
		Close: client.Close,
	}, nil
}

func TestGuard(t *testing.T) {
	// A kill of the server is no reason to wait for the disk.
	server := containers.Etcd(t)
	client, err := dial(server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	if err := must(t, client, nil).Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	guardtest.Run(t, guardtest.Harness{
		Name: "etcd", Open: open, Address: server.Addr(), Space: space, Ordered: true,
		Restart: containers.Within(server.Restart),
	})
	t.Run("owner", func(t *testing.T) { owner(t, client) })
	t.Run("responses", func(t *testing.T) { responses(t, client) })
}

func must(t testing.TB, kv clientv3.KV, o *etcdguard.Options) *etcdguard.Guard {
	t.Helper()
	g, err := etcdguard.New(kv, o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// With a lock of etcd's own the guard's transaction can ask for a hold that is alive as well.
func owner(t *testing.T, client *clientv3.Client) {
	ctx, guard := t.Context(), must(t, client, nil)
	driver := etcd.New(client, nil)
	t.Cleanup(func() {
		if err := driver.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	request := backend.Request{Name: "config", Owner: "test", RequestID: backend.NewRequestID(), TTL: time.Minute}
	grant, err := driver.Acquire(ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	write := func(value string) error {
		claim := fencing.Claim{Resource: "config", Token: grant.Token, Space: space}
		_, err := guard.Do(ctx, claim, []clientv3.Cmp{driver.OwnerCmp(grant)}, clientv3.OpPut("config", value))
		return err
	}
	if err := write("held"); err != nil {
		t.Errorf("a write by the holder: %v", err)
	}
	if err := driver.Release(ctx, grant); err != nil {
		t.Fatal(err)
	}
	if err := write("released"); !errors.Is(err, etcdguard.ErrCondition) {
		t.Errorf("a write after the release: %v, want ErrCondition", err)
	}
	if answer, err := client.Get(ctx, "config"); err != nil || string(answer.Kvs[0].Value) != "held" {
		t.Errorf("the value is %v, %v", answer, err)
	}
}

func responses(t *testing.T, client *clientv3.Client) {
	ctx, guard := t.Context(), must(t, client, &etcdguard.Options{Prefix: "guards/"})
	if err := guard.Create(ctx); err != nil {
		t.Fatal(err)
	}
	answer, err := guard.Do(ctx, fencing.Claim{Resource: "r", Token: 5}, nil,
		clientv3.OpPut("r1", "x"), clientv3.OpGet("r1"))
	if err != nil || len(answer.Responses) != 2 || answer.Header.Revision == 0 ||
		string(answer.Responses[1].GetResponseRange().Kvs[0].Value) != "x" {
		t.Errorf("the responses to the caller's operations: %v, %v", answer, err)
	}
	token := guard.Key("r")
	if _, err := client.Put(ctx, token, "many"); err != nil {
		t.Fatal(err)
	}
	if answer, err := guard.Do(
		ctx, fencing.Claim{Resource: "r", Token: 6}, nil, clientv3.OpPut("r1", "y"),
	); err == nil ||
		errors.Is(err, fencing.ErrStale) {
		t.Errorf("a key that no guard wrote: %v, %v", answer, err)
	}
}

func TestNewRefuses(t *testing.T) {
	if _, err := etcdguard.New(nil, nil); !errors.Is(err, fencing.ErrInvalid) {
		t.Errorf("New(nil) = %v, want ErrInvalid", err)
	}
}
