package proctree

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// subreapers: the orphans of the tree become children of the guardian.
const subreapers = true

// waitAll also finds children whose end sends no SIGCHLD.
const waitAll = unix.WALL

// becomeReaper makes this process the parent of its descendants' orphans.
func becomeReaper() {
	// Before Linux 3.4 it fails, and orphans become children of init.
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}

// dieWithParent has the kernel kill the command when the guardian dies. The caller kills the rest of the tree; it
// remains if both die together.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }

// rename changes what ps and pkill see, which takes 15 bytes.
func rename(name string) {
	_ = os.WriteFile("/proc/self/comm", []byte(name), 0)
}

// self is this program, even if its file has been replaced.
func self() (string, error) { return "/proc/self/exe", nil }

// now returns the present instant of CLOCK_BOOTTIME.
func now() (Instant, error) {
	var ts unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return Instant(ts.Nano()), os.NewSyscallError("clock_gettime", err)
}

// process is a process that descends from the guardian.
type process struct {
	Process
	parent, group int
	began         string // its start time, which distinguishes it from a later process with its number
}

// descendants returns what descends from the process root, without the children in except and what descends from them.
func descendants(root int, except map[int]bool) []process {
	children := map[int][]process{}
	all, _ := processes()
	for _, p := range all {
		children[p.parent] = append(children[p.parent], p)
	}
	all = nil
	for next := []int{root}; len(next) > 0; {
		parent := next[0]
		next = next[1:]
		for _, p := range children[parent] {
			if parent == root && except[p.PID] {
				continue
			}
			all = append(all, p)
			next = append(next, p.PID)
		}
		delete(children, parent) // a line of parents that changed while it was read may be a ring
	}
	return all
}

// children returns the children of this process.
func children() (pids []int) {
	all, _ := processes()
	for _, p := range all {
		if p.parent == os.Getpid() {
			pids = append(pids, p.PID)
		}
	}
	return pids
}

// hasChildren reports whether this process has a child, which costs less than a look at all processes.
func hasChildren() bool {
	return unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT|unix.WALL, nil) != unix.ECHILD
}

// Alone reports whether this process is the only one of a process group.
func Alone(group int) bool {
	all, ok := processes()
	for _, p := range all {
		ok = ok && (p.group != group || p.PID == os.Getpid())
	}
	return ok
}

// processes returns those of the machine, or of the container. It reads /proc once: processes forked meanwhile may be
// missing.
func processes() (all []process, ok bool) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, false
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1) // what could be read counts
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			if p, ok := look(pid); ok {
				all = append(all, p)
			}
		}
	}
	return all, err == nil
}

// look reads the status of a process.
func look(pid int) (process, bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}, false
	}
	// The name may have spaces and parentheses in it.
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 0 || end < open {
		return process{}, false
	}
	fields := bytes.Fields(stat[end+1:]) // state, parent, group, …; the begin is field 22 of all
	if len(fields) < 20 {
		return process{}, false
	}
	p := process{Process: Process{PID: pid, Name: string(stat[open+1 : end])}, began: string(fields[19])}
	p.parent, _ = strconv.Atoi(string(fields[1]))
	p.group, _ = strconv.Atoi(string(fields[2]))
	return p, true
}

// named returns what to tell of processes.
func named(all []process) []Process {
	out := make([]Process, 0, min(len(all), maxTold))
	for _, p := range all[:min(len(all), maxTold)] {
		out = append(out, p.Process)
	}
	slices.SortFunc(out, func(a, b Process) int { return a.PID - b.PID })
	return out
}

// maxTold bounds the processes in an event.
const maxTold = 16

// sendTo sends a signal to p, and never to a later process with its number.
func sendTo(p process, sig syscall.Signal) {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err != nil {
		if err == unix.ENOSYS || err == unix.EPERM || err == unix.EINVAL { // an old kernel, or a sandbox
			_ = syscall.Kill(p.PID, sig)
		}
		return
	}
	defer func() { _ = unix.Close(fd) }()
	if now, ok := look(p.PID); ok && now.began == p.began {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0)
	}
}

// pending reports whether a signal that was sent to a process waits for it.
func pending(pid int, sig syscall.Signal) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	for line := range bytes.Lines(status) {
		if mask, found := bytes.CutPrefix(line, []byte("ShdPnd:")); found {
			signals, err := strconv.ParseUint(string(bytes.TrimSpace(mask)), 16, 64)
			return err == nil && signals&(1<<(sig-1)) != 0
		}
	}
	return false
}

// alarm rings at an instant of CLOCK_BOOTTIME, even if the machine was suspended.
type alarm struct {
	timer *os.File
	ring  chan struct{}
}

func newAlarm() (*alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_BOOTTIME, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	a := &alarm{os.NewFile(uintptr(fd), "alarm"), make(chan struct{}, 1)}
	go func() {
		for text := make([]byte, 8); ; {
			if _, err := a.timer.Read(text); err != nil {
				return
			}
			select {
			case a.ring <- struct{}{}:
			default:
			}
		}
	}()
	return a, nil
}

// set moves the alarm to an instant; zero turns it off.
func (a *alarm) set(at Instant) {
	raw, err := a.timer.SyscallConn()
	if err != nil {
		return
	}
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(at))}
	_ = raw.Control(func(fd uintptr) { _ = unix.TimerfdSettime(int(fd), unix.TFD_TIMER_ABSTIME, &spec, nil) })
}

func (a *alarm) rung() <-chan struct{} { return a.ring }
