package lines

// This file asks the servers of a client questions that are not sent on a line.

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/redisconn"
)

// IsSentinel reports whether client finds its server through Sentinel. go-redis 9 shows that nowhere but in the
// address, for which it writes FailoverClient.
func IsSentinel(client goredis.UniversalClient) bool {
	c, ok := client.(*goredis.Client)
	return ok && c.Options().Addr == "FailoverClient" // go-redis writes this for one
}

// IsCluster reports whether client is one of a cluster.
func IsCluster(client goredis.UniversalClient) bool {
	_, ok := client.(*goredis.ClusterClient)
	return ok
}

// EachMaster asks every server that has locks, the masters of a cluster side by side, and returns their answers in no
// order. It ends with the first error.
func EachMaster[T any](ctx context.Context, client goredis.UniversalClient,
	ask func(context.Context, goredis.Cmdable) (T, error)) (all []T, err error) {
	cluster, ok := client.(*goredis.ClusterClient)
	if !ok {
		one, err := ask(ctx, client)
		return []T{one}, err
	}
	// Each master is asked by a goroutine of the client's: hence the lock.
	var mu sync.Mutex
	err = cluster.ForEachMaster(ctx, func(ctx context.Context, c *goredis.Client) error {
		one, err := ask(ctx, c)
		mu.Lock()
		defer mu.Unlock()
		all = append(all, one)
		return err
	})
	return all, err
}

// MasterOf asks the client which node of a cluster has a lock.
func MasterOf(ctx context.Context, cluster *goredis.ClusterClient, lock string) (*goredis.Client, error) {
	return Question(ctx, func(ctx context.Context) (*goredis.Client, error) { return cluster.MasterForKey(ctx, lock) })
}

// Question sends a read-only question and returns within ctx. go-redis 9.23 ends a command with its context's deadline
// but not with its cancellation, so the question is asked on a separate goroutine, which ends after answerTime at the
// latest. A step cannot be left behind like that: its outcome would matter.
func Question[T any](ctx context.Context, ask func(context.Context) (T, error)) (T, error) {
	return QuestionFor(ctx, answerTime, ask)
}

// QuestionFor is Question with another time than answerTime.
func QuestionFor[T any](ctx context.Context, most time.Duration, ask func(context.Context) (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	got := make(chan answer, 1)
	go func() {
		ctx, cancel := context.WithTimeout(ctx, most)
		defer cancel()
		value, err := ask(ctx)
		got <- answer{value, err}
	}()
	var none T
	select {
	case a := <-got:
		if a.err == nil {
			return a.value, nil
		}
		return none, redisconn.Unsent(a.err)
	case <-ctx.Done():
		return none, &redisconn.Failure{Cause: ctx.Err()}
	}
}

// Masters returns a client of each server that has locks, in the order of their addresses.
func Masters(ctx context.Context, client goredis.UniversalClient) (all []goredis.Cmdable, err error) {
	if !IsCluster(client) {
		return []goredis.Cmdable{client}, nil
	}
	found, err := EachMaster(ctx, client, func(_ context.Context, c goredis.Cmdable) (*goredis.Client, error) {
		return c.(*goredis.Client), nil
	})
	slices.SortFunc(found, func(a, b *goredis.Client) int {
		return strings.Compare(a.Options().Addr, b.Options().Addr)
	})
	for _, one := range found {
		all = append(all, one)
	}
	return all, err
}
