//go:build unix

package main

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
)

func TestLossEndsTheGroupBeforeTheNextHolder(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	addr, link := server.NewLink(t)
	script := "trap 'sleep 0.7; exit' TERM; sleep 1000 & echo pid $!; echo pid $$; wait" // it takes its time
	holder := start(t, on(addr, script, "--ttl", "8s", "--kill-after", "2s")...)
	grandchild, command := holder.awaitPid("pid "), holder.awaitPid("pid ")
	link.Hold(fault.Both) // the holder is cut off, the server and its clock go on

	// The next holder is the one to ask whether the first one is still there. TERM came two seconds before.
	next := start(t, on(server.Addr(), fmt.Sprintf("ps -o stat= -p %d,%d | grep -v Z || echo alone", grandchild, command))...)
	if got := next.output(); got != "alone" {
		t.Errorf("the former holder's processes live while the next one runs: %q", got)
	}
	next.expectExit(0)
	holder.expectExit(exitLost, "was lost: expired")
}

func TestLossKillsWhatIgnoresTERM(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	script := "trap 'echo warned' TERM; sh -c 'trap \"\" TERM; echo pid $$; exec sleep 1000' & while :; do wait; done"
	p := start(t, on(server.Addr(), script, "--ttl", "6s", "--kill-after", "1s")...)
	pid := p.awaitPid("pid ")
	if err := server.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.await("warned")
	if !p.Running() && alive(pid) {
		t.Error("fencelock ended while the command was still there")
	}
	p.expectExit(exitLost, "was lost: expired")
	if alive(pid) {
		t.Error("the command runs on")
	}
	if err := server.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestEviction(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	p := start(t, on(server.Addr(), "echo in; sleep 1000", "--ttl", "15s", "--kill-after", "0")...)
	p.await("in")
	flush(t, server.Addr())
	p.expectExit(exitLost, "was lost: evicted")
}

func TestEvictionThatShowsInTheRelease(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	p := start(t, on(server.Addr(), "echo in; cat", "--ttl", "5m")...)
	p.await("in")
	flush(t, server.Addr())
	p.CloseStdin()
	p.expectExit(exitLost, "was lost: evicted", "exit code 0")
}

// flush deletes everything in a Redis server.
func flush(t *testing.T, addr string) {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	answer := make([]byte, 5)
	if _, err := c.Write([]byte("FLUSHALL\r\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(answer); err != nil || string(answer) != "+OK\r\n" {
		t.Fatalf("FLUSHALL: %q, %v", answer, err)
	}
}
