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

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/deep"
)

// A server through which much has gone, and that holds nothing any more, is small again: on disk and in memory.
func TestEmptiedServerIsSmall(t *testing.T) {
	t.Parallel()
	acquires := 20_000 // 80 MB
	if deep.Wanted() {
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
			answers[i] = x.send(like(session, fmt.Sprint(i), func(a *lockpb.Acquire) { a.Metadata = map[string]string{"k": text} }))
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
	eventually(t, "the log is short again", func() bool { return s.node.stores.sizes.bytes() <= compactBytes })
	eventually(t, "its files are gone", func() bool { return sizeOfDir(t, config.DataDir) <= most })
	debug.FreeOSMemory()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	t.Logf("after %d acquires of 3.9 KB, all released: %d MB on disk, %d MB of log; %d MB of heap in use, %d MB resident",
		acquires, sizeOfDir(t, config.DataDir)>>20, s.node.stores.sizes.bytes()>>20, memory.HeapInuse>>20, resident(t)>>20)
	if deep.Wanted() && resident(t) > 300<<20 {
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

// resident is the memory of this process, in bytes; zero where that is not known.
func resident(t *testing.T) (n int64) {
	t.Helper()
	text, _ := os.ReadFile("/proc/self/statm")
	var all, pages int64
	_, _ = fmt.Sscan(string(text), &all, &pages)
	return pages * int64(os.Getpagesize())
}

func TestLogSizes(t *testing.T) {
	t.Parallel()
	s := newLogSizes()
	for i := range uint64(200) {
		s.add(&raft.Log{Index: 10 + i, Data: make([]byte, 100)})
	}
	want := func(bytes int, recent uint64) {
		t.Helper()
		if s.bytes() != bytes || s.recent(10_000) != recent {
			t.Errorf("%d bytes, %d recent entries; want %d and %d", s.bytes(), s.recent(10_000), bytes, recent)
		}
	}
	want(20_000, 100)
	s.remove(1, 59)
	want(15_000, 100)
	s.remove(150, 400)
	want(9_000, 90)
	s.add(&raft.Log{Index: 150, Data: make([]byte, 1<<20)})
	want(9_000+1<<20, leastTrailing)
	s.add(&raft.Log{Index: 1000, Data: make([]byte, 7)}) // after a snapshot of the leader
	want(7, 1)
}

// The cache gives what the log has, and keeps no more than it may.
func TestLogCache(t *testing.T) {
	t.Parallel()
	c := &logCache{LogStore: raft.NewInmemStore()}
	store := func(index uint64, size int) {
		t.Helper()
		if err := c.StoreLog(&raft.Log{Index: index, Data: make([]byte, size)}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range uint64(100) {
		store(1+i, 1<<20)
	}
	if len(c.entries) != cachedBytes>>20 || c.bytes != cachedBytes {
		t.Errorf("%d entries of 1 MiB are kept, %d bytes", len(c.entries), c.bytes)
	}
	for i := range uint64(2 * cachedEntries) {
		store(101+i, 10)
	}
	if len(c.entries) != cachedEntries || c.bytes != 10*cachedEntries {
		t.Errorf("%d small entries are kept, %d bytes", len(c.entries), c.bytes)
	}
	if err := c.DeleteRange(1000, 101+2*cachedEntries-1); err != nil {
		t.Fatal(err)
	}
	store(1000, 20)
	for index, size := range map[uint64]int{1: 1 << 20, 999: 10, 1000: 20} {
		var got raft.Log
		if err := c.GetLog(index, &got); err != nil || got.Index != index || len(got.Data) != size {
			t.Errorf("entry %d: %d bytes, %v", got.Index, len(got.Data), err)
		}
	}
	if err := c.GetLog(1001, &raft.Log{}); err == nil {
		t.Error("an entry that was deleted is there")
	}
}
