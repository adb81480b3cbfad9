package redisguard

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
)

var (
	// ErrEvicts: the server may evict keys without an expiry, including the keys of guards.
	ErrEvicts = errors.New("redisguard: the server may evict the guard's memory")
	// ErrForgets: the server may lose acknowledged writes at a restart.
	ErrForgets = errors.New("redisguard: the server may lose the guard's memory when it restarts")
	// ErrReplica: the server takes its data from another one, which may not have sent all.
	ErrReplica = errors.New("redisguard: the server is a replica")
)

// Probe asks the server whether it may lose the keys of guards: ErrEvicts, ErrForgets or ErrReplica if so. It takes the
// INFO command, and CONFIG GET where the user may execute it, and checks one server: on a cluster the server that
// answers. It cannot predict the losses of a failover.
func Probe(ctx context.Context, client redis.Cmdable) error {
	text, err := client.Info(ctx).Result()
	if err != nil {
		return fmt.Errorf("redisguard: probe: %w", err)
	}
	info := map[string]string{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		info[key] = value
	}
	limit, policy := info["maxmemory"], info["maxmemory_policy"]
	switch {
	case limit != "" && limit != "0" && strings.HasPrefix(policy, "allkeys-"):
		return fmt.Errorf("%w: maxmemory is %s, maxmemory-policy %s, want noeviction or volatile-*", ErrEvicts, limit,
			policy)
	case info["aof_enabled"] == "0":
		return fmt.Errorf("%w: appendonly is no, want yes", ErrForgets)
	case info["role"] == "slave":
		return fmt.Errorf("%w of %s:%s", ErrReplica, info["master_host"], info["master_port"])
	}
	// Managed services and many users may not.
	if config, err := client.ConfigGet(ctx, "appendfsync").Result(); err == nil && config["appendfsync"] == "no" {
		return fmt.Errorf("%w: appendfsync is no, want always or everysec", ErrForgets)
	}
	return nil
}
