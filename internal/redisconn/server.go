package redisconn

// This file reads a server's report about itself and decides whether the server can keep a lock. The questions are
// INFO and CONFIG GET; a refused answer counts against the server.
//
// Three things are decided by it: whether the server may be used at all (Fit), how much exclusion it can promise
// (Durable, Replicas), and in Redlock whether it has restarted (RunID, Uptime). Package redis asks again at times,
// package redlock on every connection.

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
)

// Server is a server's own report, as far as it matters for locks.
type Server struct {
	// It is a node of a cluster.
	Cluster bool
	// Another one after each start; empty if the server hides it.
	RunID string
	// In whole seconds, rounded down.
	Uptime time.Duration
	// How many are connected.
	Replicas int
	// Acknowledged writes are on disk: appendonly yes, appendfsync always, also while the file is rewritten.
	Durable bool

	// The policies volatile-… are accepted; set by the caller of Fit.
	Tolerated bool

	version      string
	major, minor int
	role         string
	maxmemory    string
	policy       string
	// appendonly yes.
	aof bool
}

// ReadServer asks c for INFO, and for CONFIG where that decides; a server that refuses to answer counts as a server
// that forgets.
func ReadServer(ctx context.Context, c goredis.Cmdable) (Server, error) {
	text, err := c.Info(ctx).Result()
	if err != nil {
		return Server{}, Unsent(err)
	}
	s := parseInfo(text)
	// Without a file there is nothing that CONFIG could add.
	if !s.aof {
		return s, nil
	}
	got, err := c.ConfigGet(ctx, "*appendfsync*").Result()
	var refused goredis.Error
	if err != nil && !errors.As(err, &refused) {
		return Server{}, Unsent(err)
	}
	// With no-appendfsync-on-rewrite the server answers before the write is on disk for as long as it rewrites the
	// file.
	s.Durable = got["appendfsync"] == "always" && got["no-appendfsync-on-rewrite"] != "yes"
	return s, nil
}

// parseInfo reads the text of INFO. Lines that are missing leave the zero value, which is the safe side: no version, no
// master, no uptime.
func parseInfo(text string) Server {
	var s Server
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch key {
		case "redis_version":
			s.setVersion(value)
		case "role":
			s.role = value
		case "maxmemory":
			s.maxmemory = value
		case "maxmemory_policy":
			s.policy = value
		case "cluster_enabled":
			s.Cluster = value == "1"
		case "run_id":
			s.RunID = value
		case "uptime_in_seconds":
			seconds, _ := strconv.Atoi(value) // not a number: 0, the safe side
			s.Uptime = time.Duration(max(0, seconds)) * time.Second
		case "aof_enabled":
			s.aof = value == "1"
		case "connected_slaves":
			s.Replicas, _ = strconv.Atoi(value) // not a number: 0
		}
	}
	return s
}

// setVersion reads a version as far as its second number.
func (s *Server) setVersion(text string) {
	s.version = text
	major, rest, _ := strings.Cut(text, ".")
	minor, _, _ := strings.Cut(rest, ".")
	s.major, _ = strconv.Atoi(major) // not a number: 0, which is refused as too old
	s.minor, _ = strconv.Atoi(minor)
}

// Version is the server's version, such as 7.0.15.
func (s Server) Version() string { return s.version }

// ParseVersion returns a server of which no more is known than its version, which must do for the script.
func ParseVersion(text string) (Server, error) {
	var s Server
	s.setVersion(text)
	if !s.AtLeast(6, 0) {
		return s, errors.New("want the version of a server, 6.0 or later, such as 7.0")
	}
	return s, nil
}

// AtLeast reports whether the server's version is major.minor or later.
func (s Server) AtLeast(major, minor int) bool {
	return s.major > major || s.major == major && s.minor >= minor
}

// Evicts reports whether the server throws keys with a time to live away when its memory is full.
func (s Server) Evicts() bool {
	return s.maxmemory != "" && s.maxmemory != "0" && s.policy != "noeviction"
}

// Fit refuses a server that cannot keep a lock: one too old for the script, a replica, one that evicts, unless that is
// tolerated. Eviction is refused because a hold is a key with a time to live, which every policy except noeviction may
// delete while the hold is valid.
func (s Server) Fit() error {
	switch {
	case !s.AtLeast(6, 0):
		return &backend.ConfigError{
			Setting: "redis_version", Value: s.version, Want: "6.0 or later", Why: "the lock script needs it",
		}
	// A replica refuses the writes of every lock, and its answers are late.
	case s.role != "master":
		return &backend.ConfigError{
			Setting: "role", Value: s.role, Want: "master", Why: "a replica grants nothing and lags behind",
		}
	case s.Evicts() && !(s.Tolerated && strings.HasPrefix(s.policy, "volatile-")):
		return &backend.ConfigError{
			Setting: "maxmemory-policy", Value: s.policy, Want: "noeviction",
			Why: "with maxmemory " + s.maxmemory + " the server throws held locks away to make room" + s.advice(),
		}
	}
	return nil
}

// advice names the alternative for servers with a fixed policy, such as some hosted ones. With the policies allkeys-…
// there is none: they throw away keys whatever their time to live.
func (s Server) advice() string {
	if !strings.HasPrefix(s.policy, "volatile-") {
		return ""
	}
	return "; allow-volatile-eviction accepts that"
}
