package soak

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// network is a network namespace for each host, and one with the bridge between them. All that is broken is broken there.
type network struct {
	t     testing.TB
	hosts int
}

func run(t testing.TB, name string, args ...string) error {
	t.Helper()
	out, err := exec.CommandContext(context.WithoutCancel(t.Context()), name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

func (n *network) must(args ...string) {
	n.t.Helper()
	if err := run(n.t, "ip", args...); err != nil {
		n.t.Fatal(err)
	}
}

func (n *network) space(host int) string { return fmt.Sprintf("fencelock-%d-%d", os.Getpid(), host) }
func (n *network) hub() string           { return n.space(n.hosts) }

// address of a host; hardware is that of its interface.
func address(host int) string  { return fmt.Sprintf("10.77.0.%d", host+1) }
func hardware(host int) string { return fmt.Sprintf("02:00:0a:4d:00:%02x", host+1) }

// newNetwork makes hosts that reach each other, and nothing else.
func newNetwork(t testing.TB, hosts int) *network {
	n := &network{t, hosts}
	for i := range hosts + 1 {
		n.must("netns", "add", n.space(i))
		t.Cleanup(func() { _ = run(t, "ip", "netns", "del", n.space(i)) })
		n.must("-n", n.space(i), "link", "set", "lo", "up")
	}
	n.must("-n", n.hub(), "link", "add", "bridge", "type", "bridge")
	n.must("-n", n.hub(), "link", "set", "bridge", "up")
	for i := range hosts {
		port := fmt.Sprintf("host%d", i)
		n.must("-n", n.hub(), "link", "add", port, "type", "veth", "peer", "name", "net", "address", hardware(i), "netns",
			n.space(i))
		n.must("-n", n.hub(), "link", "set", port, "master", "bridge", "up")
		n.must("-n", n.space(i), "address", "add", address(i)+"/24", "dev", "net")
		n.must("-n", n.space(i), "link", "set", "net", "up")
	}
	n.heal()
	return n
}

// command runs on a host.
func (n *network) command(host int, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(context.WithoutCancel(n.t.Context()), "ip",
		append([]string{"netns", "exec", n.space(host), name}, args...)...)
}

// lose has all that one host sends to another go nowhere, without a sign to either.
func (n *network) lose(from, to int) { n.neighbour(from, to, "02:00:00:00:00:ff") }

func (n *network) neighbour(from, to int, hardware string) {
	n.must("-n", n.space(from), "neighbour", "replace", address(to), "lladdr", hardware, "dev", "net", "nud", "permanent")
}

// heal undoes lose.
func (n *network) heal() {
	for from := range n.hosts {
		for to := range n.hosts {
			if from != to {
				n.neighbour(from, to, hardware(to))
			}
		}
	}
}

// shape has a host send with losses, delays, reordering and duplicates; or, where the kernel has no netem, through a
// bucket so narrow that it delays and drops.
func (n *network) shape(host int) (undo func(), how string) {
	qdisc := func(args ...string) error {
		return run(n.t, "tc", append([]string{"-n", n.space(host), "qdisc"}, args...)...)
	}
	how = "netem"
	err := qdisc("add", "dev", "net", "root", "netem", "delay", "100ms", "50ms", "loss", "15%", "duplicate", "5%", "reorder",
		"20%")
	if err != nil {
		how = "tbf, for lack of netem in this kernel"
		err = qdisc("add", "dev", "net", "root", "tbf", "rate", "256kbit", "burst", "2kb", "latency", "100ms")
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return func() {
		if err := qdisc("del", "dev", "net", "root"); err != nil {
			n.t.Error(err)
		}
	}, how
}
