//go:build unix && !linux

package fault

import "syscall"

// dieWithParent has no effect: only Linux has Pdeathsig.
func dieWithParent(*syscall.SysProcAttr) {}
