package soak

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
)

// drawn is a fault that can be drawn.
type drawn struct {
	name     string
	play     func(member int)
	upgraded bool // it is of use only once all members are of the present version
}

// all lists the faults: of processes, of the network, of disks, and what operators do, rightly or not.
func (s *soak) all() []drawn {
	return []drawn{
		{"kill", func(i int) { s.kill(i); s.last(3 * time.Second); s.start(i) }, false},
		{"kill-leader", func(int) { i := s.leader(); s.kill(i); s.last(3 * time.Second); s.start(i) }, false},
		{"kill-all", func(int) { s.each(s.kill); s.last(3 * time.Second); s.each(s.start) }, false},
		{"kill-client", func(int) { s.killClient() }, false},
		{"pause", s.pause, false},
		{"partition", func(i int) { s.cut(func(from, to int) bool { return from == i || to == i }) }, false},
		{"one-way", func(i int) { s.cut(func(from, _ int) bool { return from == i }) }, false},
		{"ring", func(int) { s.cut(func(from, to int) bool { return to == (from+1)%members }) }, false},
		{"client-cut", s.clientCut, false},
		{"slow-network", s.slowNetwork, false},
		{"slow-fsync", func(i int) { s.inject(i, "fsync,fdatasync:delay_enter=300000", 4*time.Second) }, true},
		{"fsync-EIO", func(i int) { s.fails(i, "fsync,fdatasync:error=EIO") }, true},
		{"write-ENOSPC", func(i int) { s.fails(i, "pwrite64:error=ENOSPC") }, true},
		{"transfer", func(int) { s.admin(0, "transfer") }, false},
		{"maintenance", s.maintenance, false},
		{"wipe", s.wipe, true},
		{"churn", s.churn, true},
		{"copied-directory", s.copied, true},
		{"old-disk", s.oldDisk, true},
		{"recover-beside-others", s.recoverBeside, true},
		{"restore-beside-others", s.restoreBeside, true},
		{"second-process", func(i int) { s.refused(s.serve(i, s.newer, s.data(i)), "in use") }, true},
	}
}

func (s *soak) each(do func(int)) {
	for i := range members {
		do(i)
	}
}

func (s *soak) pause(i int) {
	if err := s.servers[i].Pause(); err != nil {
		s.t.Fatal(err)
	}
	s.last(6 * time.Second)
	if err := s.servers[i].Resume(); err != nil {
		s.t.Fatal(err)
	}
}

// cut loses what some members send to others.
func (s *soak) cut(which func(from, to int) bool) {
	for from := range members {
		for to := range members {
			if from != to && which(from, to) {
				s.net.lose(from, to)
			}
		}
	}
	s.last(6 * time.Second)
	s.net.heal()
}

func (s *soak) clientCut(i int) {
	s.net.lose(clientHost, i)
	s.net.lose(i, clientHost)
	s.last(6 * time.Second)
	s.net.heal()
}

func (s *soak) slowNetwork(i int) {
	undo, how := s.net.shape(i)
	s.t.Log(how)
	s.last(6 * time.Second)
	undo()
}

// process is the server itself, which "ip netns exec" has become.
func (s *soak) process(i int) string { return fmt.Sprint(s.servers[i].Pid()) }

// strace begins to inject into system calls of a member.
func (s *soak) strace(i int, what string) *fault.Child {
	calls, _, _ := strings.Cut(what, ":")
	cmd := s.net.command(i, "strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace="+calls, "-e", "inject="+what, "-p",
		s.process(i))
	return fault.Start(s.t, cmd)
}

// inject has system calls of a member behave for a while.
func (s *soak) inject(i int, what string, most time.Duration) {
	x := s.strace(i, what)
	s.last(most)
	_ = x.Terminate()
	_ = x.Wait()
}

// fails has a member's disk fail until the member stops.
func (s *soak) fails(i int, what string) {
	x := s.strace(i, what)
	ended := make(chan error, 1)
	go func() { ended <- s.servers[i].Wait() }()
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "69") {
			s.t.Errorf("with %s the member ends with %v, want exit code 69", what, err)
		}
	case <-time.After(settleTime):
		s.t.Errorf("with %s the member goes on", what)
	}
	_ = x.Kill()
	_ = x.Wait()
	s.start(i)
}

func (s *soak) upgrade(i int) {
	if err := s.servers[i].Terminate(); err != nil {
		s.t.Fatal(err)
	}
	if err := s.servers[i].Wait(); err != nil {
		s.t.Errorf("member %d ends with %v", i, err)
	}
	s.runs[i] = s.newer
	s.start(i)
}

