//go:build unix

package proctree

import (
	"encoding/json"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// This file is the caller's side of the socket.

// Tree is a command and its descendants, or the guardian that will start one. Every method may be called from any
// goroutine.
type Tree struct {
	guardian int
	before   map[int]bool // children that the process had before: no part of the tree
	socket   *os.File
	started  chan reply
	events   chan Event
	dead     chan struct{} // closed when the guardian has ended

	mu     sync.Mutex // orders writes, and protects group
	orders *json.Encoder
	group  int
}

// Start starts a guardian, which waits for Run. A process has at most one Tree, and owes it a Close.
func Start() (*Tree, error) {
	if _, err := now(); err != nil {
		return nil, err
	}
	pair, err := socketpair()
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	becomeReaper()
	t := &Tree{
		socket: os.NewFile(uintptr(pair[0]), "guardian"), before: map[int]bool{},
		started: make(chan reply, 1), events: make(chan Event, 64), dead: make(chan struct{}),
	}
	if hasChildren() {
		for _, p := range descendants(os.Getpid(), nil) {
			t.before[p.PID] = true
		}
	}
	t.orders = json.NewEncoder(t.socket)
	// The guardian knows no secret of the caller's environment. The variables of the Go runtime stay.
	var env []string
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "GO") {
			env = append(env, kv)
		}
	}
	program, err := self()
	if err == nil {
		t.guardian, err = syscall.ForkExec(program, []string{guardianName, strconv.Itoa(pair[1])}, &syscall.ProcAttr{
			// A separate group: the signals of the terminal, and those to the caller's group, do not reach it.
			Env: env, Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setpgid: true},
		})
	}
	_ = syscall.Close(pair[1])
	if err != nil {
		t.socket.Close()
		return nil, &os.PathError{Op: "start the guardian", Path: program, Err: err}
	}
	go t.await()
	go t.read()
	if os.Getpid() == 1 {
		go t.reapStrangers()
	}
	return t, nil
}

// socketpair returns the caller's end and the guardian's, which a child inherits under the same number: so no other
// file that the caller inherited has to move.
func socketpair() ([2]int, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return pair, err
	}
	unix.CloseOnExec(pair[0])
	if err := unix.SetNonblock(pair[0], true); err != nil { // so that a Read ends with Close
		return pair, err
	}
	return pair, nil
}

// Close lets the guardian go. If a command runs, the guardian ends the tree as if the caller had died.
func (t *Tree) Close() { t.socket.Close() }

// Run starts the command and returns its process, which leads a new process group. It is called once.
func (t *Tree) Run(c *Command) (pid int, err error) {
	t.order(order{Run: c})
	r := <-t.started
	switch {
	case r.Failed != nil && r.Failed.Errno != 0:
		return 0, &os.PathError{Op: "fork/exec", Path: c.Path, Err: r.Failed.Errno}
	case r.Failed != nil:
		return 0, errors.New(r.Failed.Text)
	}
	return r.Started, nil
}

// Events returns the events of the tree from Run on. The last event is Ended or Survived.
func (t *Tree) Events() <-chan Event { return t.events }

// SetBounds moves the bounds of the tree.
func (t *Tree) SetBounds(b Bounds) { t.order(order{Bounds: &b}) }

// Signal sends a signal to the command's process group, or to every process of the tree if the command has ended. INT,
// TERM, HUP and QUIT also continue stopped processes.
func (t *Tree) Signal(sig syscall.Signal) { t.order(order{Signal: sig}) }

// Resume continues the command's process group, which has stopped to ask for the terminal. If a Ctrl-Z is pending for
// the group, Resume leaves it stopped, and an event Stopped with TSTP follows.
func (t *Tree) Resume() { t.order(order{Resume: true}) }

// End ends the tree: TERM, and KILL after the grace. If all is false, TERM reaches the command's process group first
// and the other processes when the command has ended. A second End can only shorten the grace.
func (t *Tree) End(grace time.Duration, all bool) {
	t.order(order{End: &ending{Grace: grace, All: all}})
}

// order sends an order. If it fails the guardian has died, which read detects.
func (t *Tree) order(o order) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = t.orders.Encode(o)
}

// await waits for the guardian's end. A guardian that is stopped could not end the tree: it is continued immediately.
func (t *Tree) await() {
	defer close(t.dead)
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(t.guardian, &status, syscall.WUNTRACED, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil || pid == t.guardian && !status.Stopped():
			return
		default:
			_ = syscall.Kill(t.guardian, syscall.SIGCONT)
		}
	}
}

// strangersTime is the time between two looks at strangers.
const strangersTime = 5 * time.Second

// reapStrangers takes processes out of the process table that are no part of the tree, and have become children of this
// one because it is the first of a container: those of docker exec, for example.
func (t *Tree) reapStrangers() {
	for tick := time.Tick(strangersTime); ; {
		select {
		case <-t.dead:
			return
		case <-tick:
			for _, pid := range children() {
				if pid != t.guardian {
					_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
				}
			}
		}
	}
}

// read passes on the guardian's replies. If the guardian dies before the tree, read kills the tree.
func (t *Tree) read() {
	running := false
	for in := json.NewDecoder(t.socket); ; {
		var r reply
		if in.Decode(&r) != nil {
			break
		}
		switch {
		case r.Started != 0:
			running = true
			t.mu.Lock()
			t.group = r.Started
			t.mu.Unlock()
			t.started <- r
		case r.Failed != nil:
			t.started <- r
		case r.Event != nil:
			t.events <- *r.Event
			if r.Event.Type == Ended || r.Event.Type == Survived {
				return
			}
		}
	}
	if !running { // a command that the guardian may just have started dies with it
		t.started <- reply{Failed: &startError{Text: "the guardian process has died"}}
		return
	}
	<-t.dead
	t.takeOver()
}

// takeOver kills the tree of a dead guardian. Its processes are the children of this process now.
func (t *Tree) takeOver() {
	t.events <- Event{Type: Orphaned}
	cageOf(t.guardian).kill()
	defer cageOf(t.guardian).remove(nil)
	t.mu.Lock()
	group := t.group
	t.mu.Unlock()
	pause := firstLook
	empty := 0 // rounds without a process
	for began := time.Now(); time.Since(began) < deathTime; {
		if group != 0 && !subreapers {
			_ = syscall.Kill(-group, syscall.SIGKILL)
		}
		left := descendants(os.Getpid(), t.before)
		for _, p := range left {
			sendTo(p, syscall.SIGKILL)
		}
		for _, p := range left {
			_, _ = syscall.Wait4(p.PID, nil, syscall.WNOHANG, nil) // fails unless it is a child
		}
		if len(left) == 0 && (subreapers || group == 0 || syscall.Kill(-group, 0) == syscall.ESRCH) {
			if empty++; empty == 2 {
				t.events <- Event{Type: Ended}
				return
			}
			continue
		}
		empty = 0
		time.Sleep(pause)
		pause = min(2*pause, maxLook)
	}
	t.events <- Event{Type: Survived, Left: named(descendants(os.Getpid(), t.before))}
}

// Now returns the present instant. Without a clock, where Start fails, it returns zero: bounds from it lie in the past.
func Now() Instant {
	at, _ := now()
	return at
}
