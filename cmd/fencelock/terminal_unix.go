//go:build unix

package main

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// terminal is the one on standard input. A process group that reads from its terminal without being in its foreground
// is stopped by the kernel, so the command's group gets the foreground from us while it runs, as from a shell.
//
// We do it after the start, and let the command go on if it was stopped for reading before; a Ctrl-Z in that first
// millisecond is lost. SysProcAttr.Foreground does it in the child before, but the child must ignore SIGTTOU for it,
// and the command would do so for ever.
type terminal struct{ given bool }

const stdin = 0

// giveTo gives the foreground to a group, and reports whether it was ours to give.
func (t *terminal) giveTo(group int) bool {
	if t.given {
		return false
	}
	front, err := unix.IoctlGetInt(stdin, unix.TIOCGPGRP) // fails if it is no terminal, or not the one of our session
	if ours, failed := unix.Getpgid(0); err == nil && failed == nil && front == ours {
		t.given = unix.IoctlSetPointerInt(stdin, unix.TIOCSPGRP, group) == nil
	}
	return t.given
}

// takeBack makes our group the foreground again, and reports whether it had given it away.
func (t *terminal) takeBack() bool {
	if !t.given {
		return false
	}
	t.given = false
	if ours, err := unix.Getpgid(0); err == nil {
		_ = unix.IoctlSetPointerInt(stdin, unix.TIOCSPGRP, ours) // fails if the terminal is gone
	}
	return true
}

// orphaned reports whether no shell could let us go on if we stopped: our parent is of another session.
func orphaned() bool {
	parent := syscall.Getppid()
	if parent == 0 {
		return true // the first process of a container
	}
	ours, err := unix.Getsid(0)
	if err != nil {
		return true
	}
	parents, err := unix.Getsid(parent)
	return err != nil || parents != ours
}
