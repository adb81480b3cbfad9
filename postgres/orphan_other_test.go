//go:build !linux

package postgres_test

import "syscall"

// dieWithParent has no effect: only Linux has Pdeathsig.
func dieWithParent(*syscall.SysProcAttr) {}
