//go:build unix

package fault

import (
	"fmt"
	"syscall"
)

func (c *Child) spawn() error {
	if c.cmd.SysProcAttr == nil {
		c.cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.cmd.SysProcAttr.Setpgid = true
	dieWithParent(c.cmd.SysProcAttr)
	return c.cmd.Start()
}

// reap follows the process through its stops until it ends, and removes it from the process table. It uses wait4, as
// a shell does: package os does not report stops, and /proc exists on Linux only.
func (c *Child) reap(stderr func()) {
	for {
		var status syscall.WaitStatus
		_, err := syscall.Wait4(c.Pid(), &status, syscall.WUNTRACED|syscall.WCONTINUED, nil)
		switch {
		case err == syscall.EINTR:
		case err == nil && status.Stopped():
			c.enter(stopped, nil)
		case err == nil && status.Continued():
			c.enter(running, nil)
		default:
			syscall.Kill(-c.Pid(), syscall.SIGKILL) // processes that the child left behind
			stderr()
			c.enter(exited, exitError(status, err))
			return
		}
	}
}

func exitError(status syscall.WaitStatus, err error) error {
	switch {
	case err != nil:
		return fmt.Errorf("fault: wait4: %w", err)
	case status.Signaled():
		return fmt.Errorf("fault: child was killed by signal %v", status.Signal())
	case status.ExitStatus() != 0:
		return fmt.Errorf("fault: child ended with exit code %d", status.ExitStatus())
	}
	return nil
}

// Pause stops the process and its descendants in the group, and returns when the kernel reports it as stopped.
func (c *Child) Pause() error { return c.signal(syscall.SIGSTOP, stopped) }

// Resume continues a paused process, which may end before Resume returns. It fails if the process had already ended.
func (c *Child) Resume() error { return c.signal(syscall.SIGCONT, running) }

// Kill immediately kills the process and its descendants in the group, even if paused, and returns when the process
// has exited. It succeeds if the process had already ended.
func (c *Child) Kill() error { return c.signal(syscall.SIGKILL, exited) }

// Terminate sends SIGTERM to the process and its descendants in the group, and does not wait.
func (c *Child) Terminate() error { return c.signal(syscall.SIGTERM, running) }

// signal sends sig to the process group and returns when the process is in phase want.
func (c *Child) signal(sig syscall.Signal, want phase) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	resumed := sig == syscall.SIGCONT && c.phase == stopped
	if c.phase != exited {
		if err := syscall.Kill(-c.Pid(), sig); err != nil && err != syscall.ESRCH {
			return fmt.Errorf("fault: signal %v: %w", sig, err)
		}
	}
	if sig == syscall.SIGTERM || c.await(want) || resumed {
		return nil
	}
	return fmt.Errorf("fault: signal %v: the child has ended: %v", sig, c.exit)
}
