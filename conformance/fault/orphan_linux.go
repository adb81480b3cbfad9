package fault

import "syscall"

// dieWithParent has the kernel kill the child when the parent dies, however that happens. A child that is paused cannot
// notice it by itself.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
