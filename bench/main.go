// Command bench measures fencelock, the raw commands of its services, and the libraries that a user could choose
// instead, all in one run. It prints one table per scenario, with the project's targets below it. See README.md.
package main

import (
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

	"github.com/prometheus/procfs"
)

// options are the flags.
type options struct {
	backend, only, peers string
	quick                bool
	patience             time.Duration // the remaining time for repetitions of disturbed rounds
	json, profile        string

	check bool
	seed  uint64
	dump  string
}

func main() {
	if text := os.Getenv(childEnv); text != "" {
		fmt.Fprintln(os.Stderr, "bench: child:", play(text))
		os.Exit(1)
	}
	var o options
	flag.StringVar(&o.backend, "backend", backendNames(), "what to measure, a `list` of the default's")
	flag.StringVar(&o.only, "only", "", "`list` of scenarios, or the beginnings of their names. Default: all")
	flag.StringVar(&o.peers, "peers", "", "`list` of rows, or the beginnings of their names. Default: all")
	flag.BoolVar(&o.quick, "quick", false, "one short round of everything: shows that it works, the figures are rough")
	flag.StringVar(&o.json, "json", "", "write everything to `file`, round by round")
	flag.DurationVar(&o.patience, "patience", 0, "repeat rounds that others disturbed, for so long in all")
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

// run measures the selected scenarios and prints the tables to w. It fails if a measurement of ours failed, not if a
// target is missed.
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
	r := report{Date: time.Now().UTC().Truncate(time.Second), Machine: describeMachine()}
	r.Command = strings.Join(os.Args[1:], " ")
	fmt.Fprintf(w, "%s\n%s\n", r.Date.Format(time.RFC3339), r.Machine)
	err := o.eachService(ctx, func(b service, s *system) error {
		r.Systems = append(r.Systems, s.version)
		fmt.Fprintln(w, s.version)
		l := &lab{system: s, options: &o}
		for name := range strings.FieldsSeq(b.scenarios) {
			if ctx.Err() != nil || !selected(name, o.only) {
				continue
			}
			debug.FreeOSMemory() // the garbage of one scenario must not be collected during the next one
			if t, ok := find(name).run(ctx, l); ok {
				t.write(w)
				r.Tables = append(r.Tables, t)
			}
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case len(r.Tables) == 0:
		return fmt.Errorf("no scenario of %q begins with one of %q", o.backend, o.only)
	}
	r.curves(w)
	failed := r.summary(w)
	if err := o.write(r); err != nil {
		return err
	}
	if failed > 0 {
		return fmt.Errorf("%d measurements of %s failed", failed, ours)
	}
	return ctx.Err()
}

// eachService starts the services that o names, one after the other, and ends each after do.
func (o options) eachService(ctx context.Context, do func(b service, s *system) error) error {
	for name := range strings.SplitSeq(o.backend, ",") {
		b, err := serviceNamed(strings.TrimSpace(name))
		if err != nil {
			return err
		}
		life := &scope{ctx: ctx}
		var s *system
		if err = life.try(func() { s = b.start(life) }); err != nil {
			err = fmt.Errorf("%s: %w", b.name, err)
		} else {
			if b.peers != nil {
				s.peers = b.peers(s)
			}
			err = do(b, s)
		}
		life.end()
		if err != nil {
			return err
		}
	}
	return nil
}

// write writes the results to the file of -json, if any.
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

func backendNames() string {
	var names []string
	for _, b := range services {
		names = append(names, b.name)
	}
	return strings.Join(names, ",")
}

func serviceNamed(name string) (service, error) {
	i := slices.IndexFunc(services, func(b service) bool { return b.name == name })
	if i < 0 {
		return service{}, fmt.Errorf("no backend %q: want some of %s", name, backendNames())
	}
	return services[i], nil
}

// describeMachine describes the machine, without its name.
func describeMachine() string {
	model := "unknown processor"
	if fs, err := procfs.NewDefaultFS(); err == nil {
		if all, err := fs.CPUInfo(); err == nil && len(all) > 0 {
			model = all[0].ModelName
		}
	}
	return fmt.Sprintf("%d x %s, %s/%s, %s, servers and clients on the same machine",
		runtime.NumCPU(), model, runtime.GOOS, runtime.GOARCH, runtime.Version())
}
