package main

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// dieWithUs has the kernel kill the command when we die, however that happens: nobody would end it when the lock does.
func dieWithUs(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }

// adoptOrphans makes what the command leaves behind ours to reap. Otherwise a group of which nothing but zombies is
// left looks alive for as long as init takes, and in containers init often takes for ever.
func adoptOrphans() {
	// Before Linux 3.4 it fails, and orphans are init's as everywhere else.
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}
