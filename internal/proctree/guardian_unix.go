//go:build unix

package proctree

import (
	"encoding/json"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// This file is the guardian's process.

// guardianName is argument 0 of a guardian.
const guardianName = "fencelock-guardian"

// order is a message from the caller to the guardian. One field is set.
type order struct {
	Run    *Command       `json:"run,omitempty"`
	Bounds *Bounds        `json:"bounds,omitempty"`
	Signal syscall.Signal `json:"signal,omitempty"`
	Resume bool           `json:"resume,omitempty"`
	End    *ending        `json:"end,omitempty"`
}

// ending is the order to end the tree.
type ending struct {
	Grace time.Duration `json:"grace"` // between TERM and KILL
	All   bool          `json:"all"`   // TERM to all at once, not to the command's group first
}

// reply is a message from the guardian to the caller. One field is set.
type reply struct {
	Started int         `json:"started,omitempty"` // the command's process
	Failed  *startError `json:"failed,omitempty"`
	Event   *Event      `json:"event,omitempty"`
}

const (
	deathTime = 5 * time.Second // maximum from KILL to the end; a process that hangs in the kernel takes longer
	firstLook = time.Millisecond
	maxLook   = 100 * time.Millisecond // between two looks at a tree that dies
)

// guardian owns the tree. All of it runs on one goroutine, whose thread is the command's parent.
type guardian struct {
	orders  <-chan order // closed when the caller has died
	replies *json.Encoder
	alarm   *alarm
	cage    *cage // nil: there is no cgroup for the tree

	group  int  // of the command, and its leader; 0 before the start
	exited bool // the command has ended
	gone   bool // the caller has gone

	bounds  Bounds
	grace   time.Duration // between the bounds, for a caller that has died
	killAt  Instant       // by an ending; zero: no deadline
	termed  bool          // every process got TERM
	killed  bool
	deathBy Instant
	look    time.Duration
	told    bool // that some survive
}

// init is the guardian's main function in a process that Start has started, and never returns there. It runs here and
// not in main, because the other packages of the program take longer to initialize than the guardian to start.
func init() {
	if len(os.Args) == 2 && os.Args[0] == guardianName {
		guard()
	}
}

// guard runs the guardian of the caller at the other end of the socket in argument 1.
func guard() {
	fd, err := strconv.Atoi(os.Args[1])
	if err != nil {
		os.Exit(2)
	}
	unix.CloseOnExec(fd)
	// The thread lives as long as the guardian: Linux kills the command when the thread that started it ends.
	runtime.LockOSThread()
	becomeReaper()
	rename(guardianName)
	socket := os.NewFile(uintptr(fd), "caller")
	orders := make(chan order)
	go func() {
		defer close(orders)
		for in := json.NewDecoder(socket); ; {
			var o order
			if in.Decode(&o) != nil {
				return
			}
			orders <- o
		}
	}()
	g := &guardian{orders: orders, replies: json.NewEncoder(socket), look: firstLook}
	if g.alarm, err = newAlarm(); err != nil {
		g.send(reply{Failed: &startError{Text: err.Error()}})
		os.Exit(2)
	}
	g.run()
	g.cage.remove(nil)
	os.Exit(0)
}

// run returns when the tree has ended, or the caller has died without a tree.
func (g *guardian) run() {
	// The guardian survives the signals of a terminal and of a shell. They are caught, and not ignored, since the
	// command would inherit that; those that are ignored already stay so.
	dropped := make(chan os.Signal, 1)
	for _, sig := range []os.Signal{
		syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE, syscall.SIGTSTP,
		syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGUSR1, syscall.SIGUSR2,
	} {
		if !signal.Ignored(sig) {
			signal.Notify(dropped, sig)
		}
	}
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	for {
		if g.group != 0 {
			if g.reap() {
				g.tell(Event{Type: Ended})
				return
			}
			g.act(g.now())
		}
		select {
		case o, ok := <-g.orders:
			if !ok && g.group == 0 {
				return
			}
			g.obey(o, ok)
		case <-children:
		case <-dropped:
		case <-g.alarm.rung():
		}
	}
}

// now returns the present instant. Without a clock the guardian ends, and the caller ends the tree.
func (g *guardian) now() Instant {
	at, err := now()
	if err != nil {
		os.Exit(2)
	}
	return at
}

func (g *guardian) send(r reply) { _ = g.replies.Encode(r) } // fails if the caller has gone, which orders tells

func (g *guardian) tell(e Event) { g.send(reply{Event: &e}) }

// obey carries out an order of the caller. Without a caller it ends the tree.
func (g *guardian) obey(o order, ok bool) {
	switch {
	case !ok:
		g.gone, g.orders = true, nil
		g.end(&ending{Grace: g.grace, All: true})
	case o.Run != nil:
		g.start(o.Run)
	case o.Bounds != nil:
		g.bounds = *o.Bounds
	case o.Signal != 0 && g.exited:
		g.signalAll(o.Signal)
	case o.Signal != 0:
		g.signalGroup(o.Signal)
	case o.Resume:
		g.resume()
	case o.End != nil:
		g.end(o.End)
	}
}

// start starts the command as the leader of a new process group.
func (g *guardian) start(c *Command) {
	g.bounds, g.grace = c.Bounds, time.Duration(c.Bounds.Kill-c.Bounds.Term)
	attr := &syscall.SysProcAttr{Setpgid: true}
	dieWithParent(attr)
	fork := func() (int, error) {
		files := []uintptr{0, 1, 2}
		return syscall.ForkExec(c.Path, c.Args, &syscall.ProcAttr{Env: c.Env, Files: files, Sys: attr})
	}
	g.cage = newCage(os.Getpid(), attr)
	pid, err := fork()
	if err != nil && g.cage != nil { // the system may forbid to start a process in another cgroup
		g.cage.remove(attr)
		g.cage = nil
		pid, err = fork()
	}
	if err != nil {
		failed := &startError{Text: err.Error()}
		failed.Errno, _ = err.(syscall.Errno)
		g.send(reply{Failed: failed})
		return
	}
	g.group = pid
	g.send(reply{Started: pid})
}

// reap takes ended processes out of the process table, and reports whether no process of the tree is left.
func (g *guardian) reap() (ended bool) {
	var exit *Event // of the command
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG|syscall.WUNTRACED|waitAll, nil)
		switch {
		case err == syscall.EINTR:
			continue
		case pid > 0 && pid == g.group && status.Stopped():
			g.tell(Event{Type: Stopped, Status: uint32(status)})
			continue
		case pid > 0 && pid == g.group:
			g.exited, exit = true, &Event{Type: Exited, Status: uint32(status)}
			continue
		case pid > 0:
			continue
		}
		// ECHILD: every descendant has a child of the guardian as its ancestor, so that no descendant is left.
		ended = err != nil && (subreapers || syscall.Kill(-g.group, 0) == syscall.ESRCH)
		if exit == nil {
			return ended
		}
		if !ended {
			exit.Left = named(g.tree())
		}
		g.tell(*exit)
		if !ended && g.killAt != 0 && !g.termed {
			g.termAll() // the processes that the command has not ended itself
		}
		return ended
	}
}

