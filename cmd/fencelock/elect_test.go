//go:build unix

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// candidate is one run of "fencelock elect". Its hooks print gain, loss and their owner.
type candidate struct {
	*program
	state string
}

func stand(t *testing.T, url, owner string, options ...string) *candidate {
	t.Helper()
	state := filepath.Join(t.TempDir(), "state")
	args := append([]string{"elect", "--backend", url, "--name", "x", "--tier", "correctness", "--owner", owner,
		"--state-file", state, "--on-gain", "echo gain $FENCELOCK_TOKEN; echo pid $$; exec sleep 1000",
		"--on-loss", "echo loss $FENCELOCK_OWNER"}, options...)
	return &candidate{start(t, args...), state}
}

func (c *candidate) awaitState(want, leader string) (s electState) {
	c.t.Helper()
	eventually(c.t, "the state is "+want+" of "+leader, func() bool {
		text, err := os.ReadFile(c.state)
		s = electState{}
		return err == nil && json.Unmarshal(text, &s) == nil && s.State == want && s.LeaderID == leader
	})
	return s
}

func TestElection(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	one := stand(t, url, "one", "--ttl", "15s", "--kill-after", "3s")
	one.await("gain ")
	pid := one.awaitPid("pid ")
	s := one.awaitState(stateLeading, "one")
	if s.FencingToken == 0 || s.TokenSpace == "" || s.LockKey != "x" || s.PID != one.Pid() {
		t.Errorf("%+v", s)
	}
	eventually(t, "expiresAt moves", func() bool { return one.awaitState(stateLeading, "one").ExpiresAt.After(s.ExpiresAt) })
	two := stand(t, url, "two", "--ttl", "15s", "--kill-after", "3s")
	two.awaitState(stateFollowing, "one")

	// The first one is stopped: its state expires, and its command is dead when the second one leads.
	if err := one.Pause(); err != nil {
		t.Fatal(err)
	}
	two.await("gain ")
	second := two.awaitPid("pid ")
	if alive(pid) {
		t.Error("the first leader's command runs beside the second leader")
	}
	if s := one.awaitState(stateLeading, "one"); time.Now().Before(s.ExpiresAt) {
		t.Errorf("the first leader's state counts beside the second leader: %+v", s)
	}
	if err := one.Resume(); err != nil {
		t.Fatal(err)
	}
	one.await("loss one")
	one.awaitState(stateFollowing, "two")

	// The second one ends: its hook runs, and the first one leads at once.
	if err := syscall.Kill(two.Pid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	two.await("loss two")
	two.expectExit(exitOK)
	two.awaitState(stateStopped, "")
	if alive(second) {
		t.Error("the command of a candidate that has ended is alive")
	}
	one.await("gain ")
	one.awaitState(stateLeading, "one")
}

func TestCandidateResigns(t *testing.T) {
	t.Parallel()
	p := stand(t, startServer(t), "one", "--on-gain", "echo gain; exit 3")
	p.await("gain")
	p.await("loss one")
	p.await("gain") // the candidate stands again
	eventually(t, "a message says that it resigns", func() bool {
		return strings.Contains(p.Stderr(), "--on-gain: exit code 3; this process resigns")
	})
}

func TestElectCommandLine(t *testing.T) {
	t.Parallel()
	for part, args := range map[string][]string{
		"--name is missing":  {"--backend", "memory://"},
		"takes no arguments": {"--backend", "memory://", "--name", "x", "true"},
		"more than half":     {"--backend", "memory://", "--name", "x", "--ttl", "4s", "--kill-after", "3s"},
		"--log-format":       {"--backend", "memory://", "--name", "x", "--log-format", "xml"},
	} {
		start(t, append([]string{"elect"}, args...)...).expectExit(exitUsage, part)
	}
}
