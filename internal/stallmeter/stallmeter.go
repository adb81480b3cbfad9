// Package stallmeter measures for how long the machine did not let this process, or a process beside it, run when it should
// have. Tests with a verdict that rests on time ask it before they blame the tested code. It has four probes:
//
//   - A goroutine, and a child process, should wake every few milliseconds. Their delay is lost to the test,
//     too.
//   - On Linux the kernel counts for how long the threads of this process were ready to run and got no processor. This
//     shows a machine that wakes threads immediately and lets them wait for a processor.
//   - On Linux the kernel counts for how long the host took the processors away, and for how long everything waited for a
//     disk. This shows a machine on which the servers beside this process stand still.
//
// The child is the program itself: package initialisation turns it into one. Where it cannot be started the others
// measure alone.
package stallmeter

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"time"
)

const (
	// Step is the time between two wake-ups of both.
	Step = 5 * time.Millisecond
	// noise is the delay of a quiet machine's timers: not counted.
	noise = Step
)

// Lost is the time that a window lost: the largest of the probes' results.
type Lost struct {
	Longest time.Duration // in one piece
	Total   time.Duration // all pieces together
}

// String returns for example "1.2s, 300ms of it at once".
func (l Lost) String() string {
	return fmt.Sprintf("%v, %v of it at once", l.Total.Round(time.Millisecond), l.Longest.Round(time.Millisecond))
}

// Matters reports whether the lost part of a time that took so long may explain a delay in it: more than
// slack at once, or more than slack and a tenth of all. A quiet machine loses a hundredth.
func (l Lost) Matters(slack, took time.Duration) bool {
	return l.Longest > slack || l.Total > max(slack, took/10)
}

// little reports whether a busy machine loses this much all the time: not more than slack at once, and not
// more than a third of all.
func (l Lost) little(slack, took time.Duration) bool { return l.Longest <= slack && l.Total <= took/3 }

// Window is a time in which stalls count. It must be ended.
type Window struct {
	m     *meter
	begin time.Time
	since counts // at the beginning

	// Protected by m.mu.
	open bool
	lost [2]Lost // by the goroutine's beats, by the child's
	sum  Lost    // valid after the end
}

// shared is the meter of the process. It runs while there is a window.
var shared meter

// Begin opens a window. It must not be called under testing/synctest, where time does not stall.
func Begin() *Window { return shared.begin() }

// End closes the window and returns its lost time. Further calls return the same.
func (w *Window) End() Lost {
	end := count()
	m := w.m
	m.mu.Lock()
	if !w.open {
		defer m.mu.Unlock()
		return w.sum
	}
	now := time.Now()
	w.open = false
	delete(m.windows, w)
	for i, p := range m.running.probes {
		if !p.IsZero() { // what goes on now
			w.note(i, p, now)
		}
	}
	w.sum = Lost{
		Longest: max(w.lost[0].Longest, w.lost[1].Longest),
		Total:   max(w.lost[0].Total, w.lost[1].Total, end.waited-w.since.waited, end.stood-w.since.stood),
	}
	var last *run
	if len(m.windows) == 0 {
		last, m.running = m.running, nil
	}
	m.mu.Unlock()
	if last != nil {
		last.stop()
	}
	return w.sum
}

// note adds the time that a probe lost between two of its beats.
func (w *Window) note(probe int, last, now time.Time) {
	if last.Before(w.begin) {
		last = w.begin
	}
	if late := now.Sub(last) - Step; late > noise {
		l := &w.lost[probe]
		l.Longest = max(l.Longest, late)
		l.Total += late
	}
}

// counts are the kernel's counts.
type counts struct {
	waited time.Duration // by the threads of this process, for a processor
	stood  time.Duration // by the whole machine
}

func count() counts { return counts{waited(), stood()} }

type meter struct {
	mu      sync.Mutex // protects the following fields, and the fields of windows and runs
	windows map[*Window]struct{}
	running *run // nil while there is no window
}

// run is a goroutine and a child that beat.
type run struct {
	m      *meter
	probes [2]time.Time // the last beats; zero: does not beat
	done   chan struct{}
	child  *exec.Cmd // nil: cannot be started
	all    sync.WaitGroup
}

func (m *meter) begin() *Window {
	since := count()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.running == nil {
		m.windows = map[*Window]struct{}{}
		m.running = start(m)
	}
	w := &Window{m: m, begin: time.Now(), since: since, open: true}
	m.windows[w] = struct{}{}
	return w
}

func start(m *meter) *run {
	r := &run{m: m, done: make(chan struct{})}
	r.probes[0] = time.Now()
	r.all.Go(func() {
		next := time.NewTimer(Step)
		defer next.Stop()
		for {
			select {
			case <-next.C:
				r.beat(0)
				next.Reset(Step)
			case <-r.done:
				return
			}
		}
	})
	r.startChild()
	return r
}

func (r *run) stop() {
	close(r.done)
	if r.child != nil {
		_ = r.child.Process.Kill()
	}
	r.all.Wait()
}

// beat notes that a probe was awake just now.
func (r *run) beat(i int) {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	now := time.Now()
	if r.m.running == r && !r.probes[i].IsZero() {
		for w := range r.m.windows {
			w.note(i, r.probes[i], now)
		}
	}
	r.probes[i] = now
}

// childEnv makes the process a child, which writes a byte every Step until the reader closes.
const childEnv = "FENCELOCK_STALL_CHILD"

func init() {
	if os.Getenv(childEnv) == "" {
		return
	}
	for {
		if _, err := os.Stdout.Write([]byte{'.'}); err != nil {
			os.Exit(0)
		}
		time.Sleep(Step)
	}
}

func (r *run) startChild() {
	self, err := os.Executable()
	if err != nil {
		return
	}
	child := exec.Command(self)
	child.Env = []string{childEnv + "=1", "GOMAXPROCS=1"}
	out, err := child.StdoutPipe()
	if err != nil || child.Start() != nil {
		return
	}
	r.child = child
	r.all.Go(func() {
		// The first beat is late by the start of a process, and does not count.
		for in := bufio.NewReader(out); ; r.beat(1) {
			if _, err := in.ReadByte(); err != nil {
				break
			}
		}
		r.m.mu.Lock()
		r.probes[1] = time.Time{}
		r.m.mu.Unlock()
		_ = child.Wait()
	})
}
