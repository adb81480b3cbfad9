package replica

import (
	"testing"

	"github.com/hashicorp/raft"
)

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

// The cache returns the entries of the log, and keeps no more than its limits.
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
