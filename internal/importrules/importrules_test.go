// Package importrules asserts which package may import which. The structure stays easy to read, and a program links only
// the clients that it uses, as long as the arrows point one way:
//
//	examples, cmd → root → backend → fencing → standard library
//	drivers → backend/engine → backend/kit → backend          conformance → root
//	fencing/*guard → fencing   fencing/guardtest → conformance/fault
//	cmd/fencelock → internal/gateway → huma
//	internal/server → its lead → its replica → internal/machine; replica → raft
package importrules

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/fencelock/fencelock"

// pkg is the output of go list for one package.
type pkg struct {
	ImportPath   string
	Standard     bool
	Imports      []string
	TestImports  []string
	XTestImports []string
}

// graph has every package of the module and all their dependencies outside of tests.
type graph map[string]pkg

func TestArrows(t *testing.T) {
	g := load(t)
	if _, ok := g[module]; !ok {
		t.Fatalf("go list does not know %s", module)
	}
	for _, v := range violations(g) {
		t.Error(v)
	}
}

func load(t *testing.T) graph {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-deps", "-json=ImportPath,Standard,Imports,TestImports,XTestImports",
		module+"/...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	g := graph{}
	for in := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := in.Decode(&p); errors.Is(err, io.EOF) {
			return g
		} else if err != nil {
			t.Fatal(err)
		}
		g[p.ImportPath] = p
	}
}

// drivers are the folders of drivers. Each may link the clients with these prefixes of import paths.
var drivers = map[string][]string{
	"backend/memory": nil,
	"redis":          {"github.com/redis/"},
	"redlock":        {"github.com/redis/"},
	"etcd":           {"go.etcd.io/", "google.golang.org/grpc"},
	"zookeeper":      {"github.com/go-zookeeper/"},
	"postgres":       {"github.com/jackc/"},
	"builtin":        {"github.com/hashicorp/", "google.golang.org/grpc", "go.etcd.io/bbolt"},
}

// guards are the folders of package fencing with further dependencies, and the clients that each may import: a
// program that uses one guard links that guard's client only. Of the module they may import only package fencing.
var guards = map[string][]string{
	"fencing/internal":    nil,
	"fencing/sqlguard":    nil,
	"fencing/httpguard":   nil,
	"fencing/objectguard": nil,
	"fencing/pgxguard":    {"github.com/jackc/"},
	"fencing/redisguard":  {"github.com/redis/"},
	"fencing/etcdguard":   {"go.etcd.io/"},
	"fencing/grpcguard":   {"google.golang.org/"},
}

// places are the other folders of the module. A package elsewhere is an error, so that a new driver is added above.
var places = []string{
	".", "backend", "backend/engine", "backend/kit", "fencing", "conformance", "locktest", "cmd", "examples", "internal",
}

// testcontainers and its dependencies: only the module conformance/containers/runner requires them.
var testcontainers = []string{"github.com/testcontainers/", "github.com/moby/", "github.com/docker/"}

// violations returns every arrow that points the wrong way.
func violations(g graph) []string {
	var found []string
	for _, path := range slices.Sorted(maps.Keys(g)) {
		if !ours(path) {
			continue
		}
		place, driver := placeOf(path)
		if place == "" {
			found = append(found, path+" is in no known place: enter it in drivers or places")
		}
		found = append(found, core(g, path, place)...)
		if place == "fencing" && path != module+"/fencing" && path != guardtest {
			found = append(found, guard(g, path)...)
		}
		if driver {
			found = append(found, clean(g, path, place)...)
		}
		found = append(found, testOnly(g, path)...)
		found = append(found, door(g, path)...)
		found = append(found, exported(g, path)...)
		found = append(found, layer(g, path)...)
	}
	return found
}

// layers are the layers of the bundled server, the lowest first. No layer depends on one above it, and only the
// second one depends on raft: the serving and the leading layer do not mention it.
var layers = []string{
	module + "/internal/machine", module + "/internal/server/replica", module + "/internal/server/lead",
	module + "/internal/server",
}

// layer checks a layer of the bundled server.
func layer(g graph, path string) (found []string) {
	own := slices.Index(layers, path)
	if own < 0 {
		return nil
	}
	for _, dep := range g.deps(path) {
		if slices.Index(layers, dep) > own {
			found = append(found, fmt.Sprintf("%s depends on %s, which is above it", path, dep))
		}
	}
	for _, imp := range g[path].Imports {
		if strings.HasPrefix(imp, "github.com/hashicorp/") && own != 1 {
			found = append(found, fmt.Sprintf("%s imports %s: only %s knows raft", path, imp, layers[1]))
		}
	}
	return found
}

// exported checks that only the binary links the metrics of servers, and with them client_golang.
func exported(g graph, path string) (found []string) {
	const metrics = module + "/internal/metrics"
	if path == metrics || path == module+"/cmd/fencelock" || path == module+"/internal/monitoring" {
		return nil
	}
	for _, dep := range g.deps(path) {
		if dep == metrics || strings.HasPrefix(dep, "github.com/prometheus/client_golang") {
			found = append(found, fmt.Sprintf("%s depends on %s: only cmd/fencelock exports metrics", path, dep))
		}
	}
	return found
}

// door checks that only the gateway itself and the binary link the HTTP server.
func door(g graph, path string) (found []string) {
	const gateway, binary = module + "/internal/gateway", module + "/cmd/fencelock"
	if path == gateway || path == binary {
		return nil
	}
	for _, dep := range g.deps(path) {
		if dep == gateway || strings.HasPrefix(dep, "github.com/danielgtaylor/huma/") {
			found = append(found, fmt.Sprintf("%s depends on %s: only cmd/fencelock serves HTTP", path, dep))
		}
	}
	return found
}

