package redisconn

// This file asks one server for the command fencelock doctor.

import (
	"context"
	"fmt"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/doctor"
)

// ClientAt returns a client of one server of the URL. The caller closes it.
func (u *URL) ClientAt(address string) (*goredis.Client, error) {
	opt, err := u.Server(u.Timeout)
	if err != nil {
		return nil, err
	}
	opt.Addr = address
	return goredis.NewClient(opt), nil
}

// Examine asks one server. Policies volatile-… are no problem if tolerated is set.
func (u *URL) Examine(ctx context.Context, address string, tolerated bool) (m doctor.Member, err error) {
	c, err := u.ClientAt(address)
	if err != nil {
		return m, err
	}
	defer func() { _ = c.Close() }()
	s, err := ReadServer(ctx, c)
	if err != nil {
		return m, err
	}
	s.Tolerated = tolerated
	m.Version, m.Role = s.version, doctor.Leader
	if s.RunID != "" {
		m.ID = "run_id " + s.RunID
	}
	if s.role != "master" {
		m.Role = doctor.Follower
	} else if err := s.Fit(); err != nil {
		m.Problems = append(m.Problems, "is unfit: "+err.Error())
	}
	m.Position = "up for " + s.Uptime.String()
	m.Facts = append(m.Facts, fmt.Sprintf("%d connected replicas", s.Replicas))
	if s.Durable {
		m.Facts = append(m.Facts, "writes are on disk before they are acknowledged")
	}
	if !s.Cluster {
		return m, nil
	}
	state, err := clusterState(ctx, c)
	if err != nil {
		return m, err
	}
	m.Position = "epoch " + state["cluster_current_epoch"]
	m.Facts = append(m.Facts, "cluster of "+state["cluster_size"]+" primaries")
	if state["cluster_state"] != "ok" {
		m.Problems = append(m.Problems, "says cluster_state="+state["cluster_state"])
	}
	return m, nil
}

// clusterState reads the answer of CLUSTER INFO.
func clusterState(ctx context.Context, c *goredis.Client) (map[string]string, error) {
	text, err := c.ClusterInfo(ctx).Result()
	if err != nil {
		return nil, err
	}
	state := map[string]string{}
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			state[key] = value
		}
	}
	return state, nil
}
