//go:build unix && !linux

package main

import "syscall"

// dieWithUs does nothing: this system has no means to bind a child's life to ours.
func dieWithUs(*syscall.SysProcAttr) {}

// adoptOrphans does nothing: orphans are init's here.
func adoptOrphans() {}
