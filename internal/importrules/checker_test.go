package importrules

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

// sound is a graph without a violation. Imports starting with ./ are of the module; std: marks the standard library.
var sound = map[string]string{
	".":                            "./backend ./fencing std:context",
	"./backend":                    "./fencing golang.org/x/sys/unix std:time",
	"./backend/memory":             "./backend ./fencing",
	"./fencing":                    "std:errors",
	"./fencing/internal/statement": "./fencing std:fmt",
	"./fencing/sqlguard":           "./fencing ./fencing/internal/statement std:database/sql",
	"./fencing/redisguard":         "./fencing github.com/redis/go-redis/v9",
	"./fencing/guardtest":          "./fencing ./conformance/fault",
	"./redis":                      "./backend ./internal/redisscript github.com/redis/go-redis/v9",
	"./etcd":                       "./backend go.etcd.io/etcd/client/v3",
	"./internal/redisscript":       "std:strings",
	"./conformance":                "./conformance/fault . ./backend/memory",
	"./conformance/fault":          "std:net",
	"./conformance/containers":     "./conformance/fault",
	"./cmd/fencelock":              ". ./redis ./etcd ./internal/gateway",
	"./internal/gateway":           "./backend github.com/danielgtaylor/huma/v2",
	"./internal/server":            "./internal/server/lead ./internal/server/replica ./internal/machine",
	"./internal/server/lead":       "./internal/server/replica ./internal/machine",
	"./internal/server/replica":    "./internal/machine github.com/hashicorp/raft",
	"./internal/machine":           "./fencing",
	"github.com/redis/go-redis/v9": "github.com/cespare/xxhash/v2",
}

func build(edges map[string]string) graph {
	full := func(path string) string {
		if path == "." || strings.HasPrefix(path, "./") {
			return module + path[1:]
		}
		return strings.TrimPrefix(path, "std:")
	}
	g := graph{}
	for from, to := range edges {
		p := pkg{ImportPath: full(from)}
		for _, imp := range strings.Fields(to) {
			if test, ok := strings.CutPrefix(imp, "test:"); ok {
				p.XTestImports = append(p.XTestImports, full(test))
				continue
			}
			p.Imports = append(p.Imports, full(imp))
			if strings.HasPrefix(imp, "std:") {
				g[full(imp)] = pkg{ImportPath: full(imp), Standard: true}
			}
		}
		g[p.ImportPath] = p
	}
	return g
}

func TestSoundGraphPasses(t *testing.T) {
	if found := violations(build(sound)); len(found) > 0 {
		t.Errorf("violations in a sound graph: %q", found)
	}
}

func TestEveryWrongArrowIsFound(t *testing.T) {
	for _, c := range []struct{ name, from, to, want string }{
		{"the root imports a driver", ".", "./redis", "fencelock depends on github.com/fencelock/fencelock/redis"},
		{"the root imports a client", ".", "github.com/redis/go-redis/v9", "fencelock depends on github.com/redis"},
		{"the root imports the memory driver", ".", "./backend/memory", "fencelock depends on"},
		{"fencing imports more than the standard library", "./fencing", "golang.org/x/sys/unix", "fencing depends on"},
		{"fencing imports the contract", "./fencing", "./backend", "fencing depends on"},
		{"the contract imports a client", "./backend", "github.com/redis/go-redis/v9", "backend depends on"},
		{"the contract imports the root", "./backend", ".", "backend depends on"},
		{"a driver imports another", "./redis", "./etcd", "another driver"},
		{"a driver imports another by a detour", "./internal/redisscript", "./etcd", "another driver"},
		{"a driver imports the memory driver", "./etcd", "./backend/memory", "another driver"},
		{"a driver imports the root", "./redis", ".", "depends on the root"},
		{"a driver links another's client", "./redis", "go.etcd.io/etcd/client/v3", "a client of etcd"},
		{"a driver links raft", "./redis", "github.com/hashicorp/raft", "a client of builtin"},
		{"a driver's test imports testcontainers", "./redis", "test:github.com/testcontainers/testcontainers-go",
			"conformance/containers/runner may"},
		{"the suite imports testcontainers", "./conformance", "github.com/testcontainers/testcontainers-go",
			"conformance/containers/runner may"},
		{"the suite imports the containers", "./conformance", "./conformance/containers", "depends on containers"},
		{"a program imports the suite", "./cmd/fencelock", "./conformance/fault", "outside of a test"},
		{"a driver imports the suite", "./redis", "./conformance", "outside of a test"},
		{
			"a guard links a client that is not its own", "./fencing/redisguard",
			"go.etcd.io/etcd/client/v3", "only [github.com/redis/]",
		},
		{"a guard without a client links one", "./fencing/sqlguard", "github.com/redis/go-redis/v9", "only []"},
		{"a guard imports a driver", "./fencing/redisguard", "./redis", "knows package fencing only"},
		{"a guard imports another", "./fencing/redisguard", "./fencing/sqlguard", "knows package fencing only"},
		{"a guard imports the suite of guards", "./fencing/redisguard", "./fencing/guardtest", "outside of a test"},
		{"a guard that is not entered", "./fencing/kafkaguard", "./fencing", "no known guard"},
		{
			"a driver links what serves HTTP", "./redis", "github.com/danielgtaylor/huma/v2",
			"only cmd/fencelock serves HTTP",
		},
		{
			"a server links what exports metrics", "./internal/server", "github.com/prometheus/client_golang/prometheus",
			"only cmd/fencelock exports metrics",
		},
		{"a driver links the metrics", "./redis", "./internal/metrics", "only cmd/fencelock exports metrics"},
		{"an example links the gateway", "./examples/x", "./internal/gateway", "only cmd/fencelock serves HTTP"},
		{
			"raft's package imports the leadership", "./internal/server/replica",
			"./internal/server/lead", "which is above it",
		},
		{"the leadership imports the server", "./internal/server/lead", "./internal/server", "which is above it"},
		{"raft's package imports the server", "./internal/server/replica", "./internal/server", "which is above it"},
		{"the state imports raft's package", "./internal/machine", "./internal/server/replica", "which is above it"},
		{"the server knows raft", "./internal/server", "github.com/hashicorp/raft", "knows raft"},
		{"a driver that is not entered", "./consul", "./backend", "no known place"},
	} {
		t.Run(c.name, func(t *testing.T) {
			edges := maps.Clone(sound)
			edges[c.from] += " " + c.to
			found := violations(build(edges))
			if !slices.ContainsFunc(found, func(v string) bool { return strings.Contains(v, c.want) }) {
				t.Errorf("found %q; want one with %q", found, c.want)
			}
		})
	}
}

func TestTestsMayImportTheSuite(t *testing.T) {
	edges := maps.Clone(sound)
	edges["./redis"] += " test:./conformance test:./conformance/containers test:."
	if found := violations(build(edges)); len(found) > 0 {
		t.Errorf("violations: %q", found)
	}
}
