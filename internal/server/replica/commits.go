package replica

// The known end of the committed log: most members have it, and clients may have its acknowledgements. Raft never
// deletes committed entries. If a leader asks for that, there are two histories of the cluster, because a member forgot
// its acknowledgements: its disk went back in time, or its data was copied. The member that detects this stops, and
// keeps its data.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"
)

const (
	commitFile = "commit-mark"
	commitSize = 12
)

// commitMark is a file with an index and its checksum. It is written without an fsync: it may be behind the committed
// index, never ahead.
type commitMark struct {
	index atomic.Uint64

	mu      sync.Mutex
	f       *os.File // nil: no data directory
	written uint64
}

func openCommitMark(dir string) (*commitMark, error) {
	path := filepath.Join(dir, commitFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		text = commitText(0)
		err = writeFile(path, text)
	}
	if err != nil {
		return nil, err
	}
	if len(text) != commitSize || crc32.Checksum(text[:8], castagnoli) != binary.BigEndian.Uint32(text[8:]) {
		return nil, &CorruptError{File: path, Why: "its checksum is wrong"}
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	m := &commitMark{f: f, written: binary.BigEndian.Uint64(text)}
	m.index.Store(m.written)
	return m, nil
}

func commitText(index uint64) []byte {
	text := binary.BigEndian.AppendUint64(nil, index)
	return binary.BigEndian.AppendUint32(text, crc32.Checksum(text, castagnoli))
}

// raise records that index is committed. Only one goroutine at a time may call it.
func (m *commitMark) raise(index uint64) {
	if index > m.index.Load() {
		m.index.Store(index)
	}
}

// write writes the mark to its file, if there is one.
func (m *commitMark) write() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	index := m.index.Load()
	if m.f == nil || index == m.written {
		return nil
	}
	_, err := m.f.WriteAt(commitText(index), 0)
	if err == nil {
		m.written = index
	}
	return err
}

// Close implements io.Closer.
func (m *commitMark) Close() error { return errors.Join(m.write(), m.f.Close()) }

// twoHistories returns the error for an attempt to delete entries from index on, or to replace them with a snapshot.
func (m *commitMark) twoHistories(file string, index uint64) error {
	return &CorruptError{File: file, Index: index, Why: fmt.Sprintf(
		"the log up to %d was acknowledged, and the leader has another one: %s", m.index.Load(), adviceOnHistories)}
}

const adviceOnHistories = "there are two histories of the cluster. A member has lost entries that it acknowledged: its " +
	"disk is older than it was, or a copy. Stop all members, keep this directory, and see Two histories in docs/SERVER.md"

// commitEvery is the interval at which the mark is written.
const commitEvery = 200 * time.Millisecond

// keepCommits writes the commit mark, and the known indexes of the other members, until ctx ends.
func (r *Replica) keepCommits(ctx context.Context) {
	tick := time.NewTicker(commitEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			_ = r.stores.checked.keepCommits() // on an error the member stops itself
			r.noteKnown()
			if err := r.stores.known.write(r.servers()); err != nil {
				r.config.Log.Debug("what others have acknowledged could not be kept", "error", err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// keepCommits writes the commit mark, if there is a log on disk.
func (l *checkedLog) keepCommits() error {
	if l == nil {
		return nil
	}
	return l.disk.write("how far the log was acknowledged", l.commits.write)
}
