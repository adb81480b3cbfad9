package redisguard_test

import (
	"context"
	"errors"
	"log"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/redisguard"
)

// The write is a script that runs together with the check. In a cluster both keys are in the slot of {accounts/42}.
func Example() {
	ctx := context.Background()
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true, MaxRetries: -1})
	defer client.Close()
	if err := redisguard.Probe(ctx, client); err != nil {
		log.Fatal(err) // the server may forget what guards remember
	}
	guard, err := redisguard.New(client, nil)
	if err != nil {
		log.Fatal(err)
	}
	debit := redisguard.NewWrite(`return redis.call('DECRBY', KEYS[1], ARGV[1])`)

	claim := fencing.Claim{Resource: "accounts/42", Token: 33} // lease.Token()
	balance, err := guard.Do(ctx, claim, debit, []string{"balance:{accounts/42}"}, 10)
	if errors.Is(err, fencing.ErrStale) {
		log.Fatal("somebody else holds the lock by now: ", err)
	}
	log.Print(balance, err)
}