// core checks the root and the two packages below it, which link next to nothing.
func core(g graph, path, place string) (found []string) {
	var allowed []string
	switch place {
	case ".":
		allowed = []string{
			module + "/backend", module + "/fencing", module + "/internal/randsource",
			module + "/internal/cleanup", module + "/internal/history", module + "/internal/poll", "golang.org/x/sys",
		}
	case "backend":
		allowed = []string{module + "/fencing", "golang.org/x/sys"}
	case "backend/engine":
		allowed = []string{
			module + "/backend", module + "/backend/kit", module + "/fencing", module + "/internal/randsource",
			module + "/internal/tlsfiles", "golang.org/x/sys", "C", // C: of package net
		}
	case "backend/kit":
		allowed = []string{ // C: of package net
			module + "/backend", module + "/fencing", module + "/internal/tlsfiles", "golang.org/x/sys", "C",
		}
	case "fencing":
		if path != module+"/fencing" {
			return nil // guards that need a client are sub-packages
		}
	default:
		return nil
	}
	for _, dep := range g.deps(path) {
		exact := slices.Contains(allowed, dep)
		if exact || g[dep].Standard || allowed != nil && strings.HasPrefix(dep, "golang.org/x/sys/") {
			continue
		}
		found = append(found,
			fmt.Sprintf("%s depends on %s: only %v and the standard library are allowed", path, dep, allowed))
	}
	return found
}

// clean checks a driver: it depends on no other driver, not on the root, and on no other driver's client.
func clean(g graph, path, own string) (found []string) {
	for _, dep := range g.deps(path) {
		if dep == module {
			found = append(found, fmt.Sprintf("%s depends on the root: a driver knows only the contract", path))
		}
		if ours(dep) {
			if place, driver := placeOf(dep); driver && place != own {
				found = append(found, fmt.Sprintf("%s depends on %s, another driver", path, dep))
			}
			continue
		}
		for _, other := range slices.Sorted(maps.Keys(drivers)) {
			if hasPrefix(dep, drivers[other]) && !hasPrefix(dep, drivers[own]) {
				found = append(found, fmt.Sprintf("%s depends on %s, a client of %s", path, dep, other))
				break
			}
		}
	}
	return found
}

// guard checks a sub-package of fencing.
func guard(g graph, path string) (found []string) {
	var clients []string
	known := false
	for folder, links := range guards {
		if path == module+"/"+folder || strings.HasPrefix(path, module+"/"+folder+"/") {
			known, clients = true, links
		}
	}
	if !known {
		return []string{path + " is no known guard: enter it in guards, with the client that it links"}
	}
	for _, dep := range g.deps(path) {
		if ours(dep) && dep != module+"/fencing" && !strings.HasPrefix(dep, module+"/fencing/internal/") {
			found = append(found, fmt.Sprintf("%s depends on %s: a guard knows package fencing only", path, dep))
		}
	}
	for _, imp := range g[path].Imports {
		if !g[imp].Standard && !ours(imp) && !hasPrefix(imp, clients) {
			found = append(found, fmt.Sprintf("%s imports %s: only %v are allowed", path, imp, clients))
		}
	}
	return found
}

// guardtest is conformance for guards: it serves tests only, and breaks processes with the same tools.
const guardtest = module + "/fencing/guardtest"

// testOnly checks the packages for tests: only tests, and the program that reports on them, import the conformance
// suite, and none, nor its test, imports testcontainers.
func testOnly(g graph, path string) (found []string) {
	const conformance, containers = module + "/conformance", module + "/conformance/containers"
	const report = module + "/internal/testreport"
	within := func(path, root string) bool { return path == root || strings.HasPrefix(path, root+"/") }
	p := g[path]
	for _, imp := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
		if hasPrefix(imp, testcontainers) {
			found = append(found, fmt.Sprintf("%s imports %s: only the module of %s/runner may", path, imp, containers))
		}
	}
	if within(path, conformance) || path == guardtest || path == report {
		if path == conformance && slices.Contains(g.deps(path), containers) {
			found = append(found, fmt.Sprintf("%s depends on containers: its users choose their servers", path))
		}
		return found
	}
	for _, imp := range p.Imports {
		if within(imp, conformance) || imp == guardtest {
			found = append(found, fmt.Sprintf("%s imports %s outside of a test", path, imp))
		}
	}
	return found
}

// deps returns everything that path depends on.
func (g graph) deps(path string) []string {
	seen := map[string]bool{}
	var visit func(string)
	visit = func(path string) {
		for _, imp := range g[path].Imports {
			if !seen[imp] {
				seen[imp] = true
				visit(imp)
			}
		}
	}
	visit(path)
	return slices.Sorted(maps.Keys(seen))
}

func ours(path string) bool { return path == module || strings.HasPrefix(path, module+"/") }

// placeOf returns the entry of drivers or places that the package belongs to, the longest one; empty without an
// entry.
func placeOf(path string) (place string, driver bool) {
	folder := strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
	if folder == "" {
		return ".", false
	}
	match := func(candidate string) bool {
		return (folder == candidate || strings.HasPrefix(folder, candidate+"/")) && len(candidate) > len(place)
	}
	for _, p := range places {
		if match(p) {
			place, driver = p, false
		}
	}
	for d := range drivers {
		if match(d) {
			place, driver = d, true
		}
	}
	return place, driver
}

func hasPrefix(path string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(path, prefix) })
}
