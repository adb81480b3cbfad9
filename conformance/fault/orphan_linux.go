package fault

import "syscall"

// dieWithParent makes the kernel kill the child when the parent dies, in any way. A paused child cannot exit by
// itself.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