// admin is a command of an operator, which must succeed with so many tries.
func (s *soak) admin(retries int, args ...string) string {
	s.t.Helper()
	for {
		out, err := s.net.command(clientHost, s.newer, append(args, "--backend", url())...).CombinedOutput()
		if err == nil {
			return string(out)
		}
		if retries--; retries < 0 {
			s.t.Errorf("fencelock %s: %v: %s", strings.Join(args, " "), err, out)
			return ""
		}
	}
}

func (s *soak) node(i int) string {
	id, err := os.ReadFile(filepath.Join(s.data(i), "node-id"))
	if err != nil {
		s.t.Fatal(err)
	}
	return strings.TrimSpace(string(id))
}

func (s *soak) maintenance(i int) {
	s.admin(2, "maintenance", "on", "--node", s.node(i))
	s.last(2 * time.Second)
	s.admin(2, "maintenance", "off", "--node", s.node(i))
}

// wipe takes a member's disk away. It comes back as a new member, with the key, in the place of the old one.
func (s *soak) wipe(i int) {
	s.kill(i)
	s.must("rm", "-r", s.data(i))
	s.start(i)
}

// churn removes a member, and takes in another one at its address.
func (s *soak) churn(i int) {
	id := s.node(i)
	s.admin(3, "member", "remove", id)
	s.kill(i)
	s.must("rm", "-r", s.data(i))
	s.start(i)
	s.settle("removal")
	var found status
	for all := json.NewDecoder(bytes.NewReader([]byte(s.admin(2, "status", "--json")))); all.Decode(&found) == nil; {
		if found.NodeID == id {
			s.t.Errorf("member %s was removed and is there", id)
		}
	}
}

// copied starts a copy of a member's directory on another host, while the member runs. It was made while the member did
// not, as a cold copy is.
func (s *soak) copied(i int) {
	twin := filepath.Join(s.dir, "twin")
	s.kill(i)
	s.must("cp", "-a", s.data(i), twin)
	s.start(i)
	s.settle("the copy")
	s.refused(s.serve(strayHost, s.newer, twin), "cop")
	s.refused(s.serve(strayHost, s.newer, twin, "--moved"), s.node(i))
	s.must("rm", "-r", twin)
}

// oldDisk puts a member's disk back to what it was some time ago, within the same run, as the snapshot of a machine
// does: the files stay the same files.
func (s *soak) oldDisk(i int) {
	old := filepath.Join(s.dir, "old")
	if err := s.servers[i].Pause(); err != nil {
		s.t.Fatal(err)
	}
	s.must("cp", "-a", s.data(i), old)
	if err := s.servers[i].Resume(); err != nil {
		s.t.Fatal(err)
	}
	s.settle("the snapshot")
	id, before := s.node(i), s.grants()
	for end := time.Now().Add(settleTime); s.grants() < before+20 && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond)
	}
	s.settle("more grants")
	time.Sleep(time.Second) // the others note what a member has acknowledged within 200 ms
	s.kill(i)
	s.must("find", s.data(i), "-mindepth", "1", "-maxdepth", "1", "!", "-name", "node-id", "-exec", "rm", "-r", "{}", "+")
	s.must("find", old, "-mindepth", "1", "-maxdepth", "1", "!", "-name", "node-id", "-exec", "cp", "-a", "{}", s.data(i), ";")
	s.must("rm", "-r", old)
	s.start(i)
	found := func() bool {
		return s.node(i) != id && strings.Contains(s.servers[i].Stderr(), "as a new member")
	}
	for end := time.Now().Add(settleTime); !found() && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond) // what it writes comes in later
	}
	if !found() {
		s.t.Errorf("member %d goes on with an old disk:\n%s", i, s.servers[i].Stderr())
	}
}

func (s *soak) grants() int { return len(s.read().holds) }

// recoverBeside recovers a disk although the other members run.
func (s *soak) recoverBeside(i int) {
	s.kill(i)
	s.refused(s.net.command(i, s.newer, "recover", "--data-dir", s.data(i), "--join-key", s.key()), "answers")
	s.start(i)
}

// restoreBeside restores a backup although the cluster runs.
func (s *soak) restoreBeside(int) {
	file, dir := filepath.Join(s.dir, "backup"), filepath.Join(s.dir, "restored")
	s.admin(2, "backup", file)
	s.refused(s.net.command(strayHost, s.newer, "restore", file, "--data-dir", dir, "--join", peers(), "--join-key", s.key()),
		"answers")
	s.must("rm", "-rf", file, dir)
}
