//go:build unix && !linux

package proctree

import (
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// subreapers: the tree is the process group of the command, since orphans become children of init here.
const subreapers = false

const waitAll = 0

func becomeReaper() {}

// dieWithParent does nothing: this system has no means to bind a child's life to its parent's.
func dieWithParent(*syscall.SysProcAttr) {}

func rename(string) {}

func self() (string, error) { return os.Executable() }

// now returns the present instant of the monotonic clock.
func now() (Instant, error) {
	var ts unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return Instant(ts.Nano()), os.NewSyscallError("clock_gettime", err)
}

// process is a process that descends from the guardian. This system has no list of them.
type process struct {
	Process
	group int
}

func descendants(int, map[int]bool) []process { return nil }

// Alone reports whether this process is the only one of a process group. This system does not report it.
func Alone(int) bool { return true }

func children() []int { return nil }

func hasChildren() bool { return false }

func named([]process) []Process { return nil }

func sendTo(process, syscall.Signal) {}

// pending reports whether a signal that was sent to a process waits for it. This system does not report it.
func pending(int, syscall.Signal) bool { return false }

// cage is a cgroup, which this system does not have.
type cage struct{}

func newCage(int, *syscall.SysProcAttr) *cage { return nil }
func cageOf(int) *cage                        { return nil }
func (*cage) kill()                           {}
func (*cage) remove(*syscall.SysProcAttr)     {}

// alarm rings at an instant, or a little earlier or later if the machine was suspended.
type alarm struct{ timer *time.Timer }

func newAlarm() (*alarm, error) { return &alarm{time.NewTimer(0)}, nil }

// maxNap bounds the sleep: the timers of Go stand still in a suspended machine.
const maxNap = 250 * time.Millisecond

func (a *alarm) set(at Instant) { a.timer.Reset(min(time.Duration(at-Now()), maxNap)) }

func (a *alarm) rung() <-chan time.Time { return a.timer.C }
