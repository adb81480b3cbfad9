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
	"github.com/fencelock/fencelock/internal/port"
)

// process is a server that was started here, with its files in a folder of its own. It can be ended and started again
// with what it has kept there. Servers are plain processes, and not the containers of package conformance/containers:
// those have settings for tests, and no processor time that could be read.
type process struct {
	dir     string
	command func() *exec.Cmd
	child   *fault.Child
	past    time.Duration // CPU of those that were killed
	forks   bool          // a process for each connection
}

// process runs a program until the end of s, with args for its folder.
func (s *scope) process(program string, args func(dir string) []string) *process {
	path, err := exec.LookPath(program)
	s.must(err)
	dir := s.folder()
	p := &process{dir: dir, command: func() *exec.Cmd {
		cmd := exec.Command(path, args(dir)...)
		cmd.Dir = dir
		return cmd
	}}
	s.must(p.start())
	s.later(p.kill)
	return p
}

// folder is deleted at the end of s.
func (s *scope) folder() string {
	dir, err := os.MkdirTemp("", "fencelock-bench-")
	s.must(err)
	s.later(func() { _ = os.RemoveAll(dir) }) // a folder that is left does no harm
	return dir
}

// addrs reserves addresses of the loopback interface for servers that are ended and started again.
func (s *scope) addrs(n int) (all []string) {
	for range n {
		p, err := port.Reserve()
		s.must(err)
		s.later(p.Close)
		p.Lend()
		all = append(all, p.Addr())
	}
	return all
}

// start starts the process, after kill or awaitEnd again.
func (p *process) start() (err error) {
	if p.child, err = fault.Spawn(p.command()); err == nil {
		go p.read(p.child)
	}
	return err
}

// read empties the child's output: a pipe that nobody reads would stop the server.
func (p *process) read(c *fault.Child) {
	for err := error(nil); err == nil; {
		_, err = c.Line(context.Background())
	}
}

// kill ends the process at once (SIGKILL).
func (p *process) kill() {
	if spent, err := p.cpu(); err == nil {
		p.past = spent
	}
	p.child.Close()
}

// awaitEnd returns when a process has ended that was asked to (SIGTERM).
func (p *process) awaitEnd() {
	_ = p.child.Wait() // with which code does not matter
	p.child.Close()
}

func (p *process) pause() error {
	if p.forks {
		return errors.New("the server's processes for connections would go on")
	}
	return p.child.Pause()
}

// startTime is how long a server may take before it answers.
const startTime = 30 * time.Second

// answers asks until there is an answer.
func (p *process) answers(ctx context.Context, ask func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		attempt, end := context.WithTimeout(ctx, 2*time.Second)
		err := ask(attempt)
		end()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("it does not answer: %w\n%s", err, strings.TrimSpace(p.child.Stderr()))
		}
		sleep(ctx, 10*time.Millisecond)
	}
}

// cpu is user and system time so far.
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
			spent += time.Duration(stat.CUTime+stat.CSTime) * 10 * time.Millisecond // of those that have ended
		case stat.PPID == p.child.Pid():
			own, _ := cpuOf(one.PID)
			spent += own
		}
	}
	return p.past + spent, err
}

// cpuOf is user and system time of a process, by its own clock, which is finer than /proc: clock_getcpuclockid(3).
func cpuOf(pid int) (time.Duration, error) {
	var t unix.Timespec
	err := unix.ClockGettime(int32(^pid<<3|2), &t)
	return time.Duration(t.Nano()), err
}

// resident is the memory that the process keeps, in bytes.
func (p *process) resident() (float64, error) {
	proc, err := procfs.NewProc(p.child.Pid())
	if err != nil {
		return 0, err
	}
	stat, err := proc.Stat()
	return float64(stat.ResidentMemory()), err
}

// usage is what was consumed so far: by this process (all clients), by the servers, and by the whole machine.
type usage struct {
	at              time.Time
	client, server  time.Duration // CPU
	machine         float64       // CPU seconds of everybody
	commands, trips float64       // of the servers: executed, those in scripts included; read events or messages
}

