package containers_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/conformance/containers"
)

// TestZooKeeperKeepsData restarts a server, in both ways to run it.
func TestZooKeeperKeepsData(t *testing.T) {
	t.Parallel()
	for way, option := range map[string]containers.Option{
		"container": containers.AsContainer(), "process": containers.AsProcess(),
	} {
		t.Run(way, func(t *testing.T) {
			server := containers.ZooKeeper(t, option)
			client, events, err := zk.Connect([]string{server.Addr()}, 4*time.Second,
				zk.WithLogInfo(false), zk.WithLogger(silent{}))
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				client.Close()
				for range events {
				}
			}()
			if _, err := client.Create(
				"/kept", []byte("text"), zk.FlagPersistent, zk.WorldACL(zk.PermAll),
			); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := server.Restart(ctx); err != nil {
				t.Fatal(err)
			}
			var data []byte
			for {
				data, _, err = client.Get("/kept")
				again := errors.Is(err, zk.ErrConnectionClosed) || errors.Is(err, zk.ErrNoServer) ||
					errors.Is(err, zk.ErrSessionExpired)
				if !again || ctx.Err() != nil {
					break
				}
			}
			if err != nil || string(data) != "text" {
				t.Errorf("after a restart: %q, %v; want what was stored", data, err)
			}
		})
	}
}

type silent struct{}

func (silent) Printf(string, ...any) {}
