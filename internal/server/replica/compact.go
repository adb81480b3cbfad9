package replica

// The size of the log: when it exceeds a number of bytes, the member makes a snapshot and truncates the log. A bounded
// number of its last entries stay in memory, for followers that are a little behind.

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/notify"
)

const (
	// compactBytes is the size of the log at which the member makes a snapshot, even with fewer than snapshotEntries
	// entries. If the last snapshot is larger, its size counts instead. Afterwards trailingBytes of the log, and at least
	// leastTrailing entries, stay for members that are behind.
	compactBytes  = 48 << 20
	trailingBytes = 16 << 20
	leastTrailing = 64
	// segmentBytes is the size of a file of the log. Only whole files are deleted.
	segmentBytes = 16 << 20
	// cachedEntries and cachedBytes bound the part of the log in memory, for followers that are a little behind.
	cachedEntries = 512
	cachedBytes   = 8 << 20
)

// logSizes records the sizes of the entries of the log.
type logSizes struct {
	mu    sync.Mutex
	first uint64 // the index of the first entry
	sizes []int  // of the entries from first on
	total int
	grown notify.Signal // notified when the log is larger than compactBytes
}

func newLogSizes() *logSizes { return &logSizes{grown: notify.New()} }

// add records an entry. An entry that does not follow the last entry begins a new log.
func (s *logSizes) add(l *raft.Log) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.Index != s.first+uint64(len(s.sizes)) {
		s.first, s.sizes, s.total = l.Index, nil, 0
	}
	size := len(l.Data) + len(l.Extensions)
	s.sizes = append(s.sizes, size)
	if s.total += size; s.total > compactBytes {
		s.grown.Notify()
	}
}

// remove removes the entries from first to last, which are at the beginning or at the end of the log.
func (s *logSizes) remove(first, last uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := s.first + uint64(len(s.sizes))
	switch {
	case last < s.first || first >= end:
		return
	case first <= s.first:
		n := min(last+1, end) - s.first
		s.first, s.sizes = s.first+n, slices.Clone(s.sizes[n:])
	default:
		s.sizes = s.sizes[:first-s.first]
	}
	s.total = 0
	for _, size := range s.sizes {
		s.total += size
	}
}

// bytes returns the size of the log.
func (s *logSizes) bytes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}

// recent returns the number of last entries that fit into bytes, but at least leastTrailing if there are so many.
func (s *logSizes) recent(bytes int) (n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, size := range slices.Backward(s.sizes) {
		if bytes -= size; bytes < 0 && n >= leastTrailing {
			break
		}
		n++
	}
	return n
}

// compact makes a snapshot when the log exceeds compactBytes, until ctx ends: raft counts only entries, and an entry
// can have a hundred bytes or a million. It also makes a snapshot when the feature level is raised. So a version that
// does not support the level refuses the data when it starts, not when it reaches the entry in the log.
func (r *Replica) compact(ctx context.Context) {
	sizes, trailing := r.stores.sizes, r.raft.ReloadableConfig().TrailingLogs
	for {
		select {
		case <-sizes.grown:
		case <-r.State.raised:
			if err := r.Snapshot(); err != nil && !errors.Is(err, raft.ErrNothingNewToSnapshot) && ctx.Err() == nil {
				r.config.Log.Warn("no snapshot at the new feature level", "error", err)
			}
			continue
		case <-ctx.Done():
			return
		}
		if sizes.bytes() <= max(compactBytes, r.stores.snapshotSize()) {
			continue
		}
		config := r.raft.ReloadableConfig()
		config.TrailingLogs = min(trailing, sizes.recent(trailingBytes))
		err := r.raft.ReloadConfig(config)
		if err == nil {
			err = r.Snapshot()
		}
		if err != nil && !errors.Is(err, raft.ErrNothingNewToSnapshot) && ctx.Err() == nil {
			r.config.Log.Warn("the log could not be truncated", "bytes", sizes.bytes(), "error", err)
		}
	}
}

// snapshotSize returns the size of the last snapshot, in bytes.
func (s *stores) snapshotSize() int {
	all, err := s.snapshots.List()
	if err != nil || len(all) == 0 {
		return 0
	}
	return int(all[0].Size)
}

// logCache keeps the last entries of the log in memory, up to cachedEntries and cachedBytes.
type logCache struct {
	raft.LogStore

	mu      sync.Mutex
	entries []*raft.Log // with consecutive indexes
	bytes   int
}

// GetLog implements raft.LogStore.
func (c *logCache) GetLog(index uint64, entry *raft.Log) error {
	c.mu.Lock()
	if n := len(c.entries); n > 0 && index >= c.entries[0].Index && index <= c.entries[n-1].Index {
		*entry = *c.entries[index-c.entries[0].Index]
		c.mu.Unlock()
		return nil
	}
	c.mu.Unlock()
	return c.LogStore.GetLog(index, entry)
}

// StoreLog implements raft.LogStore.
func (c *logCache) StoreLog(entry *raft.Log) error { return c.StoreLogs([]*raft.Log{entry}) }

// StoreLogs implements raft.LogStore.
func (c *logCache) StoreLogs(entries []*raft.Log) error {
	if err := c.LogStore.StoreLogs(entries); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, x := range entries {
		if n := len(c.entries); n > 0 && x.Index != c.entries[n-1].Index+1 {
			c.forget(n)
		}
		c.entries = append(c.entries, x)
		c.bytes += len(x.Data)
	}
	over := 0
	for left := c.bytes; over < len(c.entries) && (left > cachedBytes || len(c.entries)-over > cachedEntries); over++ {
		left -= len(c.entries[over].Data)
	}
	c.forget(over)
	return nil
}

// forget drops the first n entries. The caller holds c.mu.
func (c *logCache) forget(n int) {
	for _, x := range c.entries[:n] {
		c.bytes -= len(x.Data)
	}
	clear(c.entries[:n])
	c.entries = c.entries[n:]
}

// DeleteRange implements raft.LogStore.
func (c *logCache) DeleteRange(first, last uint64) error {
	c.mu.Lock()
	c.forget(len(c.entries))
	c.mu.Unlock()
	return c.LogStore.DeleteRange(first, last)
}

// IsMonotonic reports whether the store refuses gaps. See watchedLog.
func (c *logCache) IsMonotonic() bool {
	m, ok := c.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}
