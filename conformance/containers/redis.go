package containers

import (
	"bufio"
	"context"
	"net"
	"strings"
	"testing"
	"time"
)

// RedisServer is one Redis, without persistence unless arguments ask for it: after Restart it is empty.
type RedisServer struct{ *Server }

// Redis starts a Redis server for the test t, and stops it at the end. Every call starts a new server; this takes
// less than a second if the engine has the image. Args are those of redis-server:
//
//	containers.Redis(t, containers.Args("--appendonly", "yes", "--appendfsync", "always"))
//
// The image is FENCELOCK_IMAGE_REDIS, by default the official redis:8; Valkey's works as well. The program is
// redis-server.
func Redis(t testing.TB, opts ...Option) *RedisServer {
	t.Helper()
	return &RedisServer{run(t, redisSpec, opts, newContainer, newProcess)}
}

var redisSpec = spec{
	name:   "Redis",
	image:  "redis:8",
	env:    "FENCELOCK_IMAGE_REDIS",
	port:   "6379/tcp",
	binary: "redis-server",
	args:   []string{"--save", ""},
	process: func(addr, dir string) []string {
		host, port, _ := strings.Cut(addr, ":")
		return []string{"--bind", host, "--port", port, "--dir", dir}
	},
	ready:   redisReady,
	install: "a Docker engine that can pull redis:8, or redis-server (Debian and Ubuntu: apt-get install redis-server)",
}

// redisReady reports whether the server at addr serves commands. A server that requires a password serves, too.
func redisReady(ctx context.Context, addr string) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return false
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	c.SetDeadline(deadline)
	if _, err := c.Write([]byte("PING\r\n")); err != nil {
		return false
	}
	answer, err := bufio.NewReader(c).ReadString('\n')
	return err == nil && (strings.HasPrefix(answer, "+PONG") || strings.HasPrefix(answer, "-NOAUTH"))
}
