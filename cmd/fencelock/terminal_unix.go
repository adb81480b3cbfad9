//go:build unix

package main

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fencelock/fencelock/internal/proctree"
)

// terminal is the controlling terminal, wherever standard input comes from. A process group that reads from its
// terminal without being in its foreground is stopped by the kernel, so the command's group gets the foreground from
// us: immediately if our group has no other member, as from a shell, and otherwise when it asks for the terminal.
// Until then a neighbour in a pipeline, such as a pager, or the script that has started us, keeps the foreground.
//
// We do it after the start, and let the command continue if it was stopped for reading before. On Linux, a Ctrl-Z
// before that is kept; elsewhere it is lost. SysProcAttr.Foreground does it earlier, in the child, but the child must
// ignore SIGTTOU for it, and the command would inherit that.
type terminal struct {
	file  *os.File // nil: no terminal
	given bool     // to the command's group
}

// openTerminal opens the controlling terminal, if there is one.
func openTerminal() terminal {
	file, err := os.OpenFile("/dev/tty", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return terminal{}
	}
	return terminal{file: file}
}

// close takes the foreground back and closes the terminal.
func (t *terminal) close() {
	t.takeBack()
	if t.file != nil {
		t.file.Close()
	}
}

// giveAtStart gives the foreground to a group unless another process of ours needs it.
func (t *terminal) giveAtStart(group int) {
	if ours, err := unix.Getpgid(0); t.file != nil && err == nil && proctree.Alone(ours) {
		t.giveTo(group)
	}
}

// giveTo gives the foreground to a group, and reports whether it was ours to give.
func (t *terminal) giveTo(group int) bool {
	if t.given || t.file == nil {
		return false
	}
	fd := int(t.file.Fd())
	front, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
	if ours, failed := unix.Getpgid(0); err == nil && failed == nil && front == ours {
		t.given = unix.IoctlSetPointerInt(fd, unix.TIOCSPGRP, group) == nil
	}
	return t.given
}

// takeBack makes our group the foreground group.
func (t *terminal) takeBack() {
	if !t.given {
		return
	}
	t.given = false
	if ours, err := unix.Getpgid(0); err == nil {
		_ = unix.IoctlSetPointerInt(int(t.file.Fd()), unix.TIOCSPGRP, ours) // fails if the terminal is gone
	}
}

// orphaned reports whether no shell could continue us if we stopped: our parent is of another session.
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
