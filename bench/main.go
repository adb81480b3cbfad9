// Command bench measures fencelock beside the raw commands of its backends and beside the libraries that a user would
// pick instead, all in one run, and prints one table per scenario with the project's targets below it. See README.md.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"
)

// options are the flags.
type options struct {
	backend string
	addr    string
	only    string
	peers   string
	quick   bool
	json    string
	profile string
	check   bool
	seed    uint64
	dump    string

	patience time.Duration
}

func main() {
	if text := os.Getenv(childEnv); text != "" {
		if err := beChild(text); err != nil {
			fmt.Fprintln(os.Stderr, "bench: child:", err)
			os.Exit(1)
		}
		return
	}
	var o options
	flag.StringVar(&o.backend, "backend", backendNames(), "what to measure, a `list` of the default's")
	flag.StringVar(&o.addr, "addr", "", "`host:port` of a running, empty Redis; its database 0 is flushed. Default: start one")
	flag.StringVar(&o.only, "only", "", "`list` of scenarios, or the beginnings of their names. Default: all")
	flag.StringVar(&o.peers, "peers", "", "`list` of rows, or the beginnings of their names. Default: all")
	flag.BoolVar(&o.quick, "quick", false, "one short round of everything: shows that it works, the figures are rough")
	flag.StringVar(&o.json, "json", "", "write everything to `file`, round by round")
	flag.DurationVar(&o.patience, "patience", 0, "repeat rounds in which others used the processors, for so long in all")
	flag.BoolVar(&o.check, "check", false, "measure nothing: break the services, and check what the libraries did")
	flag.Uint64Var(&o.seed, "seed", 0, "with -check: repeat its faults. Default: another one each time")
	flag.StringVar(&o.dump, "dump", "", "with -check: write the histories below `folder`")
	flag.StringVar(&o.profile, "cpuprofile", "", "write a CPU profile of this process to `file`")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "bench: unexpected arguments:", flag.Args())
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	what := run
	if o.check {
		what = runCheck
	}
	if err := what(ctx, os.Stdout, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run measures what o asks for and prints it to w. It fails if a measurement of ours failed, not if a target is missed.
func run(ctx context.Context, w io.Writer, o options) error {
	if o.profile != "" {
		f, err := os.Create(o.profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	r := report{Date: time.Now().UTC().Truncate(time.Second), Command: strings.Join(os.Args[1:], " "), Machine: describeMachine()}
	fmt.Fprintf(w, "%s\n%s\n", r.Date.Format(time.RFC3339), r.Machine)

	failed := 0
	for name := range strings.SplitSeq(o.backend, ",") {
		s, scenarios, err := open(ctx, name, o)
		if err != nil {
			return err
		}
		r.Systems = append(r.Systems, s.version())
		fmt.Fprintln(w, s.version())
		l := &lab{system: s, only: o.peers, quick: o.quick, patience: o.patience}
		for _, sc := range scenarios {
			if ctx.Err() != nil || !selected(sc.name, o.only) {
				continue
			}
			debug.FreeOSMemory() // what one scenario has left must not be collected in the next
			t, ok := sc.run(ctx, l)
			if !ok {
				continue
			}
			t.write(w)
			r.Tables = append(r.Tables, t)
			for _, line := range t.Rows {
				if line.Role == roleOurs && line.Error != "" {
					failed++
				}
			}
		}
		o.patience = l.patience
		if err := s.close(); err != nil {
			return err
		}
	}
	if len(r.Tables) == 0 {
		return fmt.Errorf("no scenario of %q begins with one of %q", o.backend, o.only)
	}
	r.curves(w)
	r.summary(w)
	if err := o.write(r); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("interrupted: %w", err)
	}
	if failed > 0 {
		return fmt.Errorf("%d measurements of %s failed", failed, ours)
	}
	return nil
}

// write writes what was found to the file that was asked for, if one was.
func (o options) write(found any) error {
	if o.json == "" {
		return nil
	}
	text, err := json.MarshalIndent(found, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(o.json, append(text, '\n'), 0o644)
}

// backends are the systems in the order of the report. A new one is a line here and a file that implements system.
var backends = []struct {
	name      string
	start     func(ctx context.Context, running string) (system, error)
	scenarios []scenario
}{
	{"redis", startRedis, slices.Concat(costs, []scenario{distance(100), distance(400), distance(1000)}, contended,
		[]scenario{idle(200), idleNames(200), idleNames(10_000), dead(200, false), dead(200, true)},
		[]scenario{held(1000), held(10_000), held(100_000)}, faults)},
	{"redis-cluster", startRedisCluster, slices.Concat(costs[:3], []scenario{dead(200, false), dead(200, true)})},
	{"redlock", startRedlock, slices.Concat(costs, contended)},
	{"etcd", startEtcd, slices.Concat(costs, contended, []scenario{idle(200), held(1000)}, faults,
		[]scenario{growth()}, etcdTroubles())},
	{"zookeeper", startZooKeeper, slices.Concat(costs, contended, []scenario{idle(200), idle(2000), held(1000)}, faults)},
	{"postgres", startPostgres, []scenario{cycle(1), cycle(32), handoff(16, false), wake(), held(1000), held(10_000)}},
	{"builtin", startBuiltin, slices.Concat(costs, contended, []scenario{
		renewals(256), renewals(1024), idle(200), held(1000), held(10_000), held(100_000), restarts(),
		watching(1), watching(100), watching(1000), failover(true), failover(false),
	}, faults)},
	{"http-redis", startHTTPRedis, costs},
	{"http-builtin", startHTTPBuiltin, costs},
	{"memory", startMemory, slices.Concat(costs, contended)},
	{"core", startCore, []scenario{core()}},
}

var (
	costs     = []scenario{cycle(1), cycle(16), cycle(64), cycle(256)}
	contended = []scenario{handoff(16, false), handoff(64, false), handoff(16, true), wake()}
	faults    = []scenario{partition(), wipe(), stop(), crash()}
)

func backendNames() string {
	var names []string
	for _, b := range backends {
		names = append(names, b.name)
	}
	return strings.Join(names, ",")
}

// open starts a system and returns its scenarios.
func open(ctx context.Context, name string, o options) (system, []scenario, error) {
	for _, b := range backends {
		if b.name == strings.TrimSpace(name) {
			s, err := b.start(ctx, o.addr)
			return s, b.scenarios, err
		}
	}
	return nil, nil, fmt.Errorf("no backend %q: want some of %s", name, backendNames())
}

// describeMachine says where this runs, without its name.
func describeMachine() string {
	model := "unknown processor"
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range bytes.Lines(text) {
			if key, value, ok := bytes.Cut(line, []byte(":")); ok && string(bytes.TrimSpace(key)) == "model name" {
				model = string(bytes.TrimSpace(value))
				break
			}
		}
	}
	return fmt.Sprintf("%d x %s, %s/%s, %s, servers and clients on the same machine",
		runtime.NumCPU(), model, runtime.GOOS, runtime.GOARCH, runtime.Version())
}
