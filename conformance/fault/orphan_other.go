//go:build unix && !linux

package fault

import "syscall"

// dieWithParent has no effect: only Linux offers it.
func dieWithParent(*syscall.SysProcAttr) {}
