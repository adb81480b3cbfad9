package server

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/serverfault"
)

// status returns the status of a process, or nil if the process does not answer.
func (p *processes) status(i int) (s *lockpb.MemberStatus) {
	ctx, cancel := context.WithTimeout(p.t.Context(), impatience)
	defer cancel()
	operateOnce(p.t.(*testing.T), p.configs[i].Listen, func(o operator) {
		if got, err := o.Status(ctx, &lockpb.StatusRequest{}); err == nil {
			s = got
		}
	})
	return s
}

// name waits until the processes name their starts to each other: each has the snapshot that it takes when the feature
// level is raised to the one from which they do.
func (p *processes) name() {
	p.t.Helper()
	for _, c := range p.configs {
		eventually(p.t, "the level is raised", func() bool {
			all, err := filepath.Glob(filepath.Join(c.DataDir, "snapshots", "*[0-9]", "state.bin"))
			return err == nil && len(all) > 0
		})
	}
}

// knows is up to where a process knows the log of another one to go.
func (p *processes) knows(i int, id string) uint64 {
	index := map[string]uint64{}
	text, err := os.ReadFile(filepath.Join(p.configs[i].DataDir, "known"))
	if err != nil || json.Unmarshal(text, &index) != nil {
		return 0
	}
	return index[id]
}

// The memory and the disk of a follower go back in time together, like those of a virtual machine that reverts to a
// snapshot. The follower stops before it votes or acknowledges anything, and starts as a new member.
func TestRevertedFollowerStops(t *testing.T) {
	t.Parallel()
	p := newProcesses(t, 3)
	x := newCaller(t, p.connect)
	x.unlock(x.lock("x"))
	p.name()
	victim := (p.leader() + 1) % 3
	p.kill(victim)
	p.configs[victim].Start = "7-0123456789abcdef"
	p.start(victim)
	for reverted := false; !reverted; {
		x.unlock(x.lock("x"))
		p.knownToHaveAll(victim)
		if err := p.children[victim].Pause(); err != nil {
			t.Fatal(err)
		}
		back := keepBack(t, p.configs[victim].DataDir)
		if err := p.children[victim].Resume(); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			x.unlock(x.lock("x"))
		}
		term := p.knownToHaveAll(victim)
		p.kill(victim)
		back()
		p.start(victim)
		eventually(t, "it stops, or a leader was elected that does not know better", func() bool {
			reverted = !p.children[victim].Running()
			now := p.status(p.leader())
			return reverted || now != nil && now.Term != term
		})
	}
	if said := p.children[victim].Stderr(); !strings.Contains(said, "went back in time while it ran") {
		t.Errorf("the process has ended and says %q", said)
	}
	p.configs[victim].Start = ""
	eventually(t, "it is a new member", func() bool {
		if !p.children[victim].Running() { // it was too slow to hear from the others
			p.start(victim)
		}
		return len(asideOf(t, p.configs[victim].DataDir)) == 1 && p.status(victim) != nil
	})
	x.unlock(x.lock("x"))
}

func (p *processes) kill(i int) {
	p.t.Helper()
	if err := p.children[i].Kill(); err != nil {
		p.t.Fatal(err)
	}
	_ = p.children[i].Wait()
}

// knownToHaveAll waits until a follower has all committed entries, and the leader knows that. It returns the term.
func (p *processes) knownToHaveAll(i int) (term uint64) {
	p.t.Helper()
	eventually(p.t, "it is known to have all", func() bool {
		leads := p.leader()
		leader, follower := p.status(leads), p.status(i)
		if leader == nil || follower == nil || follower.Leader || follower.LastIndex < leader.CommitIndex {
			return false
		}
		term = leader.Term
		return p.knows(leads, follower.NodeId) >= leader.CommitIndex
	})
	return term
}

