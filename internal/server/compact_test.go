package server

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/race"
	"github.com/fencelock/fencelock/internal/testtier"
)

// A server that has handled much and holds nothing becomes small again: on disk and in memory. The test is not parallel,
// since it measures the memory of the process.
func TestEmptiedServerIsSmall(t *testing.T) {
	acquires := 20_000 // 80 MB
	if testtier.Wanted() {
		acquires = 170_000
	}
	config := Config{DataDir: t.TempDir()}
	s := alone(t, config)
	x := attach(t, s)
	session := x.open(time.Minute)
	text := strings.Repeat("x", 3900)
	const window = 1000
	for done := 0; done < acquires; done += window {
		answers := make([]<-chan *lockpb.Reply, window)
		for i := range answers {
			answers[i] = x.send(like(session, fmt.Sprint(i),
				func(a *lockpb.Acquire) { a.Metadata = map[string]string{"k": text} }))
		}
		for i, answer := range answers {
			g := (<-answer).GetAcquired().GetGrants()
			if len(g) != 1 {
				t.Fatal("refused")
			}
			answers[i] = x.send(releaseOf(session, g[0].Name, g[0].RequestId, g[0].Token))
		}
		for _, answer := range answers {
			<-answer
		}
	}
	most := int64(128 << 20)
	eventually(t, "the log is short again", func() bool { return s.replica.Status().LogBytes <= 48<<20 })
	eventually(t, "its files are gone", func() bool { return sizeOfDir(t, config.DataDir) <= most })
	debug.FreeOSMemory()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	t.Logf("after %d acquires of 3.9 KB, all released: %d MB on disk, %d MB of log; %d MB of heap in use, %d MB resident",
		acquires, sizeOfDir(t, config.DataDir)>>20, s.replica.Status().LogBytes>>20,
		memory.HeapInuse>>20, resident(t)>>20)
	switch { // the race detector needs several bytes for each byte in use
	case race.Enabled && memory.HeapInuse > 300<<20:
		t.Errorf("%d MB of heap are in use", memory.HeapInuse>>20)
	case testtier.Wanted() && !race.Enabled && resident(t) > 300<<20:
		t.Errorf("%d MB are resident", resident(t)>>20)
	}
}

func sizeOfDir(t *testing.T, dir string) (n int64) {
	t.Helper()
	_ = filepath.WalkDir(dir, func(_ string, f fs.DirEntry, err error) error {
		if err == nil && !f.IsDir() {
			if info, err := f.Info(); err == nil { // it may go meanwhile
				n += info.Size()
			}
		}
		return nil
	})
	return n
}

// resident returns the resident memory of this process, in bytes; zero if the system does not report it.
func resident(t *testing.T) (n int64) {
	t.Helper()
	text, _ := os.ReadFile("/proc/self/statm")
	var all, pages int64
	_, _ = fmt.Sscan(string(text), &all, &pages)
	return pages * int64(os.Getpagesize())
}