func (s *system) usage(ctx context.Context) (u usage, err error) {
	u.commands, u.trips = math.NaN(), math.NaN()
	if s.count != nil {
		if u.commands, u.trips, err = s.count(ctx); err != nil {
			return u, fmt.Errorf("counters: %w", err)
		}
	}
	for _, p := range s.servers {
		spent, err := p.cpu()
		if err != nil {
			return u, err
		}
		u.server += spent
	}
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return u, err
	}
	stat, err := fs.Stat()
	all := stat.CPUTotal
	u.machine = all.User + all.Nice + all.System + all.IRQ + all.SoftIRQ + all.Steal
	u.at = time.Now()
	u.client, _ = cpuOf(os.Getpid())
	return u, err
}

// spent is the difference between two usages.
type spent struct {
	wall, client, server     time.Duration
	commands, trips, foreign float64 // foreign: cores that neither the clients nor the servers used
}

func (u usage) since(before usage) spent {
	d := spent{
		wall: u.at.Sub(before.at), client: u.client - before.client, server: u.server - before.server,
		commands: u.commands - before.commands, trips: u.trips - before.trips,
	}
	d.foreign = max(0, (u.machine-before.machine-d.client.Seconds()-d.server.Seconds())/d.wall.Seconds())
	return d
}

// spend returns what was consumed while do ran.
func (r *round) spend(do func()) spent {
	before, err := r.at.usage(r.ctx)
	r.must(err)
	do()
	after, err := r.at.usage(r.ctx)
	r.must(err)
	return after.since(before)
}

// perOp adds what one operation cost.
func (d spent) perOp(s sample, ops float64) {
	s["trips"], s["commands"] = d.trips/ops, d.commands/ops
	s["client-us"] = float64(d.client.Microseconds()) / ops
	if !math.IsNaN(d.commands) { // there is a server that counts
		s["server-us"] = float64(d.server.Microseconds()) / ops
	}
	s["foreign"] = d.foreign
}

// perSecond adds what a second cost.
func (d spent) perSecond(s sample) {
	sec := d.wall.Seconds()
	s["trips/s"], s["commands/s"] = d.trips/sec, d.commands/sec
	s["client-cpu"], s["server-cpu"] = 100*d.client.Seconds()/sec, 100*d.server.Seconds()/sec
	s["foreign"] = d.foreign
}

// footprint is what a process keeps while it waits or holds.
type footprint struct {
	goroutines int
	bytes      uint64 // live heap, and stacks
}

func takeFootprint() footprint {
	runtime.GC()
	runtime.GC() // the second one frees what finalizers and pools held
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return footprint{goroutines: runtime.NumGoroutine(), bytes: m.HeapAlloc + m.StackInuse}
}

// each adds the growth since before, per piece.
func (f footprint) each(s sample, before footprint, pieces int) {
	s["goroutines"] = float64(f.goroutines-before.goroutines) / float64(pieces)
	s["kb"] = (float64(f.bytes) - float64(before.bytes)) / 1024 / float64(pieces)
}

// traffic is what passes over connections: round trips, which are writes that follow a read, and bytes. The server's
// counter of read events does not show the former, because it reads one large pipeline in pieces of 16 KB.
type traffic struct{ turns, bytes atomic.Int64 }

func (t *traffic) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	return &countedConn{Conn: c, t: t}, err
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

// part is what a child plays, until it is killed or its parent has gone: one holder, or so many waiters.
type part struct {
	System, Peer, Addr, Name string
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
		err = fmt.Errorf("the child is not ready: %w\n%s", err, c.Stderr())
	}
	r.must(err)
	return c
}

// play is the life of a child.
func play(text string) error {
	life := &scope{ctx: context.Background()}
	return life.try(func() {
		var me part
		life.must(json.Unmarshal([]byte(text), &me))
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
			go func() { _, _ = c.lock(life.ctx, me.Name) }() // it is killed before
		}
		time.Sleep(time.Duration(min(me.Waiters, 1)) * time.Second) // until all stand in the queue
		fmt.Println("ready")
		_, err = io.Copy(io.Discard, os.Stdin)
		life.must(err)
	})
}
