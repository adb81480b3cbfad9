package main

import (
	"context"
	"errors"
	"slices"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	_ "github.com/fencelock/fencelock/builtin"   // fencelock://host:port,host:port
	_ "github.com/fencelock/fencelock/etcd"      // etcd://host:port,host:port
	_ "github.com/fencelock/fencelock/postgres"  // postgres://user@host:port/database
	_ "github.com/fencelock/fencelock/redis"     // redis:// and its variants
	_ "github.com/fencelock/fencelock/redlock"   // redlock://host:port,host:port,host:port
	_ "github.com/fencelock/fencelock/zookeeper" // zk://host:port,host:port/chroot
)

// checkBackend refuses the URL of a backend without exclusion between processes. The memory driver is not part of the
// program: its locks live in one process and exclude no other process.
func checkBackend(url string) error {
	if strings.HasPrefix(url, "memory:") && !slices.Contains(backend.Schemes(), "memory") {
		return errors.New("--backend memory://: its locks exist in one process only, and do not exclude other " +
			"processes; to try something out, run 'fencelock serve --dev' and give --backend " +
			"fencelock://127.0.0.1:7480")
	}
	return nil
}

// Standard error belongs to the command, and to the sentences that say prints. The Redis client's own log repeats the
// errors that it returns.
func init() { goredis.SetLogger(silent{}) }

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}
