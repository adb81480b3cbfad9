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
	guard, err := etcdguard.New(client, &etcdguard.Options{Space: space})
	if err != nil {
		return nil, err
	}
	key := func(resource string) string { return "value/" + resource }
	return &guardtest.Client{
		Check: func(ctx context.Context, c fencing.Claim) error { return fencing.Check(ctx, guard, c) },
		Write: func(ctx context.Context, c fencing.Claim, value string, _ func()) error {
			_, err := guard.Do(ctx, c, clientv3.OpPut(key(c.Resource), value))
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
	server := containers.Etcd(t, containers.Args("--unsafe-no-fsync"))
	guardtest.Run(t, guardtest.Harness{
		Name: "etcd", Open: open, Address: server.Addr(), Space: space,
		Restart: func(t testing.TB) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := server.Restart(ctx); err != nil {
				t.Fatal(err)
			}
		},
	})
	client, err := dial(server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	t.Run("owner", func(t *testing.T) { owner(t, client) })
	t.Run("responses", func(t *testing.T) { responses(t, client) })
	t.Run("spaces", func(t *testing.T) { spaces(t, client) })
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
	write := func(value string) (bool, error) {
		answer, err := guard.Do(ctx, fencing.Claim{Resource: "config", Token: grant.Token},
			clientv3.OpTxn([]clientv3.Cmp{driver.OwnerCmp(grant)}, []clientv3.Op{clientv3.OpPut("config", value)}, nil))
		if err != nil {
			return false, err
		}
		return answer.Responses[0].GetResponseTxn().Succeeded, nil
	}
	if held, err := write("held"); err != nil || !held {
		t.Errorf("a write by the holder: %v, %v; want it done", held, err)
	}
	if err := driver.Release(ctx, grant); err != nil {
		t.Fatal(err)
	}
	if held, err := write("released"); err != nil || held {
		t.Errorf("a write after the release: %v, %v; want that the owner is another", held, err)
	}
	if answer, err := client.Get(ctx, "config"); err != nil || string(answer.Kvs[0].Value) != "held" {
		t.Errorf("the value is %v, %v", answer, err)
	}
}

func responses(t *testing.T, client *clientv3.Client) {
	ctx, guard := t.Context(), must(t, client, &etcdguard.Options{Prefix: "guards/"})
	answer, err := guard.Do(ctx, fencing.Claim{Resource: "r", Token: 5}, clientv3.OpPut("r1", "x"), clientv3.OpGet("r1"))
	if err != nil || len(answer.Responses) != 2 || answer.Header.Revision == 0 ||
		string(answer.Responses[1].GetResponseRange().Kvs[0].Value) != "x" {
		t.Errorf("the responses to the caller's operations: %v, %v", answer, err)
	}
	token, _ := guard.Keys("r")
	if _, err := client.Put(ctx, token, "many"); err != nil {
		t.Fatal(err)
	}
	if answer, err := guard.Do(ctx, fencing.Claim{Resource: "r", Token: 6}, clientv3.OpPut("r1", "y")); err == nil ||
		errors.Is(err, fencing.ErrStale) {
		t.Errorf("a key that no guard wrote: %v, %v", answer, err)
	}
}

func spaces(t *testing.T, client *clientv3.Client) {
	ctx := t.Context()
	old, replaced := must(t, client, &etcdguard.Options{Space: space}), must(t, client, &etcdguard.Options{Space: "cluster-2"})
	if err := old.CheckFrom(ctx, space, "spaces", 40); err != nil {
		t.Fatal(err)
	}
	if err := replaced.CheckFrom(ctx, "cluster-2", "spaces", 50); !errors.Is(err, fencing.ErrSpace) {
		t.Errorf("a guard of another space than the keys': %v", err)
	}
	for _, want := range []bool{true, false} { // the second time there is nothing to do
		if changed, err := old.AcceptSpace(ctx, "spaces", space, "cluster-2"); err != nil || changed != want {
			t.Fatalf("to accept another space: %v, %v; want %v", changed, err, want)
		}
	}
	if err := old.CheckFrom(ctx, space, "spaces", 60); !errors.Is(err, fencing.ErrSpace) {
		t.Errorf("the old space after the new one was accepted: %v", err)
	}
	if err := replaced.CheckFrom(ctx, "cluster-2", "spaces", 3); err != nil {
		t.Errorf("the new space's tokens begin anew: %v", err)
	}
	if _, err := old.AcceptSpace(ctx, "spaces", space, space); !errors.Is(err, fencing.ErrInvalid) {
		t.Errorf("to accept the space that is there: %v, want ErrInvalid", err)
	}
}

func TestNewRefuses(t *testing.T) {
	if _, err := etcdguard.New(nil, nil); !errors.Is(err, fencing.ErrInvalid) {
		t.Errorf("New(nil) = %v, want ErrInvalid", err)
	}
	if _, err := etcdguard.New(clientv3.NewKVFromKVClient(nil, nil), &etcdguard.Options{Space: "a\nb"}); !errors.Is(err, fencing.ErrInvalid) {
		t.Errorf("New with a bad space = %v, want ErrInvalid", err)
	}
}