// end asks the tree to end, and has it killed after the grace, or sooner if an earlier order said so.
func (g *guardian) end(e *ending) {
	at := g.now().Add(e.Grace)
	first := g.killAt == 0
	if first || at < g.killAt {
		g.killAt = at
	}
	switch {
	case e.Grace <= 0 || g.termed:
	case e.All || g.exited:
		g.termAll()
	case first:
		g.signalGroup(syscall.SIGTERM)
	}
}

// termAll asks every process of the tree to end.
func (g *guardian) termAll() {
	g.termed = true
	g.signalAll(syscall.SIGTERM)
}

// act takes the steps that are due, and sets the alarm for the next one.
func (g *guardian) act(now Instant) {
	kill := g.bounds.Kill
	if g.killAt != 0 {
		kill = min(kill, g.killAt)
	}
	switch {
	case g.killed:
		g.kill()
		if now >= g.deathBy && !g.told {
			g.told = true
			g.tell(Event{Type: Survived, Left: named(g.tree())})
		}
		g.look = min(2*g.look, maxLook)
		if g.told {
			g.look = time.Minute
		}
		g.alarm.set(now.Add(g.look))
	case now >= kill:
		g.killed, g.deathBy = true, now.Add(deathTime)
		g.kill()
		if kill == g.bounds.Kill && !g.termed {
			g.tell(Event{Type: Expired})
		}
		g.alarm.set(now.Add(g.look))
	case now >= g.bounds.Term && !g.termed:
		g.termAll()
		g.tell(Event{Type: Expired})
		g.alarm.set(kill)
	case !g.termed:
		g.alarm.set(min(kill, g.bounds.Term))
	default:
		g.alarm.set(kill)
	}
	if g.exited && !subreapers { // no signal announces the end of a grandchild
		g.alarm.set(now.Add(maxLook / 10))
	}
}

// tree is every process of the tree, without the command's group on systems that do not tell.
func (g *guardian) tree() []process { return descendants(os.Getpid(), nil) }

// kill sends KILL to the remaining processes. A process that was forked meanwhile is found the next time.
func (g *guardian) kill() {
	g.cage.kill()
	g.signalGroup(syscall.SIGKILL)
	for _, p := range g.tree() {
		sendTo(p, syscall.SIGKILL)
	}
}

// signalAll sends a signal to every process of the tree.
func (g *guardian) signalAll(sig syscall.Signal) {
	g.signalGroup(sig)
	for _, p := range g.tree() {
		if p.group == g.group && !g.exited {
			continue // signalGroup has reached it
		}
		sendTo(p, sig)
		if Fatal(sig) {
			sendTo(p, syscall.SIGCONT)
		}
	}
}

// signalGroup sends a signal to the command's process group. A missing group is no error. A process that is
// stopped would not see a signal that ends it: it gets CONT, too.
func (g *guardian) signalGroup(sig syscall.Signal) {
	if g.exited && subreapers {
		return // the kernel may have given the number of the group to another one
	}
	_ = syscall.Kill(-g.group, sig)
	if Fatal(sig) {
		_ = syscall.Kill(-g.group, syscall.SIGCONT)
	}
}

// resume continues the command's group after a stop for reading from the terminal. A Ctrl-Z that reached the group
// meanwhile is pending, and CONT would discard it: the group stays stopped, now by Ctrl-Z.
func (g *guardian) resume() {
	if pending(g.group, syscall.SIGTSTP) {
		g.tell(Event{Type: Stopped, Status: uint32(syscall.SIGTSTP)<<8 | stoppedStatus})
		return
	}
	g.signalGroup(syscall.SIGCONT)
}

// stoppedStatus is the low byte of the wait status of a stopped process.
const stoppedStatus = 0x7f

// Fatal reports whether a signal is there to end a process.
func Fatal(sig syscall.Signal) bool {
	switch sig {
	case syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT:
		return true
	}
	return false
}
