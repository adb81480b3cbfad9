package replica

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/hashicorp/raft-wal/metadb"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// reopenSealed repairs a log after a member was killed between two steps of raft-wal: the last file of the log was full
// and sealed, but the list of files did not record that yet. raft-wal opens such a log and refuses every later entry
// ("segment is sealed"), even after a restart: the member would never work again.
//
// reopenSealed copies the entries to an unsealed file, which replaces the sealed file in the list. Recording the seal
// in the list would not be safe: after a loss of power the index of the sealed file may be missing on disk, and
// raft-wal may have dropped entries.
func reopenSealed(dir string, files types.VFS) (err error) {
	if _, err := os.Stat(filepath.Join(dir, metadb.FileName)); errors.Is(err, fs.ErrNotExist) {
		return nil // there is no log yet
	}
	list := &metadb.BoltMetaDB{}
	defer func() { err = errors.Join(err, list.Close()) }()
	state, err := list.Load(dir)
	if err != nil || len(state.Segments) == 0 {
		return err
	}
	last := &state.Segments[len(state.Segments)-1]
	if !last.SealTime.IsZero() {
		return nil
	}
	filer := segment.NewFiler(dir, files)
	from, err := filer.RecoverTail(*last)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // raft-wal creates it
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	if sealed, _, err := from.Sealed(); err != nil || !sealed {
		return err
	}
	into := *last
	into.ID = state.NextSegmentID
	into.BaseIndex = max(last.BaseIndex, last.MinIndex)
	into.MinIndex = into.BaseIndex
	if err := copySegment(filer, from, &into); err != nil {
		return fmt.Errorf("entries %d to %d: %w", into.BaseIndex, from.LastIndex(), err)
	}
	*last = into
	state.NextSegmentID++
	return list.CommitState(state)
}

// aroundEntry is greater than the overhead of an entry in a file, in bytes.
const aroundEntry = 64

// copySegment writes the entries of from, beginning with into.BaseIndex, to a new file. It adds the size of these
// entries to the size limit of the file.
func copySegment(filer *segment.Filer, from types.SegmentWriter, into *types.SegmentInfo) (err error) {
	// An existing file comes from an interrupted attempt.
	if err := filer.Delete(into.BaseIndex, into.ID); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if from.LastIndex() < into.BaseIndex {
		return nil // raft-wal creates it
	}
	var entries []types.LogEntry
	for i := into.BaseIndex; i <= from.LastIndex(); i++ {
		raw, err := from.GetLog(i)
		if err != nil {
			return err
		}
		entries = append(entries, types.LogEntry{Index: i, Data: bytes.Clone(raw.Bs)})
		if err := raw.Close(); err != nil {
			return err
		}
		into.SizeLimit += uint32(len(raw.Bs)) + aroundEntry
	}
	to, err := filer.Create(*into)
	if err != nil {
		return err
	}
	return errors.Join(to.Append(entries), to.Close())
}
