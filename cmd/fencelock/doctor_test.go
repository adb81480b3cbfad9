//go:build unix

package main

import (
	"context"
	"fmt"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/freeport"
)

// Two services that know nothing of each other under one URL contradict each other, and a lone one does not.
func TestDoctor(t *testing.T) {
	t.Parallel()
	tick := fmt.Sprintf("?tick=%v", containers.ZooKeeperTick)
	for name, c := range map[string]struct {
		start  func(*testing.T) string // the address
		url    func(addresses string) string
		role   string
		tokens bool
		two    []string // problems of two
		twice  string   // the problem of one under two addresses
	}{
		"etcd": {
			func(t *testing.T) string { return containers.Etcd(t).Addr() },
			func(a string) string { return "etcd://" + a }, "leader", true,
			[]string{"belong to different clusters: ", "have different token spaces: ", "2 servers lead at once: "}, "are the same server",
		},
		"zookeeper": {
			func(t *testing.T) string { return containers.ZooKeeper(t).Addr() }, func(a string) string { return "zk://" + a + tick }, "standalone", true,
			[]string{"have different token spaces: ", "2 servers lead at once: "}, "3 servers lead at once: ",
		},
		"redlock": {
			func(t *testing.T) string { return containers.Redis(t).Addr() },
			func(a string) string { return "redlock://" + a + "?trust-fresh=true" }, "leader", false,
			nil, "are the same server",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			one, other := c.start(t), c.start(t)
			if c.tokens { // the first clients make the token spaces
				for _, a := range []string{one, other} {
					if all := diagnose(t, c.url(a), exitOK); all[0].Space != "" || len(all[0].Problems) > 0 {
						t.Errorf("before the first client: %+v", all)
					}
					hold(t, c.url(a), "client", "x")
				}
			}
			if c.tokens {
				all := diagnose(t, c.url(one), exitOK)
				if m := all[0]; len(all) != 1 || m.Address == "" || m.Role != c.role || m.Space == "" || m.Position == "" || m.Version == "" {
					t.Errorf("one server: %+v", all)
				}
			}
			code := exitUnavailable
			if c.two == nil {
				code = exitOK
			}
			if c.tokens {
				diagnose(t, c.url(one+","+other), code, c.two...)
			} else {
				diagnose(t, c.url(one+","+other+","+c.start(t)), code)
			}
			_, number, _ := strings.Cut(one, ":")
			diagnose(t, c.url(one+","+other+",localhost:"+number), exitUnavailable, c.twice)
			misses(t, c.url(one+","+other+","+freeport.Addresses(t, 1)[0]))
		})
	}
}

// diagnose runs doctor, which must name the problems.
func diagnose(t *testing.T, url string, code int, problems ...string) []patient {
	t.Helper()
	p := start(t, "doctor", "--backend", url, "--json", "--timeout", "1m")
	all := objects[patient](t, p.output())
	p.expectExit(code, problems...)
	return all
}

// misses runs doctor, which must name an address where no server listens. Clients of etcd try again until the timeout.
func misses(t *testing.T, url string) {
	t.Helper()
	start(t, "doctor", "--backend", url, "--timeout", "1s").expectExit(exitUnavailable, "does not answer: ")
}

func TestDoctorOfPostgres(t *testing.T) {
	t.Parallel()
	fsync := containers.Args("-c", "fsync=on")
	one, other := containers.Postgres(t, fsync), containers.Postgres(t, fsync)
	diagnose(t, one.URL(), exitUnavailable, "has no schema fencelock: run `fencelock postgres migrate`")
	for _, s := range []*containers.PostgresServer{one, other} {
		succeed(t, "postgres", "migrate", "--backend", s.URL())
		hold(t, s.URL(), "client", "x")
	}
	all := diagnose(t, one.URL(), exitOK)
	if m := all[0]; len(all) != 1 || m.Role != "leader" || m.Space == "" || m.Cluster == "" || !strings.Contains(m.Position, "timeline 1") {
		t.Errorf("one server: %+v", all)
	}
	both := strings.Replace(one.URL(), one.Addr(), one.Addr()+","+other.Addr(), 1)
	diagnose(t, both, exitUnavailable, "have different token spaces: ", "2 servers lead at once: ")
}

func TestDoctorOfRedis(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	url := "redis://" + server.Addr()
	if all := diagnose(t, url, exitOK); len(all) != 1 || all[0].Role != "leader" || !strings.HasPrefix(all[0].Server, "run_id ") {
		t.Errorf("one server: %+v", all)
	}
	c := goredis.NewClient(&goredis.Options{Addr: server.Addr()})
	defer c.Close()
	ctx := context.Background()
	if err := c.ConfigSet(ctx, "maxmemory", "1gb").Err(); err != nil {
		t.Fatal(err)
	}
	if err := c.ConfigSet(ctx, "maxmemory-policy", "allkeys-lru").Err(); err != nil {
		t.Fatal(err)
	}
	diagnose(t, url, exitUnavailable, "is unfit: ", "maxmemory-policy", "a client cannot use the service: ")
	misses(t, "redis://"+freeport.Addresses(t, 1)[0])
}

// The members of a bundled server are judged as status does.
func TestDoctorOfBundledServer(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	if text := succeed(t, "doctor", "--backend", url); !strings.Contains(text, "leader") {
		t.Errorf("doctor prints:\n%s", text)
	}
	start(t, "doctor", "--backend", "memory://").expectExit(exitUsage, "has no addresses to ask")
}
