package replica

// Damage of the log is noticed here: each entry has a checksum, and a mark says how far the log goes. Snapshots are
// checked in snapshots.go; disk.go handles writes that the disk refuses.
//
// The member that stores an entry first makes its checksum. A member checks it when it stores the entry, when it
// reads it, and before it carries it out. The log below trusts the lengths that it reads, and takes a truncated end
// for an unwritten one.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/hashicorp/raft"
)

// CorruptError is the reason why a server does not start, or stopped: its data differs from the written data. Give the
// member an empty data directory and it gets everything from the others; without others see the documentation.
type CorruptError struct {
	File  string // in which the damage is, or the directory
	Index uint64 // of the log entry; zero if the damage is elsewhere
	Why   string
}

func (e *CorruptError) Error() string {
	if e.Index == 0 {
		return fmt.Sprintf("the data is damaged: %s: %s", e.File, e.Why)
	}
	return fmt.Sprintf("the data is damaged: %s: log entry %d: %s", e.File, e.Index, e.Why)
}

// sumVersion is the first byte of an entry's extension; four bytes of its checksum come next.
const sumVersion = 1

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sumOf returns the checksum for the extensions of an entry: these go with it to the other members and to their
// disks, and members that know no checksums keep them as they are.
func sumOf(l *raft.Log) []byte {
	var head [17]byte
	binary.BigEndian.PutUint64(head[:], l.Index)
	binary.BigEndian.PutUint64(head[8:], l.Term)
	head[16] = byte(l.Type)
	sum := crc32.Update(crc32.Checksum(head[:], castagnoli), castagnoli, l.Data)
	return binary.BigEndian.AppendUint32([]byte{sumVersion}, sum)
}

// intact reports whether an entry is as it was when its checksum was made. The caller decides about an entry without
// a checksum.
func intact(l *raft.Log) bool {
	return len(l.Extensions) == 0 || slices.Equal(l.Extensions, sumOf(l))
}

// checkedLog gives entries a checksum when they are stored for the first time, and checks it on every read: the log
// below does not. It records the end of the log, so that a missing acknowledged end differs from an end that was
// never written whole.
type checkedLog struct {
	raft.LogStore
	path    string // where the entries are
	silence *silence
	disk    *disk
	mark    *logMark // nil: no data directory
	commits *commitMark
	sizes   *logSizes

	members      []raft.Server // of the last configuration that check has read
	membersIndex uint64
}

func (l *checkedLog) StoreLog(entry *raft.Log) error { return l.StoreLogs([]*raft.Log{entry}) }

// StoreLogs refuses an entry that arrived damaged, before it is on the disk. The mark is raised after the entries are
// written: otherwise a crash in between would look like damage.
func (l *checkedLog) StoreLogs(entries []*raft.Log) error {
	for _, x := range entries {
		if !intact(x) {
			return fmt.Errorf("log entry %d arrived damaged", x.Index)
		}
		if len(x.Extensions) == 0 { // it is made here, or comes from a member that makes no checksums
			x.Extensions = sumOf(x)
		}
	}
	if err := l.LogStore.StoreLogs(entries); err != nil {
		return err
	}
	for _, x := range entries {
		l.sizes.add(x)
	}
	if l.mark == nil || len(entries) == 0 {
		return nil
	}
	return l.disk.write("how far the log goes", func() error { return l.mark.raise(entries[len(entries)-1].Index) })
}

// DeleteRange refuses to remove committed entries from the end of the log: the member stops. It lowers the mark
// before it removes an end: otherwise a crash in between would look like missing entries.
func (l *checkedLog) DeleteRange(first, last uint64) error {
	if l.mark != nil {
		begin, err := l.FirstIndex()
		if err != nil {
			return err
		}
		end := uint64(0)
		if first > begin {
			end = first - 1
		}
		if end != 0 && first <= l.commits.index.Load() {
			l.silence.damaged.Store(true)
			return l.disk.condemn(l.commits.twoHistories(l.file(first), first))
		}
		if err := l.disk.write("how far the log goes", func() error { return l.mark.lower(last, end) }); err != nil {
			return err
		}
	}
	if err := l.LogStore.DeleteRange(first, last); err != nil {
		return err
	}
	l.sizes.remove(first, last)
	return nil
}

// GetLog never returns a damaged entry as if it were whole. Raft ends the program if an entry cannot be read. So it
// gets an entry that the state machine refuses, and the member stops: from then on it neither sends nor writes.
func (l *checkedLog) GetLog(index uint64, entry *raft.Log) error {
	err := l.read(index, entry)
	damage := (*CorruptError)(nil)
	if !errors.As(err, &damage) {
		return err
	}
	l.silence.damaged.Store(true)
	_ = l.disk.condemn(damage) // it is damage
	*entry = raft.Log{Index: index, Type: raft.LogCommand, Extensions: []byte{0}}
	return nil
}

