package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/doctor"
	"github.com/fencelock/fencelock/internal/redisconn"
)

func init() { doctor.Register(examine, slices.Concat(plain, secure)...) }

// examine asks every address of a URL separately. Sentinels are asked for the master that they know, and each of these
// masters is a member, too.
func examine(ctx context.Context, rawURL string) (*doctor.Report, error) {
	u, client, err := dial(rawURL)
	if err != nil {
		return nil, err
	}
	if err := client.Close(); err != nil { // it has not connected
		return nil, err
	}
	o, err := optionsOf(u)
	if err != nil {
		return nil, u.Invalid(err)
	}
	ask := func(addresses []string) []doctor.Member {
		return doctor.Ask(ctx, addresses, func(ctx context.Context, i int) (doctor.Member, error) {
			return u.Examine(ctx, addresses[i], o.AllowVolatileEviction)
		})
	}
	_, variant, _ := strings.Cut(u.Scheme, "+")
	switch variant {
	case "cluster":
		return &doctor.Report{Members: ask(u.Addresses), Independent: true, NoTokens: true}, nil // several primaries
	case "sentinel":
		sentinels, masters := askSentinels(ctx, u)
		members := ask(masters)
		for i := range members {
			if members[i].Role == doctor.Follower {
				members[i].Problems = append(members[i].Problems, "is a replica, and a Sentinel takes it for the master")
			}
		}
		return &doctor.Report{Members: slices.Concat(sentinels, members), NoTokens: true}, nil
	}
	return &doctor.Report{Members: ask(u.Addresses), NoTokens: true}, nil
}

// askSentinels asks each Sentinel for the address of the master. The second result has each address once.
func askSentinels(ctx context.Context, u *redisconn.URL) (sentinels []doctor.Member, masters []string) {
	found := make([]string, len(u.Addresses))
	sentinels = doctor.Ask(ctx, u.Addresses, func(ctx context.Context, i int) (m doctor.Member, err error) {
		opt, err := u.Server(u.Timeout)
		if err != nil {
			return m, err
		}
		opt.Addr, opt.CredentialsProviderContext = u.Addresses[i], nil
		if opt.Username, opt.Password, err = sentinelCredentials(u); err != nil {
			return m, err
		}
		c := goredis.NewSentinelClient(opt)
		defer func() { _ = c.Close() }()
		m.Role = "sentinel"
		master, err := c.GetMasterAddrByName(ctx, u.Path).Result()
		if errors.Is(err, goredis.Nil) {
			m.Problems = append(m.Problems, fmt.Sprintf("knows no master %q", u.Path))
			return m, nil
		}
		if err == nil && len(master) == 2 {
			found[i] = net.JoinHostPort(master[0], master[1])
			m.Facts = append(m.Facts, "master "+found[i])
		}
		return m, err
	})
	for _, address := range found {
		if address != "" && !slices.Contains(masters, address) {
			masters = append(masters, address)
		}
	}
	return sentinels, masters
}
