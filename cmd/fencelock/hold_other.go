//go:build !unix

package main

import "runtime"

// hold refuses: without process groups the command could outlive its lock.
func (s *runSettings) hold() int {
	say("run needs process groups to end a command after its lock is lost, and %s has none", runtime.GOOS)
	return exitUnavailable
}

// elect refuses for the same reason.
func (s *electSettings) elect() int { return s.hold() }
