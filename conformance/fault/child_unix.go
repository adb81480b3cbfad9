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

// reap follows the process through its stops until it ends, and takes it out of the process table. It asks the kernel
// with wait4, as a shell does: package os does not report stops, and polling /proc would be Linux
// only.
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

// Pause stops the process and all that it started, and returns when the kernel says that it stands still. Time goes on
// for everybody else.
func (c *Child) Pause() error { return c.signal(syscall.SIGSTOP, stopped) }

// Resume lets a paused process go on, which may end before Resume returns. A process that has ended already is an error.
func (c *Child) Resume() error { return c.signal(syscall.SIGCONT, running) }

// Kill ends the process and all that it started at once, paused or not, and returns when it is gone. A process that has
// ended already is no error.
func (c *Child) Kill() error { return c.signal(syscall.SIGKILL, exited) }

// Terminate asks the process and all that it started to end (SIGTERM), and does not wait.
func (c *Child) Terminate() error { return c.signal(syscall.SIGTERM, running) }

// signal sends sig to the process group and returns when the process is in the phase that follows from it.
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
