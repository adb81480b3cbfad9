//go:build unix

package main

import (
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/internal/proctree"
)

// watch stays with a running command until no process of its tree is left: no process may run on without the lock.
//
//	running ──► command exited ──► its children run on ──► all ended
//	   ├──────► TERM to fencelock ─► TERM ──► KILL after --stop-timeout ──► all ended
//	   └──────► lock lost ─────────► TERM ──► KILL, while nobody can hold the lock ──► all ended
//
// The guardian of the tree sends the signals, and itself ends the tree at the deadline of the lock.
type watch struct {
	*runSettings
	tree    *proctree.Tree
	group   int // of the command
	leases  fencelock.Leases
	signals <-chan os.Signal
	tty     terminal

	standing bool // the command is stopped, as far as this process knows
	stopping bool // INT, TERM, HUP or QUIT has come
	// terminating: TERM has come, which sets a time for the end.
	terminating bool
	exited      bool
	status      syscall.WaitStatus // of the command, if exited
	expired     bool               // the guardian has ended the tree at the deadline
	orphaned    bool               // the guardian has died
	left        []proctree.Process // processes that run on after the command, or survive KILL at the end
	done        bool
	survived    bool
}

// childrenTime is the time that the command's children may run on before a message names them.
const childrenTime = time.Second

func (w *watch) run() {
	// From here on, so that the command does not inherit it: writing to the terminal, and taking it back, must not stop
	// us when we are not in its foreground.
	signal.Ignore(syscall.SIGTTOU)
	w.tty = openTerminal()
	defer w.tty.close()
	w.tty.giveAtStart(w.group)
	ended := make(chan struct{})
	defer close(ended)
	go w.keepBounds(ended)
	lost := w.leases.Context().Done()
	var waiting <-chan time.Time
	for !w.done {
		select {
		case e := <-w.tree.Events():
			w.follow(e)
			switch {
			case e.Type == proctree.Stopped:
				w.stopped(w.status.StopSignal())
			case e.Type != proctree.Exited || len(e.Left) == 0:
			case w.stopping || w.status.Signaled() && proctree.Fatal(w.status.Signal()):
				w.tree.End(w.stopTimeout, true)
			case w.killChildren:
				w.tree.End(w.killAfter, true)
			default:
				waiting = time.After(childrenTime)
			}
		case sig := <-w.signals:
			w.pass(sig.(syscall.Signal))
		case <-lost:
			lost = nil
			w.tree.End(w.graceOfLoss(), true)
		case <-waiting:
			w.complain("the command has ended; lock %s stays until its children end: %s", w.listed(), listed(w.left))
		}
	}
}

// follow handles an event of the tree.
func (w *watch) follow(e proctree.Event) {
	switch e.Type {
	case proctree.Stopped:
		w.standing, w.status = true, syscall.WaitStatus(e.Status)
	case proctree.Exited:
		w.standing, w.exited, w.status, w.left = false, true, syscall.WaitStatus(e.Status), e.Left
	case proctree.Expired:
		w.expired = true
	case proctree.Orphaned:
		w.orphaned = true
	case proctree.Ended:
		w.done = true
	case proctree.Survived:
		w.done, w.survived, w.left = true, true, e.Left
	}
}

// bounds returns the instants at which the guardian itself ends the tree: TERM when the lease ends, and KILL right
// before another client can get the lock.
func (s *runSettings) bounds(leases fencelock.Leases) proctree.Bounds {
	now := proctree.Now() // before the remaining time is read: a pause in between makes the bounds earlier
	term := now.Add(time.Until(deadlineOf(leases)))
	return proctree.Bounds{Term: term, Kill: term.Add(s.killAfter)}
}

// deadlineOf returns when the first of the leases ends.
func deadlineOf(leases fencelock.Leases) time.Time {
	first := leases[0].Deadline()
	for _, l := range leases[1:] {
		if d := l.Deadline(); d.Before(first) {
			first = d
		}
	}
	return first
}

// keepBounds sends each new deadline to the guardian. It avoids calls that may block, such as output to standard
// error.
func (w *watch) keepBounds(ended <-chan struct{}) {
	const least = 5 * time.Millisecond
	for {
		// More often near the deadline: a renewal may succeed at the last moment.
		pause := max(least, min(w.ttl/10, time.Until(deadlineOf(w.leases))/2))
		select {
		case <-ended:
			return
		case <-w.leases.Context().Done():
			return
		case <-time.After(pause):
		}
		w.tree.SetBounds(w.bounds(w.leases))
	}
}

// graceOfLoss returns the time for which the command may continue after the loss. The lease ended by the grace earlier
// than it must (Options.StopEarly), so this is the grace if this process is on time, and 0 if it was paused until
// another client could hold the lock.
func (w *watch) graceOfLoss() time.Duration {
	left := time.Until(deadlineOf(w.leases)) + w.killAfter
	return max(0, min(left, w.killAfter))
}

// pass handles a signal that was sent to us.
func (w *watch) pass(sig syscall.Signal) {
	switch sig {
	case syscall.SIGPIPE:
	case syscall.SIGTSTP:
		// The command must stand still while we do: we could not end it with its lock.
		if !orphaned() {
			w.halt()
			w.tty.takeBack()
			_ = syscall.Kill(syscall.Getpid(), syscall.SIGSTOP)
		}
	case syscall.SIGCONT:
		w.goOn()
	case syscall.SIGTERM:
		if w.terminating { // End sends TERM once
			w.tree.Signal(sig)
		}
		w.stopping, w.terminating, w.standing = true, true, false
		w.tree.End(w.stopTimeout, false)
	default:
		w.stopping = w.stopping || proctree.Fatal(sig)
		w.tree.Signal(sig)
	}
}

// stopped follows the command into a stop by the terminal: the shell gets the terminal back, and all other processes
// of our job stop as well, as they would have without us. For Ctrl-Z the terminal was given to the command; By TTIN
// and TTOU the command asks for it. A command that is stopped in another way stays stopped, and keeps its lock.
func (w *watch) stopped(by syscall.Signal) {
	asks := by == syscall.SIGTTIN || by == syscall.SIGTTOU
	switch {
	case asks && (w.tty.given || w.tty.giveTo(w.group)):
		w.standing = false
		w.tree.Resume()
		return
	case asks && orphaned():
		w.complain("the command is stopped: it asks for the terminal, which another job has")
		return
	case !asks && !w.tty.given:
		return
	}
	w.tty.takeBack()
	if orphaned() {
		w.goOn() // no shell could continue us
		return
	}
	_ = syscall.Kill(0, syscall.SIGSTOP)
}

// goOn continues the command after a stop of ours, but not without its lock.
func (w *watch) goOn() {
	if w.leases.Err() != nil {
		return // run sees it in the lease's context
	}
	w.tty.giveAtStart(w.group)
	w.wake()
}

// halt stops the group, and waits for the message: later, this stop would look like one by the terminal.
func (w *watch) halt() {
	w.tree.Signal(syscall.SIGSTOP)
	for hangs := time.After(time.Second); !w.standing && !w.exited && !w.done; {
		select {
		case e := <-w.tree.Events():
			w.follow(e)
		case <-hangs: // in the kernel
			return
		}
	}
}

func (w *watch) wake() {
	w.standing = false
	w.tree.Signal(syscall.SIGCONT)
}

// listed formats processes for a message.
func listed(all []proctree.Process) string {
	names := make([]string, len(all))
	for i, p := range all {
		names[i] = fmt.Sprintf("%s (process %d)", p.Name, p.PID)
	}
	return strings.Join(names, ", ")
}
