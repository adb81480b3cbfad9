// Command refused hands a driver that cannot fence to the correctness tier.
package main

import (
	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/redis"
)

func main() {
	client := goredis.NewClient(&goredis.Options{})
	_, _ = fencelock.ForCorrectness(redis.New(client, nil), nil)
}
