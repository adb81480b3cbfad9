package replica

// Detection of damage to the log: each entry has a checksum, and a mark records the end of the log. snapshots.go checks
// snapshots; disk.go handles writes that the disk refuses.
//
// The member that stores an entry first computes its checksum. Every member checks it when it stores the entry, when it
// reads the entry, and before it applies the entry. The log store below trusts the lengths that it reads, and treats a
// truncated end as an end that was never written.

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

// CorruptError is the reason why a server did not start, or stopped: its data differs from the data that it wrote. With
// an empty data directory, the member gets all data from the other members. Without other members, see the
// documentation.
type CorruptError struct {
	File  string // the damaged file, or the directory
	Index uint64 // the damaged log entry; zero if the damage is elsewhere
	Why   string
}

func (e *CorruptError) Error() string {
	if e.Index == 0 {
		return fmt.Sprintf("the data is damaged: %s: %s", e.File, e.Why)
	}
	return fmt.Sprintf("the data is damaged: %s: log entry %d: %s", e.File, e.Index, e.Why)
}

// sumVersion is the first byte of an entry's extensions. The four bytes of its checksum follow.
const sumVersion = 1

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sumOf returns the extensions of an entry, with its checksum. Raft sends extensions to the other members and stores
// them with the entry. Versions without checksums leave them unchanged.
func sumOf(l *raft.Log) []byte {
	var head [17]byte
	binary.BigEndian.PutUint64(head[:], l.Index)
	binary.BigEndian.PutUint64(head[8:], l.Term)
	head[16] = byte(l.Type)
	sum := crc32.Update(crc32.Checksum(head[:], castagnoli), castagnoli, l.Data)
	return binary.BigEndian.AppendUint32([]byte{sumVersion}, sum)
}

// intact reports whether an entry matches its checksum. It returns true for an entry without a checksum.
func intact(l *raft.Log) bool {
	return len(l.Extensions) == 0 || slices.Equal(l.Extensions, sumOf(l))
}

// checkedLog adds a checksum to an entry when the entry is first stored, and checks it on every read. It also records
// the end of the log, to distinguish a missing acknowledged end from an end that was never completely written.
type checkedLog struct {
	raft.LogStore
	path    string // the file or directory of the entries
	silence *silence
	disk    *disk
	mark    *logMark // nil: no data directory
	commits *commitMark
	sizes   *logSizes

	members      []raft.Server // the last configuration that check has read
	membersIndex uint64
}

func (l *checkedLog) StoreLog(entry *raft.Log) error { return l.StoreLogs([]*raft.Log{entry}) }

// StoreLogs returns an error for an entry that arrived damaged, before it writes it. It raises the mark after it has
// written the entries: otherwise a crash in between would look like damage.
func (l *checkedLog) StoreLogs(entries []*raft.Log) error {
	for _, x := range entries {
		if !intact(x) {
			return fmt.Errorf("log entry %d arrived damaged", x.Index)
		}
		if len(x.Extensions) == 0 { // the entry is new, or comes from a version without checksums
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

// DeleteRange never removes committed entries from the end of the log: it returns an error, and the member stops. It
// lowers the mark before it removes entries from the end: otherwise a crash in between would look like missing entries.
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

// GetLog never returns a damaged entry as if it were intact. Raft panics if it cannot read an entry. So GetLog returns
// an entry that the state machine refuses, and the member stops: from then on it neither sends nor writes.
func (l *checkedLog) GetLog(index uint64, entry *raft.Log) error {
	err := l.read(index, entry)
	damage := (*CorruptError)(nil)
	if !errors.As(err, &damage) {
		return err
	}
	l.silence.damaged.Store(true)
	_ = l.disk.condemn(damage) // the damage is the result
	*entry = raft.Log{Index: index, Type: raft.LogCommand, Extensions: []byte{0}}
	return nil
}

// read is like GetLog, but returns a *CorruptError for a damaged entry.
func (l *checkedLog) read(index uint64, entry *raft.Log) (err error) {
	corrupt := func(why string) error { return &CorruptError{File: l.file(index), Index: index, Why: why} }
	defer func() {
		if x := recover(); x != nil { // the log store below trusts the lengths that it reads
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
	files, _ := os.ReadDir(l.path) // the path may be a file
	name := ""
	for _, f := range files {
		var base, id uint64
		if n, _ := fmt.Sscanf(f.Name(), "%020d-%016x.wal", &base, &id); n == 2 && base <= index {
			name = f.Name() // the names are in order
		}
	}
	return filepath.Join(l.path, name)
}

// check reads and checks the whole log. The log must reach the mark, and follow the newest snapshot, whose last entry
// is until, without a gap. Together they must reach the commit mark.
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

// end returns the last index of the checked log or of the newest snapshot, whichever is greater, and the latest members
// in them.
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
// If the last write of a log is truncated, either the machine stopped during the write, and nobody got an answer, or
// the entry was damaged later. The log store below assumes the former. The mark is written after the log, without an
// fsync: it survives the end of the process immediately, and a crash of the machine some seconds later.
type logMark struct {
	f *os.File

	mu    sync.Mutex
	since uint64 // entries from here on have checksums; never changes
	last  uint64 // the log goes to here, or further
}

// markFile is a file in the data directory. It contains the index of the first entry with a checksum, the last index,
// and the checksum of both.
const (
	markFile = "log-mark"
	markSize = 20
)

// openMark opens the mark of a log that ends with last, or creates it if there is none.
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

// raise records that the log now ends with index.
func (m *logMark) raise(index uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = index
	_, err := m.f.WriteAt(m.encode(), 0)
	return err
}

// lower records durably, before entries up to last are deleted, that the log then ends with end. It does nothing if the
// log has later entries.
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
