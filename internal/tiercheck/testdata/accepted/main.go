// Command accepted uses each tier with a driver that can serve it.
package main

import (
	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/redis"
)

func main() {
	_, _ = fencelock.ForEfficiency(redis.New(goredis.NewClient(&goredis.Options{}), nil), nil)
	_, _ = fencelock.ForEfficiency(memory.New(nil), nil)
	_, _ = fencelock.ForCorrectness(memory.New(nil), nil)
}
