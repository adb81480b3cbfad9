//go:build unix

package stallmeter

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// asWatched makes the test binary a process that holds a window open until its standard input ends, and prints the time
// that the window lost.
const asWatched = "FENCELOCK_TEST_STALL_WATCHED"

func TestMain(m *testing.M) {
	if os.Getenv(asWatched) != "" {
		w := Begin()
		fmt.Println("open")
		_, _ = os.Stdin.Read(make([]byte, 1))
		fmt.Println(int64(w.End().Longest))
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

const frozen = 400 * time.Millisecond

// freeze stops a process for a while.
func freeze(t *testing.T, p *os.Process) {
	t.Helper()
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(frozen)
	if err := p.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
}

// childBeats waits until the child of the running meter beats.
func childBeats(t *testing.T, m *meter) *os.Process {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(Step) {
		m.mu.Lock()
		r := m.running
		beats := !r.probes[1].IsZero()
		m.mu.Unlock()
		if beats {
			return r.child.Process
		}
	}
	t.Fatal("the child does not beat")
	return nil
}

func TestAChildThatIsStoppedIsAStall(t *testing.T) {
	w := Begin()
	defer w.End()
	child := childBeats(t, &shared)
	before := Begin()
	freeze(t, child)
	after := Begin()
	if lost := before.End(); lost.Longest < frozen/2 || lost.Total < lost.Longest {
		t.Errorf("the window in which the child stood still for %v lost %v", frozen, lost)
	}
	if lost := before.End(); lost.Longest < frozen/2 {
		t.Errorf("the second End says %v", lost)
	}
	// What went on before a window began is not its own.
	if lost := after.End(); lost.Longest > frozen/2 {
		t.Errorf("a window that began after the stall lost %v", lost)
	}
}

func TestStallInProgressCounts(t *testing.T) {
	w := Begin()
	child := childBeats(t, &shared)
	if err := child.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(frozen)
	if lost := w.End(); lost.Longest < frozen/2 { // ends the child, too
		t.Errorf("the window lost %v while the child stood still", lost)
	}
}

func TestAProcessThatIsStoppedHasStalled(t *testing.T) {
	p := exec.Command(os.Args[0])
	p.Env = append(os.Environ(), asWatched+"=1")
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fscanln(out, new(string)); err != nil {
		t.Fatal(err)
	}
	freeze(t, p.Process)
	in.Close()
	var lost int64
	if _, err := fmt.Fscanln(out, &lost); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		t.Fatal(err)
	}
	if d := time.Duration(lost); d < frozen/2 {
		t.Errorf("a process that was stopped for %v says that it lost %v", frozen, d)
	}
}

func TestThreadsThatWaitForAProcessorAreAStall(t *testing.T) {
	if runtime.GOOS != "linux" {
		return // nobody counts
	}
	threads := 6 * runtime.NumCPU()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(threads))
	w := Begin()
	var all sync.WaitGroup
	for range threads {
		all.Go(func() {
			for end := time.Now().Add(frozen); time.Now().Before(end); {
			}
		})
	}
	all.Wait()
	if lost := w.End(); lost.Total < frozen/4 {
		t.Errorf("%d busy threads on %d processors lost %v in %v", threads, runtime.NumCPU(), lost, frozen)
	}
}

// A machine that is busy with other things may stall in any one window, but not in each of many.
func TestQuietIsNoStall(t *testing.T) {
	least := time.Hour
	for range 200 {
		w := Begin()
		time.Sleep(4 * Step)
		if least = min(least, w.End().Total); least < 2*Step { // half of the window
			return
		}
	}
	t.Errorf("each of 200 windows lost %v and more", least)
}

func TestMatters(t *testing.T) {
	const slack, took = 100 * time.Millisecond, 10 * time.Second
	for _, c := range []struct {
		lost Lost
		want bool
	}{
		{Lost{}, false},
		{Lost{Longest: slack, Total: took / 20}, false},
		{Lost{Longest: slack + 1, Total: slack + 1}, true},
		{Lost{Longest: Step, Total: took/10 + 1}, true},
		{Lost{Longest: Step, Total: slack + 1}, false},
	} {
		if got := c.lost.Matters(slack, took); got != c.want {
			t.Errorf("%v of %v matters: %v, want %v", c.lost, took, got, c.want)
		}
	}
}
