package server

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/serverfault"
)

// serverRole is a server in a separate process. Its argument is a processConfig in JSON.
const serverRole = "server"

type processConfig struct {
	DataDir, Listen, PeerListen string
	Join                        []string
	Start                       string // see rig.Rig
	Moved                       bool
}

func serve(_ <-chan string, args []string) int {
	var c processConfig
	if err := json.Unmarshal([]byte(args[0]), &c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	s, err := Start(context.Background(), Config{
		DataDir: c.DataDir, Listen: c.Listen, PeerListen: c.PeerListen, Join: c.Join, BootstrapExpect: len(c.Join),
		JoinKey: joinKey, Moved: c.Moved, Rig: &serverfault.Rig{Start: c.Start},
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	<-s.Done()
	fmt.Fprintln(os.Stderr, s.Err())
	return 1
}

// processes are three servers in processes of their own.
type processes struct {
	t        testing.TB
	configs  []processConfig
	children []*fault.Child
}

func newProcesses(t testing.TB, n int) *processes {
	p := &processes{t: t, configs: make([]processConfig, n), children: make([]*fault.Child, n)}
	addresses := freeport.Addresses(t, 2*n)
	for i := range n {
		p.configs[i] = processConfig{
			DataDir: t.TempDir(), Listen: addresses[i], PeerListen: addresses[n+i], Join: addresses[n:],
		}
		p.start(i)
	}
	return p
}

func (p *processes) start(i int) {
	p.t.Helper()
	config, err := json.Marshal(p.configs[i])
	if err != nil {
		p.t.Fatal(err)
	}
	p.children[i] = fault.StartRole(p.t, serverRole, string(config))
}

// connect returns a client of the leader, or nil without a leader.
func (p *processes) connect() *client {
	for i := range p.configs {
		if c := p.connectTo(i); c != nil {
			return c
		}
	}
	return nil
}

func (p *processes) connectTo(i int) *client {
	c, err := tryDial(p.t, p.configs[i].Listen)
	if err != nil {
		return nil
	}
	r, err := c.within(impatience, &lockpb.Request{Call: &lockpb.Request_Hello{Hello: &lockpb.Hello{}}})
	if err != nil || !r.GetWelcome().GetLeader() {
		c.close()
		return nil
	}
	return c
}

// leader waits for a leader and returns its number.
func (p *processes) leader() (leader int) {
	p.t.Helper()
	eventually(p.t, "a process leads", func() bool {
		for i := range p.configs {
			if c := p.connectTo(i); c != nil {
				c.close()
				leader = i
				return true
			}
		}
		return false
	})
	return leader
}

// rivals lock one name in turns, and check that they do.
type rivals struct {
	t      testing.TB
	inside atomic.Int32
	token  atomic.Uint64
	rounds atomic.Uint64
	stop   chan struct{}
	tasks  sync.WaitGroup
}

func newRivals(t testing.TB, n int, connect func() *client) *rivals {
	r := &rivals{t: t, stop: make(chan struct{})}
	for range n {
		r.tasks.Go(func() { r.compete(newCaller(t, connect)) })
	}
	return r
}

func (r *rivals) compete(x *caller) {
	for {
		select {
		case <-r.stop:
			return
		default:
		}
		g := x.lock("contended")
		if r.inside.Add(1) != 1 {
			r.t.Error("two hold the lock")
		}
		if before := r.token.Swap(g.Token); before >= g.Token {
			r.t.Errorf("token %d after %d", g.Token, before)
		}
		r.rounds.Add(1)
		r.inside.Add(-1)
		x.unlock(g)
	}
}

// more waits until the rivals have taken the lock another few times.
func (r *rivals) more(n uint64) {
	r.t.Helper()
	enough := r.rounds.Load() + n
	eventually(r.t, "they go on", func() bool { return r.rounds.Load() >= enough })
}

func (r *rivals) end() {
	close(r.stop)
	r.tasks.Wait()
}

// Each of three processes is killed in turn, the leader among them, while clients take a lock from each other.
func TestKilledProcesses(t *testing.T) {
	t.Parallel()
	p := newProcesses(t, 3)
	r := newRivals(t, 4, p.connect)
	defer r.end()
	r.more(20)
	for round := range 2 {
		for i := range p.children {
			victim := (p.leader() + i) % len(p.children)
			if err := p.children[victim].Kill(); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			r.more(20)
			t.Logf("round %d: process %d killed, 20 holds later after %v",
				round, victim, time.Since(began).Round(time.Millisecond))
			p.start(victim)
			r.more(20)
		}
	}
}

// The test kills all processes at once and starts them again: they have everything that they acknowledged.
func TestAllProcessesKilled(t *testing.T) {
	t.Parallel()
	p := newProcesses(t, 3)
	x := newCaller(t, p.connect)
	held := x.lock("held")
	for _, c := range p.children {
		if err := c.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	for i := range p.children {
		p.start(i)
	}
	if g := x.must(acquireOf(nil, "held", held.RequestId, false)).GetAcquired().GetGrants(); len(g) != 1 ||
		g[0].Token != held.Token {
		t.Errorf("after the restart the hold with token %d is %v", held.Token, g)
	}
	if next := x.lock("other"); next.Token <= held.Token {
		t.Errorf("token %d after %d", next.Token, held.Token)
	}
}

// A leader that stands still is succeeded; when it goes on, it does not believe that it leads.
func TestPausedLeader(t *testing.T) {
	t.Parallel()
	p := newProcesses(t, 3)
	r := newRivals(t, 4, p.connect)
	defer r.end()
	r.more(20)
	for range 2 {
		leader := p.leader()
		if err := p.children[leader].Pause(); err != nil {
			t.Fatal(err)
		}
		meanwhile := newCaller(t, p.connect) // the successor serves
		meanwhile.unlock(meanwhile.lock("other"))
		if err := p.children[leader].Resume(); err != nil {
			t.Fatal(err)
		}
		r.more(20) // clients of the old leader notice
	}
}
