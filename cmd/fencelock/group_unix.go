//go:build unix

package main

import (
	"os/exec"
	"runtime"
	"syscall"
)

// group is the command's process group: the command, which leads it, and what the command started.
type group struct {
	id     int                     // of the group and of its leader
	leader chan syscall.WaitStatus // its stops, and as the last one its end
}

// startGroup starts cmd as the leader of a new group.
func startGroup(cmd *exec.Cmd) (*group, error) {
	g := &group{leader: make(chan syscall.WaitStatus)}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	dieWithUs(cmd.SysProcAttr)
	adoptOrphans()
	started := make(chan error)
	go func() {
		// Linux kills the command when the thread that started it ends, so this goroutine keeps the thread until the
		// command has ended.
		runtime.LockOSThread()
		err := cmd.Start()
		if err == nil {
			g.id = cmd.Process.Pid
		}
		started <- err
		if err == nil {
			g.reap()
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return g, nil
}

// reap takes ended processes out of the process table until the leader has ended: the leader, and orphans that became
// ours. It asks the kernel, since package os tells nothing of stops and knows nothing of orphans.
func (g *group) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WUNTRACED, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			g.leader <- exitUnavailable << 8 // nobody to wait for: somebody else took the leader's exit code
			return
		case pid == g.id:
			g.leader <- status
			if !status.Stopped() {
				return
			}
		}
	}
}

// empty reports whether no process of the group is left. The leader has ended before.
//
// Asking again and again is what there is: no system tells when a group becomes empty. The number of an empty group may
// be given to a stranger's in theory; between two looks, a few milliseconds apart, all numbers would have to be used
// up.
func (g *group) empty() bool {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err != syscall.EINTR && (err != nil || pid <= 0) {
			break
		}
	}
	return syscall.Kill(-g.id, 0) == syscall.ESRCH
}

// signal sends sig to every process of the group. That there is none any more is no error.
func (g *group) signal(sig syscall.Signal) { _ = syscall.Kill(-g.id, sig) }
