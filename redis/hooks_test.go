package redis

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// watcher is a hook that notes the commands on locks, and can refuse them.
type watcher struct {
	mu     sync.Mutex
	seen   []string
	refuse error
}

func (w *watcher) DialHook(next goredis.DialHook) goredis.DialHook { return next }

func (w *watcher) ProcessHook(next goredis.ProcessHook) goredis.ProcessHook {
	return func(ctx context.Context, cmd goredis.Cmder) error {
		if !strings.HasPrefix(cmd.Name(), "fencelock.") {
			return next(ctx, cmd)
		}
		w.mu.Lock()
		refuse := w.refuse
		w.seen = append(w.seen, cmd.String())
		w.mu.Unlock()
		if refuse != nil {
			return refuse
		}
		return next(ctx, cmd)
	}
}

func (w *watcher) ProcessPipelineHook(next goredis.ProcessPipelineHook) goredis.ProcessPipelineHook {
	return next
}

func (w *watcher) take() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := strings.Join(w.seen, "; ")
	w.seen = nil
	return seen
}

func (w *watcher) refusing(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refuse = err
}

// Hooks of a client see and can refuse the commands on locks, whatever the client's settings, but see no value with
// which they could move a lock.
func TestHooks(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	nodes := startCluster(t)
	type embedding struct{ *goredis.Client }
	for name, client := range map[string]goredis.UniversalClient{
		"defaults": goredis.NewClient(&goredis.Options{Addr: s.addr}),
		"fitting":  goredis.NewClient(fitOptions(s.addr)),
		"embedded": embedding{goredis.NewClient(fitOptions(s.addr))},
		"cluster":  goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{nodes[0].addr}}),
	} {
		w := &watcher{}
		client.AddHook(w)
		defer client.Close()
		d := New(client, nil)
		ctx := within(t, 30*time.Second)
		if err := d.Ping(ctx); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		w.take()
		r := request("n", time.Minute, true)
		g := mustAcquire(t, d, r)
		key := redisscript.KeysOf("fencelock:", "n").Lock
		if seen := w.take(); !strings.Contains(seen, "fencelock.take "+key) || strings.Contains(seen, r.RequestID) {
			t.Errorf("%s: of an acquire hooks see %q", name, seen)
		}
		if answer := d.Renew(ctx, []backend.Grant{g})[0]; answer.Err != nil {
			t.Errorf("%s: %v", name, answer.Err)
		}
		if seen := w.take(); !strings.Contains(seen, "fencelock.n "+key) {
			t.Errorf("%s: of a renewal hooks see %q", name, seen)
		}
		no := errors.New("refused by a hook")
		w.refusing(no)
		if err := d.Release(ctx, g); !errors.Is(err, no) || !errors.Is(err, backend.ErrUnavailable) {
			t.Errorf("%s: a refused release: %v", name, err)
		}
		if answer := d.Renew(ctx, []backend.Grant{g})[0]; !errors.Is(answer.Err, no) ||
			!errors.Is(answer.Err, backend.ErrUnavailable) {
			t.Errorf("%s: a refused renewal: %v", name, answer.Err)
		}
		w.refusing(nil)
		mustRelease(t, d, g)
		if err := d.Close(ctx); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A client of an unknown type, without options, is refused with a reason.
func TestClientOfUnknownType(t *testing.T) {
	t.Parallel()
	type stranger struct{ goredis.UniversalClient }
	c := goredis.NewClient(&goredis.Options{Addr: "127.0.0.1:1"})
	defer c.Close()
	err := New(stranger{c}, nil).Ping(within(t, 10*slack))
	var config *backend.ConfigError
	if !errors.As(err, &config) || config.Setting != "client" {
		t.Errorf("a client of unknown type: %v", err)
	}
}
