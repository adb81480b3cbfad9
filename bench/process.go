package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
)

// process is a server that was started here, with its files in its own folder, which it keeps across restarts. Servers
// are plain processes and not the containers of package conformance/containers, which have settings for tests and
// whose processor time cannot be read.
type process struct {
	dir     string
	command func() *exec.Cmd
	child   *fault.Child
	past    time.Duration // CPU of killed children
	forks   bool          // a process for each connection
}

// process runs a program until the end of s, with args for its folder.
func (s *scope) process(program string, args func(dir string) []string) *process {
	dir := s.folder()
	p := &process{dir: dir, command: func() *exec.Cmd {
		cmd := exec.Command(program, args(dir)...)
		cmd.Dir = dir
		return cmd
	}}
	s.must(p.start())
	s.later(p.kill)
	return p
}

// folder returns a new folder, which is deleted at the end of s.
func (s *scope) folder() string {
	dir, err := os.MkdirTemp("", "fencelock-bench-")
	s.must(err)
	s.later(func() { _ = os.RemoveAll(dir) }) // a leftover folder does no harm
	return dir
}

// addrs reserves addresses of the loopback interface for servers that are ended and restarted.
func (s *scope) addrs(n int) (all []string) {
	for range n {
		p, err := freeport.Reserve()
		s.must(err)
		s.later(p.Close)
		p.Lend()
		all = append(all, p.Addr())
	}
	return all
}

// portOf returns the port of an address.
func portOf(addr string) string { return addr[strings.LastIndex(addr, ":")+1:] }

// start starts the process, or restarts it after kill or awaitEnd.
func (p *process) start() (err error) {
	if p.child, err = fault.Spawn(p.command()); err != nil {
		return err
	}
	go func(c *fault.Child) { // a full pipe would block the server
		for err := error(nil); err == nil; {
			_, err = c.Line(context.Background())
		}
	}(p.child)
	return nil
}

// kill ends the process immediately (SIGKILL).
func (p *process) kill() {
	if spent, err := p.cpu(); err == nil {
		p.past = spent
	}
	p.child.Close()
}

// awaitEnd returns when a process has ended that was asked to end (SIGTERM).
func (p *process) awaitEnd() {
	_ = p.child.Wait() // the exit code does not matter
	p.child.Close()
}

// pause stops the servers, with their sockets open; resume lets them continue.
func (s *system) pause() (err error) {
	for _, p := range s.servers {
		if p.forks {
			return errors.New("the server's processes for connections would go on")
		}
		err = errors.Join(err, p.child.Pause())
	}
	return err
}

func (s *system) resume() {
	for _, p := range s.servers {
		_ = p.child.Resume() // an ended child cannot be resumed
	}
}

// startTime bounds the time until a started server answers.
const startTime = 30 * time.Second

// untilNil repeats ask until it succeeds, with a time limit for each attempt.
func untilNil(ctx context.Context, attempt time.Duration, ask func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		limited, end := context.WithTimeout(ctx, attempt)
		err := ask(limited)
		end()
		if err == nil || ctx.Err() != nil {
			return err
		}
		sleep(ctx, 5*time.Millisecond)
	}
}

// answers calls ask until the server answers.
func (p *process) answers(ctx context.Context, ask func(ctx context.Context) error) error {
	err := untilNil(ctx, 2*time.Second, ask)
	if err != nil {
		err = fmt.Errorf("it does not answer: %w\n%s", err, strings.TrimSpace(p.child.Stderr()))
	}
	return err
}

// cpu returns the user and system time so far.
func (p *process) cpu() (time.Duration, error) {
	spent, err := cpuOf(p.child.Pid())
	if !p.forks || err != nil {
		return p.past + spent, err
	}
	all, err := procfs.AllProcs()
	for _, one := range all {
		stat, gone := one.Stat()
		switch {
		case gone != nil: // it has just ended
		case one.PID == p.child.Pid():
			spent += time.Duration(stat.CUTime+stat.CSTime) * 10 * time.Millisecond // of ended children
		case stat.PPID == p.child.Pid():
			own, _ := cpuOf(one.PID)
			spent += own
		}
	}
	return p.past + spent, err
}

// cpuOf returns the user and system time of a process, by its CPU clock, which is finer than /proc:
// clock_getcpuclockid(3).
func cpuOf(pid int) (time.Duration, error) {
	var t unix.Timespec
	err := unix.ClockGettime(int32(^pid<<3|2), &t)
	return time.Duration(t.Nano()), err
}

// usage is the consumption: by this process (all clients), by the servers, and by the whole machine.
type usage struct {
	wall, client, server time.Duration // all but wall: CPU
	machine              float64       // CPU seconds of all processes
	commands, trips      float64       // of the servers: executed, including in scripts; read events or messages
}

var began = time.Now()

// used returns the consumption so far. The counters include each call of used only in later results.
func (s *system) used(by *scope) (u usage) {
	u.commands, u.trips = math.NaN(), math.NaN()
	if s.count != nil {
		u.commands, u.trips = s.count(by)
	}
	for _, p := range s.servers {
		spent, err := p.cpu()
		by.must(err)
		u.server += spent
	}
	fs, err := procfs.NewDefaultFS()
	by.must(err)
	stat, err := fs.Stat()
	by.must(err)
	all := stat.CPUTotal
	u.machine = all.User + all.Nice + all.System + all.IRQ + all.SoftIRQ + all.Steal
	u.wall = time.Since(began)
	u.client, err = cpuOf(os.Getpid())
	by.must(err)
	return u
}

