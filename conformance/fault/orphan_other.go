//go:build unix && !linux

package fault

import "syscall"

// dieWithParent does nothing: only Linux offers it.
func dieWithParent(*syscall.SysProcAttr) {}
