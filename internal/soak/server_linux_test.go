package soak

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/oldversions"
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/internal/testtier"
)

const (
	members = 3
	clients = 2
	// hosts: the members, the clients, and one for a server that should not start.
	clientHost = members
	strayHost  = members + 1
	hosts      = members + 2
	// settleTime bounds the time from the end of a fault until the cluster is well.
	settleTime = 90 * time.Second
)

// soak is a cluster that is being broken.
type soak struct {
	t       *testing.T
	random  *rand.Rand
	net     *network
	dir     string
	older   string // the program of the previous release, which knows a lower feature level
	newer   string
	runs    []string // the program of each member
	servers []*fault.Child
	clients []*fault.Child
	began   int // clients, over time
	history map[*fault.Child]string
	faults  map[string]int
}

// TestServer breaks three members for FENCELOCK_SOAK, one minute by default, with faults that FENCELOCK_SEED draws.
func TestServer(t *testing.T) {
	testtier.Only(t)
	lack := t.Skipf
	if os.Getenv("FENCELOCK_REQUIRE") == "all" {
		lack = t.Fatalf
	}
	for _, tool := range []string{"ip", "tc", "strace"} {
		if _, err := exec.LookPath(tool); err != nil {
			lack("%s is missing: apt-get install iproute2 strace", tool)
		}
	}
	if os.Geteuid() != 0 {
		lack("network namespaces need root")
	}
	length, seed := time.Minute, uint64(1)
	var err error
	if text := os.Getenv("FENCELOCK_SOAK"); text != "" {
		if length, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	switch text := os.Getenv("FENCELOCK_SEED"); text {
	case "":
	case "random":
		seed = rand.Uint64()
	default:
		if _, err := fmt.Sscan(text, &seed); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("FENCELOCK_SOAK=%v FENCELOCK_SEED=%d", length, seed)
	s := newSoak(t, seed)
	begin := time.Now()
	s.play(begin.Add(length))
	s.judge(seed, time.Since(begin))
}

func newSoak(t *testing.T, seed uint64) *soak {
	s := &soak{
		t: t, random: rand.New(rand.NewPCG(seed, 0)), net: newNetwork(t, hosts), dir: t.TempDir(),
		servers: make([]*fault.Child, members), history: map[*fault.Child]string{}, faults: map[string]int{},
	}
	s.older = oldversions.Build(t, oldversions.Tree(t, oldversions.Release), "./cmd/fencelock")
	s.newer = oldversions.Build(t, filepath.Join("..", ".."), "./cmd/fencelock")
	if err := os.WriteFile(s.key(), []byte("a key that all members share"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(s.registers(), 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range soakNames {
		if err := os.WriteFile(filepath.Join(s.registers(), fmt.Sprintf("name-%d", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i := range members {
		s.runs = append(s.runs, s.older)
		s.start(i)
	}
	s.settle("the start")
	for range clients {
		s.newClient()
	}
	return s
}

func (s *soak) must(name string, args ...string) {
	s.t.Helper()
	if err := run(s.t, name, args...); err != nil {
		s.t.Fatal(err)
	}
}

func (s *soak) key() string       { return filepath.Join(s.dir, "key") }
func (s *soak) registers() string { return filepath.Join(s.dir, "registers") }
func (s *soak) data(i int) string { return filepath.Join(s.dir, fmt.Sprintf("data%d", i)) }
func peer(host int) string        { return address(host) + ":7482" }

func peers() string { return strings.Join([]string{peer(0), peer(1), peer(2)}, ",") }
func url() string {
	return fmt.Sprintf("fencelock://%s:7480,%s:7480,%s:7480", address(0), address(1), address(2))
}

// serve is the command of a member.
func (s *soak) serve(host int, program, dir string, more ...string) *exec.Cmd {
	if host < members {
		more = append(more, "--bootstrap-expect", fmt.Sprint(members))
	}
	return s.net.command(host, program, append([]string{
		"serve", "--data-dir", dir, "--listen", address(host) + ":7480", "--peer-listen", peer(host), "--join", peers(),
		"--join-key", s.key(), "--insecure",
	}, more...)...)
}

func (s *soak) start(i int) {
	s.t.Helper()
	s.servers[i] = fault.Start(s.t, s.serve(i, s.runs[i], s.data(i)))
	if _, err := s.servers[i].Await(s.bounded(), "fencelock: serving clients at "); err != nil {
		s.t.Fatalf("member %d does not start: %v", i, err)
	}
}

func (s *soak) bounded() context.Context {
	ctx, cancel := context.WithTimeout(s.t.Context(), settleTime)
	s.t.Cleanup(cancel)
	return ctx
}

func (s *soak) kill(i int) {
	_ = s.servers[i].Kill()
	_ = s.servers[i].Wait() // killed, it says
}

// refused starts a server that must not run, and wants a reason.
func (s *soak) refused(cmd *exec.Cmd, why string) {
	s.t.Helper()
	ctx := s.bounded()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(out.String(), why) {
			s.t.Errorf("%v: %v, want %q:\n%s", cmd.Args[4:], err, why, out.String())
		}
	case <-ctx.Done():
		_ = cmd.Process.Kill()
		<-ended
		s.t.Errorf("%v runs, want %q:\n%s", cmd.Args[4:], why, out.String())
	}
}

// settle waits until "fencelock status" says that the cluster is well.
func (s *soak) settle(after string) {
	s.t.Helper()
	var out []byte
	for end := time.Now().Add(settleTime); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		var err error
		cmd := s.net.command(clientHost, s.newer, "status", "--backend", url())
		if out, err = cmd.CombinedOutput(); err == nil {
			return
		}
	}
	s.t.Fatalf("after %s the cluster is not well within %v:\n%s", after, settleTime, out)
}

// status is what a member says of itself, as far as it is needed here.
type status struct {
	Address, NodeID, Role string
}

func (s *soak) leader() int {
	out, _ := s.net.command(clientHost, s.newer, "status", "--backend", url(), "--json").Output()
	for lines := json.NewDecoder(bytes.NewReader(out)); ; {
		var m status
		if lines.Decode(&m) != nil {
			return s.random.IntN(members)
		}
		for i := range members {
			if m.Role == "leader" && m.Address == address(i)+":7480" {
				return i
			}
		}
	}
}

func (s *soak) newClient() {
	s.t.Helper()
	file := filepath.Join(s.dir, fmt.Sprintf("history%d", s.began))
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := s.net.command(clientHost, self, url(), fmt.Sprint(s.began), s.registers(), file)
	cmd.Env = append(os.Environ(), "FENCELOCK_FAULT_ROLE="+clientRole)
	c := fault.Start(s.t, cmd)
	s.began++
	s.clients = append(s.clients, c)
	s.history[c] = file
}

// killClient kills a client without warning, and begins another one.
func (s *soak) killClient() {
	i := s.random.IntN(len(s.clients))
	c := s.clients[i]
	at := now()
	_ = c.Kill()
	_ = c.Wait()
	f, err := os.OpenFile(s.history[c], os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer f.Close()
	number := strings.TrimPrefix(filepath.Base(s.history[c]), "history")
	for l := range soakLines {
		fmt.Fprintf(f, "%d dead %s.%d\n", at, number, l)
	}
	s.clients = slices.Delete(s.clients, i, i+1)
	s.newClient()
}

// play draws faults until a time, each after the cluster is well again. Every third step upgrades a member first, as
// long as there is one of the earlier version.
func (s *soak) play(until time.Time) {
	all := s.all()
	for step, upgraded := 0, 0; !s.t.Failed() && (time.Now().Before(until) || upgraded < members); step++ {
		if upgraded < members && (step%3 == 2 || !time.Now().Before(until)) {
			s.fault("upgrade", s.upgrade, upgraded)
			upgraded++
		}
		f, i := all[s.random.IntN(len(all))], s.random.IntN(members)
		if upgraded < members && f.upgraded {
			continue
		}
		s.fault(f.name, f.play, i)
	}
}

func (s *soak) fault(name string, play func(int), i int) {
	if s.t.Failed() {
		return
	}
	s.t.Logf("%s: member %d", name, i)
	play(i)
	s.faults[name]++
	s.settle(name)
}

// judge stops the clients and hands what they saw to the checker.
func (s *soak) judge(seed uint64, took time.Duration) {
	calm := now()
	wait := func(what string, is func(h *history) bool) *history {
		for end := time.Now().Add(settleTime); ; time.Sleep(200 * time.Millisecond) {
			h := s.read()
			if is(h) || time.Now().After(end) {
				if !is(h) {
					s.t.Errorf("still not: %s", what)
				}
				return h
			}
		}
	}
	wait("each name is granted after the last fault", func(h *history) bool {
		return strings.Count(h.names(calm), " ") == soakNames-1
	})
	for _, c := range s.clients {
		if err := c.Send("stop"); err != nil {
			s.t.Error(err)
		}
		_ = c.Wait()
	}
	h := s.read()
	violations := h.violations()
	for i := range soakNames {
		name := fmt.Sprintf("name-%d", i)
		f, err := os.Open(filepath.Join(s.registers(), name))
		if err != nil {
			s.t.Fatal(err)
		}
		more, err := h.register(name, f)
		if err != nil {
			s.t.Error(err)
		}
		violations = append(violations, more...)
		_ = f.Close()
	}
	for _, text := range violations {
		s.t.Error(text)
	}
	n := 0
	for _, times := range s.faults {
		n += times
	}
	s.t.Logf("%d faults in %v: %v; %d grants, %d violations, longest time without a grant %v", n, took, s.faults, len(h.holds),
		len(violations), time.Duration(h.longest()))
	testfindings.Write(s.t, testfindings.ServerSoak{
		Seed: seed, Took: took, Faults: n, Kinds: len(s.faults), Grants: len(h.holds), Violations: len(violations),
		Longest: time.Duration(h.longest()),
	})
}

// read reads all histories. A line that is being written is not there yet.
func (s *soak) read() *history {
	h := &history{}
	for i := range s.began {
		text, err := os.ReadFile(filepath.Join(s.dir, fmt.Sprintf("history%d", i)))
		if err != nil && !os.IsNotExist(err) {
			s.t.Fatal(err)
		}
		text = text[:bytes.LastIndexByte(text, '\n')+1]
		if err := h.read(bytes.NewReader(text)); err != nil {
			s.t.Fatalf("history of client %d: %v", i, err)
		}
	}
	return h
}

func (s *soak) last(most time.Duration) {
	time.Sleep(time.Duration(s.random.Int64N(int64(cmp.Or(most, time.Second)))))
}
