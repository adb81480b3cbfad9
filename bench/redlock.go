package main

import (
	"context"

	syncbackend "github.com/go-redsync/redsync/v4/redis"
	syncredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/redlock"
)

// redlockSystem is five independent Redis servers of which a majority decides. It has no single address, so scenarios
// that break the network do not apply.
type redlockSystem struct{ redisSystems }

func startRedlock(ctx context.Context, _ string) (system, error) {
	s := &redlockSystem{}
	for range 5 {
		one, err := openRedis(ctx, "")
		if err != nil {
			s.close()
			return nil, err
		}
		s.redisSystems = append(s.redisSystems, one)
	}
	return s, nil
}

func (s *redlockSystem) name() string    { return "redlock" }
func (s *redlockSystem) version() string { return "5 × " + s.redisSystems[0].version() }

func (s *redlockSystem) peers() []peer {
	return []peer{
		{name: ours, role: roleOurs, waits: true, renewEvery: ourRenewal, open: s.openOurs},
		{name: "redsync-5", role: rolePeer, waits: true, open: s.openRedsync},
	}
}

func (s *redlockSystem) openOurs(o clientOptions) (client, error) {
	var clients []goredis.UniversalClient
	for _, one := range s.redisSystems {
		c := goredis.NewClient(&goredis.Options{Addr: one.address})
		clients = append(clients, c)
	}
	d := redlock.New(clients, &redlock.Options{TrustFresh: true})
	for _, c := range clients {
		_ = c.Close() // the driver makes its own from their options, and these have not connected
	}
	return newOurs(d, o.ttl, func() {})
}

// openRedsync is redsync on five nodes, with its defaults and unbounded tries.
func (s *redlockSystem) openRedsync(o clientOptions) (client, error) {
	var clients []*goredis.Client
	var pools []syncbackend.Pool
	for _, one := range s.redisSystems {
		c := goredis.NewClient(&goredis.Options{Addr: one.address})
		clients, pools = append(clients, c), append(pools, syncredis.NewPool(c))
	}
	return redsyncOn(o.ttl, func() {
		for _, c := range clients {
			c.Close()
		}
	}, pools...), nil
}
