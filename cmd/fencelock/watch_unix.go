//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

// watch stays with a running command until no process of its group is left: no process may run on without the lock.
//
//	running ──► command exited ──► TERM to what it left ──► KILL after the grace ──► nothing left
//	   └──────► lock lost ───────► TERM ──────────────────► KILL, while nobody can hold the lock ──► nothing left
type watch struct {
	group   *group
	lease   *fencelock.Lease
	grace   time.Duration
	signals <-chan os.Signal
	tty     terminal

	standing  bool // the command is stopped, as far as we have heard
	exited    bool
	status    syscall.WaitStatus // of the command, if exited
	survivors bool               // at the end: KILL did not help

	killAt  backend.Instant // zero: nobody is to be killed
	killed  bool
	deathBy backend.Instant // after the KILL
}

const (
	lookAgain = 10 * time.Millisecond  // for processes that remain in the group
	maxNap    = 250 * time.Millisecond // Go's timers stand still in a suspended machine, and the lease does not
	deathTime = 5 * time.Second        // for processes to die of KILL: one that hangs in the kernel does not
)

func (w *watch) run() {
	// From here on, so that the command does not inherit it: writing to the terminal, and taking it back, must not stop
	// us when we are not in its foreground.
	signal.Ignore(syscall.SIGTTOU)
	defer w.tty.takeBack()
	w.tty.giveTo(w.group.id)
	lost := w.lease.Context().Done()
	for {
		if w.exited {
			if w.group.empty() {
				return
			}
			w.end(w.grace)
		}
		now := backend.SystemClock().Now()
		if !w.killAt.IsZero() && now >= w.killAt && !w.killed {
			w.group.signal(syscall.SIGKILL)
			w.killed, w.deathBy = true, now.Add(deathTime)
		}
		if w.killed && now >= w.deathBy {
			w.survivors = true
			return
		}
		select {
		case status := <-w.group.leader:
			w.follow(status)
			if w.standing {
				w.stopped(status.StopSignal())
			}
		case sig := <-w.signals:
			w.pass(sig.(syscall.Signal))
		case <-lost:
			lost = nil
			w.end(w.graceOfLoss())
		case <-w.nap(now):
		}
	}
}

// follow notes what became of the command.
func (w *watch) follow(status syscall.WaitStatus) {
	w.standing = status.Stopped()
	if !w.standing {
		w.exited, w.status = true, status
	}
}

// graceOfLoss is how long the command may go on after the loss. The lease ended by the grace earlier than it must
// (Options.Margin), so this is the grace if we are on time, and nothing if we stood still until somebody else could
// hold the lock.
func (w *watch) graceOfLoss() time.Duration {
	left := time.Until(w.lease.Deadline()) + w.grace
	return max(0, min(left, w.grace))
}

// end asks the group to end, and has it killed after grace, or sooner if that was said before.
func (w *watch) end(grace time.Duration) {
	at := backend.SystemClock().Now().Add(grace)
	if !w.killAt.IsZero() {
		w.killAt = min(w.killAt, at)
		return
	}
	w.killAt = at
	if grace > 0 {
		w.group.signal(syscall.SIGTERM)
		w.wake() // a stopped process would not see it
	}
}

// nap ends when there is something to look at besides the channels; never if there is not.
func (w *watch) nap(now backend.Instant) <-chan time.Time {
	switch {
	case w.exited:
		return time.After(lookAgain)
	case w.killed:
		return time.After(min(w.deathBy.Sub(now), maxNap))
	case !w.killAt.IsZero():
		return time.After(min(w.killAt.Sub(now), maxNap))
	}
	return nil
}

// pass deals with a signal that was sent to us.
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
	default:
		w.group.signal(sig)
	}
}

// stopped follows the command into a stop by the terminal (Ctrl-Z): the shell gets the terminal back, and what else
// runs in our job stops as well, as it would have without us. A command that is stopped in another way stays so, and
// keeps its lock.
func (w *watch) stopped(by syscall.Signal) {
	if !w.tty.given {
		return
	}
	if by == syscall.SIGTTIN || by == syscall.SIGTTOU {
		w.wake() // it asked for the terminal before it had it
		return
	}
	w.tty.takeBack()
	if orphaned() {
		w.goOn() // there is no shell that could let us go on
		return
	}
	_ = syscall.Kill(0, syscall.SIGSTOP)
}

// goOn lets the command go on after a stop of ours, but not without its lock.
func (w *watch) goOn() {
	if w.lease.Err() != nil {
		return // run learns it from the lease's context
	}
	w.tty.giveTo(w.group.id)
	w.wake()
}

// halt stops the group, and waits until it is told so: heard later, this stop would be taken for one by the terminal.
func (w *watch) halt() {
	w.group.signal(syscall.SIGSTOP)
	if w.standing || w.exited {
		return
	}
	select {
	case status := <-w.group.leader:
		w.follow(status)
	case <-time.After(time.Second): // it hangs in the kernel
	}
}

func (w *watch) wake() {
	w.standing = false
	w.group.signal(syscall.SIGCONT)
}
