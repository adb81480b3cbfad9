package postgres_test

import "syscall"

// dieWithParent ends the process when the thread that started it ends.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
