package fault

import "syscall"

// dieWithParent has the kernel kill the child when the parent dies, in any way. A paused child cannot
// notice it.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