// spend returns the consumption of do. It notes how many cores neither the clients nor the servers used.
func (r *round) spend(do func()) usage {
	before := r.at.used(&r.scope)
	do()
	d := r.at.used(&r.scope).since(before)
	r.s["foreign"] = max(0, (d.machine-d.client.Seconds()-d.server.Seconds())/d.wall.Seconds())
	return d
}

func (u usage) since(before usage) usage {
	return usage{
		u.wall - before.wall, u.client - before.client, u.server - before.server,
		u.machine - before.machine, u.commands - before.commands, u.trips - before.trips,
	}
}

// perOp adds the costs of one operation.
func (u usage) perOp(s sample, ops float64) {
	s["trips"], s["commands"] = u.trips/ops, u.commands/ops
	s["client-us"] = us(u.client) / ops
	if !math.IsNaN(u.commands) { // there is a server that counts
		s["server-us"] = us(u.server) / ops
	}
}

// perSecond adds the costs per second.
func (u usage) perSecond(s sample) {
	sec := u.wall.Seconds()
	s["trips/s"], s["commands/s"] = u.trips/sec, u.commands/sec
	s["client-cpu"], s["server-cpu"] = 100*u.client.Seconds()/sec, 100*u.server.Seconds()/sec
}

// keeping returns a function that notes the growth of this process since now, per piece: goroutines, and KB of live
// heap and of stacks.
func (r *round) keeping() (more func(pieces int)) {
	now := func() (goroutines, bytes float64) {
		runtime.GC()
		runtime.GC() // the second one frees what finalizers and pools held
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(runtime.NumGoroutine()), float64(m.HeapAlloc + m.StackInuse)
	}
	goroutines, bytes := now()
	return func(pieces int) {
		g, b := now()
		r.s["goroutines"], r.s["kb"] = (g-goroutines)/float64(pieces), (b-bytes)/1024/float64(pieces)
	}
}

// traffic counts the traffic of connections: round trips, which are writes that follow a read, and bytes. The server's
// counter of read events does not show the former, because it reads one large pipeline in pieces of 16 KB.
type traffic struct{ turns, bytes atomic.Int64 }

// dialer makes the clients' connections.
type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// over counts the traffic of a dialer's connections. Nil: the default dialer.
func (t *traffic) over(dial dialer) dialer {
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &countedConn{Conn: c, t: t}, nil
	}
}

type countedConn struct {
	net.Conn
	t     *traffic
	wrote atomic.Bool // more recently than read
}

func (c *countedConn) Write(p []byte) (int, error) {
	if !c.wrote.Swap(true) {
		c.t.turns.Add(1)
	}
	n, err := c.Conn.Write(p)
	c.t.bytes.Add(int64(n))
	return n, err
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.wrote.Store(false)
	c.t.bytes.Add(int64(n))
	return n, err
}

// childEnv makes a process of this program a child: a part, as JSON.
const childEnv = "FENCELOCK_BENCH_CHILD"

// part is the role of a child, until it is killed or its parent has ended: one holder, a number of waiters, or, with a
// Door, watchers of the gateway there or a client that floods it.
type part struct {
	System, Peer, Addr, Name string
	Door                     string
	TTL                      time.Duration
	Waiters                  int
}

// child starts a process, and returns when it holds, or waits.
func (r *round) child(p part) *fault.Child {
	p.System, p.Peer, p.Addr = r.system.name, r.peer.name, r.at.addr()
	text, err := json.Marshal(p)
	r.must(err)
	self, err := os.Executable()
	r.must(err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	c, err := fault.Spawn(cmd)
	r.must(err)
	r.later(c.Close)
	if _, err = c.Await(r.ctx, "ready"); err != nil {
		r.must(fmt.Errorf("the child is not ready: %w\n%s", err, c.Stderr()))
	}
	return c
}

// play is the main function of a child.
func play(text string) error {
	life := &scope{ctx: context.Background()}
	return life.try(func() {
		var me part
		life.must(json.Unmarshal([]byte(text), &me))
		if me.Door != "" {
			if me.Waiters > 0 {
				watch(life, me.Door, me.Name, me.Waiters)
			} else {
				strange(me.Door)
			}
			fmt.Println("ready")
			_, err := io.Copy(io.Discard, os.Stdin)
			life.must(err)
			return
		}
		b, err := serviceNamed(me.System)
		life.must(err)
		peers := b.peers(&system{})
		i := slices.IndexFunc(peers, func(p peer) bool { return p.name == me.Peer })
		c, err := peers[i].client(life.ctx, clientOptions{addr: me.Addr, ttl: me.TTL})
		life.must(err)
		if me.Waiters == 0 {
			_, err = c.lock(life.ctx, me.Name)
			life.must(err)
		}
		for range me.Waiters {
			go func() { _, _ = c.lock(life.ctx, me.Name) }() // the child is killed before
		}
		time.Sleep(time.Duration(min(me.Waiters, 1)) * time.Second) // until all are in the queue
		fmt.Println("ready")
		_, err = io.Copy(io.Discard, os.Stdin)
		life.must(err)
	})
}