// A member stalls while a copy of its data starts elsewhere. The copy takes its place, since the member does not
// answer; when the member continues, it hears of that and stops, and starts as a new member.
func TestReplacedProcessStops(t *testing.T) {
	t.Parallel()
	p := newProcesses(t, 3)
	x := newCaller(t, p.connect)
	x.unlock(x.lock("x"))
	p.name()
	original := (p.leader() + 1) % 3
	if err := p.children[original].Pause(); err != nil {
		t.Fatal(err)
	}
	copied := p.configs[original]
	copied.DataDir, copied.Moved = filepath.Join(t.TempDir(), "copied"), true
	if err := os.CopyFS(copied.DataDir, withoutSockets{os.DirFS(p.configs[original].DataDir)}); err != nil {
		t.Fatal(err)
	}
	addresses := freeport.Addresses(t, 2)
	copied.Listen, copied.PeerListen, copied.Join = addresses[0], addresses[1], nil
	p.configs, p.children = append(p.configs, copied), append(p.children, nil)
	p.start(3)
	eventually(t, "the copy follows", func() bool {
		leader, follower := p.status(p.leader()), p.status(3)
		return leader != nil && follower != nil && follower.LeaderId == leader.NodeId &&
			follower.AppliedIndex >= leader.CommitIndex
	})
	x.unlock(x.lock("x"))
	if err := p.children[original].Resume(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the original stops", func() bool { return !p.children[original].Running() })
	if said := p.children[original].Stderr(); !strings.Contains(said, "the members go on with another process of this member") {
		t.Errorf("the original has ended and says %q", said)
	}
	x.unlock(x.lock("x"))
}

// A member has connections with another one from before connections name starts. A copy replaces it, and it hears of that
// although it has no need to dial: the earlier connections carry nothing once the level is raised.
func TestReplacedProcessStopsWithEarlierConnections(t *testing.T) {
	t.Parallel()
	ways := &island{}
	made := 0
	c := newCluster(t, 3, func(c *Config) {
		calm(c)
		c.PeerDial = ways.from(c.PeerListen)
		if made++; made == 3 {
			c.Rig = &serverfault.Rig{Level: machine.LevelHiddenIDs - 1}
		}
	})
	const original, other, upgraded = 0, 1, 2
	c.lead(original) // it dials the others
	c.lead(other)
	address := func(i int) string { return c.configs[i].PeerListen }
	cut := func(ends [2]string) bool {
		return slices.Contains(ends[:], address(original)) && slices.Contains(ends[:], address(upgraded))
	}
	ways.cut(cut)
	c.stop(upgraded)
	c.configs[upgraded].Rig = nil
	c.start(upgraded)
	for i := range c.servers {
		eventually(t, "the level is raised", func() bool { return c.servers[i].level() == machine.MaxLevel })
	}
	if c.leader() == original {
		c.lead(other)
	}
	ways.cut(func(ends [2]string) bool { return cut(ends) || ends == [2]string{address(other), address(original)} })

	copied, addresses := c.configs[original], freeport.Addresses(t, 2)
	copied.DataDir, copied.Moved = copyAtRest(t, c.configs[original].DataDir), true
	copied.Listen, copied.PeerListen, copied.Join = addresses[0], addresses[1], nil
	copied.BootstrapExpect, copied.Rig = 0, &serverfault.Rig{Start: "99-0123456789abcdef"} // no objection reaches it
	twin := start(t, copied)
	eventually(t, "the original stops", func() bool { return c.servers[original].Err() != nil })
	var replaced *replica.ReplacedError
	if err := c.servers[original].Err(); !errors.As(err, &replaced) {
		t.Errorf("the original stops with %v", err)
	}
	x := newCaller(t, leading(t, twin, c.servers[other], c.servers[upgraded]))
	x.unlock(x.lock("x"))
}

// redirected is a way to a name that comes to mean another address.
type redirected struct {
	name string
	to   atomic.Pointer[string]
}

func (r *redirected) dial(ctx context.Context, address string) (net.Conn, error) {
	if address == r.name {
		address = *r.to.Load()
	}
	return dialTCP(ctx, address)
}

// The name of a member comes to mean another machine, which has a copy of its data, while the member runs and the others
// have connections with it. The copy does not start; if no objection reaches it in time, it is turned away and stops.
func TestCopyUnderTheNameOfItsOriginal(t *testing.T) {
	t.Parallel()
	for what, start := range map[string]string{"it asks": "", "no objection reaches it": "99-0123456789abcdef"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			way := &redirected{name: "member.test:7482"}
			made := 0
			c := newCluster(t, 3, func(c *Config) {
				calm(c)
				c.PeerDial = way.dial
				if made++; made == 1 {
					at := c.PeerListen
					way.to.Store(&at)
					c.PeerAdvertise = way.name
				}
				c.Join = append([]string{way.name}, c.Join[1:]...)
			})
			x := newCaller(t, c.connect)
			x.unlock(x.lock("x"))
			id := c.servers[0].replica.ID()
			for _, s := range c.servers {
				eventually(t, "its start is recorded", func() bool { return s.replica.State.Started(raft.ServerID(id)) != "" })
			}
			eventually(t, "another leads", func() bool {
				return c.leader() != 0 || c.servers[0].replica.HandOver(t.Context()) == nil && c.leader() != 0
			})
			x.reconnect()
			x.unlock(x.lock("x"))
			index := c.servers[c.leader()].replica.Status().CommitIndex
			eventually(t, "the member has all", func() bool { return c.servers[0].replica.Applied() >= index })
			copied := c.configs[0]
			copied.DataDir, copied.Moved = copyAtRest(t, c.configs[0].DataDir), true
			addresses := freeport.Addresses(t, 2)
			copied.Listen, copied.PeerListen, copied.Rig = addresses[0], addresses[1], &serverfault.Rig{Start: start}
			way.to.Store(&copied.PeerListen)
			term := c.servers[c.leader()].replica.Status().Term
			s, err := Start(t.Context(), copied)
			var running *replica.RunningError
			switch {
			case err != nil && (start != "" || !errors.As(err, &running)):
				t.Errorf("the copy: %v", err)
			case err == nil: // on a slow machine an objection may come too late, also if the copy asks
				defer s.Close(context.Background())
				original := c.servers[0]
				eventually(t, "one of the two stops", func() bool { return s.Err() != nil || original.Err() != nil })
				var replaced *replica.ReplacedError
				if err := errors.Join(s.Err(), original.Err()); !errors.As(err, &replaced) {
					t.Errorf("one of the two stops with %v", err)
				}
				if original.Err() != nil {
					// A leader that was elected since then has no connection with the original, and reaches the copy by the name.
					if c.servers[1].replica.Status().Term == term && c.servers[2].replica.Status().Term == term {
						t.Error("the original stops, and the leader had a connection with it")
					}
					return
				}
			}
			at := c.configs[0].PeerListen
			way.to.Store(&at)
			x.unlock(x.lock("x"))
			if err := c.servers[0].Err(); err != nil {
				t.Errorf("the original: %v", err)
			}
		})
	}
}