// read is GetLog with a *CorruptError for a damaged entry.
func (l *checkedLog) read(index uint64, entry *raft.Log) (err error) {
	corrupt := func(why string) error { return &CorruptError{File: l.file(index), Index: index, Why: why} }
	defer func() {
		if x := recover(); x != nil { // the log below believes the lengths that it reads
			err = corrupt(fmt.Sprint(x))
		}
	}()
	switch err := l.LogStore.GetLog(index, entry); {
	case errors.Is(err, raft.ErrLogNotFound):
		return err
	case err != nil:
		return corrupt(err.Error())
	case entry.Index != index:
		return corrupt(fmt.Sprintf("entry %d is in its place", entry.Index))
	case !intact(entry):
		return corrupt("its checksum is wrong")
	case len(entry.Extensions) == 0 && l.mark != nil && index >= l.mark.since:
		return corrupt("it has no checksum")
	}
	return nil
}

// file returns the file in which an entry should be.
func (l *checkedLog) file(index uint64) string {
	files, _ := os.ReadDir(l.path) // it may be one file
	name := ""
	for _, f := range files {
		var base, id uint64
		if n, _ := fmt.Sscanf(f.Name(), "%020d-%016x.wal", &base, &id); n == 2 && base <= index {
			name = f.Name() // they are in order
		}
	}
	return filepath.Join(l.path, name)
}

// check reads the whole log. It must go as far as the mark says, and follow without a gap on until, the last entry of
// the newest snapshot.
func (l *checkedLog) check(until uint64) error {
	first, err := l.FirstIndex()
	if err != nil {
		return err
	}
	last, err := l.LastIndex()
	if err != nil {
		return err
	}
	if l.mark != nil && last < l.mark.last {
		return &CorruptError{
			File: l.file(last), Index: last + 1, Why: fmt.Sprintf("it is missing; the log went to %d", l.mark.last),
		}
	}
	if committed := l.commits.index.Load(); max(last, until) < committed {
		return &CorruptError{
			File: l.file(last), Index: last + 1,
			Why: fmt.Sprintf("it is missing; the log was acknowledged up to %d", committed),
		}
	}
	if first > until+1 {
		return &CorruptError{
			File: l.path, Why: fmt.Sprintf("the log begins with entry %d, and the snapshots end with %d", first, until),
		}
	}
	var entry raft.Log
	for i := max(first, 1); i <= last; i++ {
		if err := l.read(i, &entry); errors.Is(err, raft.ErrLogNotFound) {
			return &CorruptError{File: l.file(i), Index: i, Why: "it is missing"}
		} else if err != nil {
			return err
		}
		l.sizes.add(&entry)
		if entry.Type == raft.LogConfiguration {
			l.members, l.membersIndex = raft.DecodeConfiguration(entry.Data).Servers, i
		}
	}
	return nil
}

// end returns the last index of the log that was checked, or of the newest snapshot, and the members as of there.
func (l *checkedLog) end(snapshots raft.SnapshotStore, newest uint64) (uint64, []raft.Server, error) {
	last, err := l.LastIndex()
	if err != nil || newest == 0 {
		return last, l.members, err
	}
	all, err := snapshots.List()
	if err == nil && len(all) > 0 && all[0].ConfigurationIndex > l.membersIndex {
		l.members = all[0].Configuration.Servers
	}
	return max(last, newest), l.members, err
}

// IsMonotonic reports whether the store refuses gaps. See watchedLog.
func (l *checkedLog) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// logMark is a file that records the end of the log.
//
// If a log is cut off within its last write, the machine may have stopped before the entry was written whole, and
// then nobody got an answer; or the entry was damaged later. The log below assumes the former. The mark is written
// after the log, without an fsync: it outlives the process immediately, and the machine some seconds later.
type logMark struct {
	f *os.File

	mu    sync.Mutex
	since uint64 // entries from here on have checksums; fixed
	last  uint64 // the log goes to here, or further
}

// markFile is in the data directory: the first entry that has a checksum, the last one, and the checksum of both.
const (
	markFile = "log-mark"
	markSize = 20
)

// openMark opens the mark of a log that ends with last, or makes one for a log without a mark.
func openMark(dir string, last uint64) (*logMark, error) {
	path := filepath.Join(dir, markFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		text = (&logMark{since: last + 1, last: last}).encode()
		err = writeFile(path, text)
	}
	if err != nil {
		return nil, err
	}
	if len(text) != markSize || crc32.Checksum(text[:16], castagnoli) != binary.BigEndian.Uint32(text[16:]) {
		return nil, &CorruptError{File: path, Why: "its checksum is wrong"}
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	return &logMark{f: f, since: binary.BigEndian.Uint64(text), last: binary.BigEndian.Uint64(text[8:])}, nil
}

func (m *logMark) encode() []byte {
	text := binary.BigEndian.AppendUint64(nil, m.since)
	text = binary.BigEndian.AppendUint64(text, m.last)
	return binary.BigEndian.AppendUint32(text, crc32.Checksum(text, castagnoli))
}

// raise notes that the log goes to index now.
func (m *logMark) raise(index uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = index
	_, err := m.f.WriteAt(m.encode(), 0)
	return err
}

// lower notes, even for after a loss of power, that entries up to last go, and that the log then ends with end,
// unless there are later ones.
func (m *logMark) lower(last, end uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if last < m.last {
		return nil
	}
	m.last = end
	if _, err := m.f.WriteAt(m.encode(), 0); err != nil {
		return err
	}
	return m.f.Sync()
}

// Close implements io.Closer.
func (m *logMark) Close() error { return m.f.Close() }
