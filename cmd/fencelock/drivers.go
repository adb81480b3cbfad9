package main

import (
	"context"

	goredis "github.com/redis/go-redis/v9"

	_ "github.com/fencelock/fencelock/backend/memory" // memory://name, for trying out: it is of this process only
	_ "github.com/fencelock/fencelock/builtin"        // fencelock://host:port,host:port
	_ "github.com/fencelock/fencelock/etcd"           // etcd://host:port,host:port
	_ "github.com/fencelock/fencelock/redis"          // redis:// and its variants
	_ "github.com/fencelock/fencelock/redlock"        // redlock://host:port,host:port,host:port
	_ "github.com/fencelock/fencelock/zookeeper"      // zk://host:port,host:port/chroot
)

// Standard error belongs to the command, and to the sentences that say prints. What the Redis client logs by itself says
// the same again as the errors that it returns.
func init() { goredis.SetLogger(silent{}) }

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}
