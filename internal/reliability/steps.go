package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/internal/testtier"
)

// step is one command, and the required facts of its output.
type step struct {
	name    string // of the file that keeps the output
	dir     string // in which it runs; empty: the root of the module
	env     []string
	command []string
	plain   bool // its output is used unchanged: no test
	wants   func(*findings) int
}

// drivers in the order of the page.
var drivers = []string{"builtin", "etcd", "zookeeper", "postgres", "redis", "redlock"}

// soakServer names the step that breaks the bundled server as machines and operators do.
const soakServer = "soak-server"

// clusters are the drivers for a cluster of nodes that agree.
var clusters = []string{"builtin", "etcd", "zookeeper"}

// stepsOf lists all steps, one after the other: each needs the machine for itself.
func stepsOf(s settings) []step {
	test := func(name, run, pkg string, wants func(*findings) int, args ...string) step {
		return step{
			name:    name,
			env:     []string{"FENCELOCK_REQUIRE=all", testtier.Env + "=1"},
			command: append([]string{"go", "test", "-json", "-count=1", "-timeout=0", "-run", run, pkg}, args...),
			wants:   wants,
		}
	}
	mutants := func(f *findings) int { return len(f.mutants) }
	steps := []step{
		test("mutants", "^TestMutants$", "./conformance", mutants),
		test("mutants-check", "Mutant", "./conformance/check", mutants),
		test("mutants-engine", "^TestMutants", "./backend/engine", mutants),
		test("mutants-postgres", "^(TestMutants|TestAsynchronousFailover|TestSynchronousCommitWithoutAStandby)$",
			"./postgres", mutants),
		test("mutants-redis", "^TestMutants$", "./redis", mutants),
		test("mutants-simulation", "^TestMutants$", "./conformance/simulation", mutants),
		test("simulation", "^TestSimulation$", "./conformance/simulation", func(f *findings) int {
			return len(f.simulations)
		}),
		test("simulation-machine", "^TestReplicas$", "./internal/machine", func(f *findings) int {
			return len(f.simulations)
		}),
	}
	for _, d := range drivers {
		steps = append(steps, test("conformance-"+d, "^TestConformance", "./"+d, func(f *findings) int {
			return len(f.clauses[d])
		}))
	}
	for _, d := range clusters {
		st := test("faults-"+d, "^TestClusterFaults", "./"+d, func(f *findings) int { return len(f.faults[d]) })
		st.env = append(st.env, "FENCELOCK_ROUNDS="+strconv.Itoa(s.rounds))
		steps = append(steps, st)
	}
	steps = append(steps, test("failovers-postgres", "^TestFailoversUnderLoad$", "./postgres",
		func(f *findings) int { return len(f.failovers) }))
	for _, d := range drivers {
		st := test("soak-"+d, "^TestSoak", "./"+d, func(f *findings) int { return len(f.soaks) + len(f.reported) })
		st.env = append(st.env, "FENCELOCK_SOAK="+s.soak.String())
		steps = append(steps, st)
	}
	server := test(soakServer, "^TestServer$", "./internal/soak", func(f *findings) int {
		if f.server == nil {
			return 0
		}
		return 1
	})
	server.env = append(server.env, "FENCELOCK_SOAK="+s.soak.String())
	return append(steps, server,
		test("redlock-violations", "^TestViolationRate$", "./redlock", func(f *findings) int { return len(f.rates) },
			"-violations", "30"),
		step{
			name: "peers", dir: "bench", command: []string{"go", "run", ".", "-check", "-seed", "2"}, plain: true,
			wants: func(f *findings) int { return len(f.peers) },
		},
	)
}

// String is the command as a user would type it.
func (s step) String() string {
	words := append([]string{}, s.env...)
	for _, w := range s.command {
		if w == "-json" {
			w = "-v"
		}
		if strings.ContainsAny(w, "^$|") {
			w = "'" + w + "'"
		}
		words = append(words, w)
	}
	text := strings.Join(words, " ")
	if s.dir != "" {
		text = "cd " + s.dir + " && " + text
	}
	return text
}

func (s step) file(dir string) string { return filepath.Join(dir, s.name+".out") }

// run runs the command and keeps its output, unless an earlier run in dir has done so.
func (s step) run(dir string) error {
	log.Printf("%v", s)
	if _, err := os.Stat(s.file(dir)); err == nil {
		log.Printf("%s is there already", s.file(dir))
		return nil
	}
	part := s.file(dir) + ".part"
	out, err := os.Create(part)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd := exec.Command(s.command[0], s.command[1:]...)
	cmd.Dir, cmd.Env = s.dir, append(os.Environ(), s.env...)
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	begin := time.Now()
	err = cmd.Run()
	log.Printf("%s took %v", s.name, time.Since(begin).Round(time.Second))
	if err != nil {
		return fmt.Errorf("%v: %w; its output is in %s", s, err, part)
	}
	return errors.Join(out.Close(), os.Rename(part, s.file(dir)))
}

// read takes the findings out of the command's output.
func (s step) read(dir string, f *findings) error {
	data, err := os.ReadFile(s.file(dir))
	if err != nil {
		return err
	}
	before := s.wants(f)
	if s.plain {
		f.peers = append(f.peers, strings.TrimSpace(string(data)))
	} else {
		err = eachAttribute(data, f.attribute)
	}
	if err == nil && s.wants(f) == before {
		err = fmt.Errorf("nothing of what was expected is in the output")
	}
	if err != nil {
		return fmt.Errorf("%s: %w", s.file(dir), err)
	}
	return nil
}

// eachAttribute calls f for each attribute of a test that "go test -json" has printed, with the package it is in.
func eachAttribute(data []byte, f func(pkg, key, value string) error) error {
	scanner := bufio.NewScanner(bytes.NewReader(data))
	scanner.Buffer(nil, 1<<24)
	for scanner.Scan() {
		var event struct{ Action, Package, Key, Value string }
		if err := json.Unmarshal(scanner.Bytes(), &event); err != nil {
			continue // the output of a build
		}
		if event.Action != "attr" {
			continue
		}
		pkg := strings.TrimPrefix(strings.TrimPrefix(event.Package, module), "/")
		if err := f(pkg, event.Key, event.Value); err != nil {
			return err
		}
	}
	return scanner.Err()
}

const module = "github.com/fencelock/fencelock"

const machineFile = "machine.txt"

// machine describes the machine of the measurements.
func machine() string {
	commit := "an unknown commit"
	if out, err := exec.Command("git", "rev-parse", "--short", "HEAD").Output(); err == nil {
		commit = "commit " + strings.TrimSpace(string(out))
	}
	return fmt.Sprintf("%s, %s, %s/%s with %d processors, %s", time.Now().UTC().Format(time.DateOnly), commit,
		runtime.GOOS,
		runtime.GOARCH, runtime.NumCPU(), runtime.Version())
}
