package replica

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// checkedSnapshots is a snapshot store that also protects the descriptions of snapshots. Raft's checksum covers only
// the state; the index, the term and the members are in another file without a checksum. checkedSnapshots repeats them
// in a head before the state. The head stays on this disk; other members get the state without it.
type checkedSnapshots struct {
	raft.SnapshotStore
	dir string
}

// snapshotHead begins the head, which is one line. A state without a head begins with a brace.
const snapshotHead = "fencelock snapshot 1 "

func openSnapshots(dir string, logger hclog.Logger) (*checkedSnapshots, error) {
	store, err := raft.NewFileSnapshotStoreWithLogger(dir, snapshotsKept, logger)
	if err != nil {
		return nil, fmt.Errorf("snapshots in %s: %w", dir, err)
	}
	return &checkedSnapshots{store, filepath.Join(dir, "snapshots")}, nil
}

// head returns the head for a description.
func head(m *raft.SnapshotMeta) ([]byte, error) {
	text, err := json.Marshal(struct {
		ID                 string
		Index, Term        uint64
		Configuration      raft.Configuration
		ConfigurationIndex uint64
	}{m.ID, m.Index, m.Term, m.Configuration, m.ConfigurationIndex})
	return append(append([]byte(snapshotHead), text...), '\n'), err
}

// Create implements raft.SnapshotStore.
func (s *checkedSnapshots) Create(
	version raft.SnapshotVersion, index, term uint64, members raft.Configuration, at uint64, t raft.Transport,
) (raft.SnapshotSink, error) {
	sink, err := s.SnapshotStore.Create(version, index, term, members, at, t)
	if err != nil {
		return nil, err
	}
	line, err := head(&raft.SnapshotMeta{
		ID: sink.ID(), Index: index, Term: term, Configuration: members, ConfigurationIndex: at,
	})
	if err == nil {
		_, err = sink.Write(line)
	}
	if err != nil {
		return nil, errors.Join(err, sink.Cancel())
	}
	return sink, nil
}

// Open implements raft.SnapshotStore.
func (s *checkedSnapshots) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	meta, state, err := s.SnapshotStore.Open(id)
	if err != nil {
		return nil, nil, err
	}
	in := bufio.NewReader(state)
	if begin, _ := in.Peek(len(snapshotHead)); string(begin) == snapshotHead {
		line, err := in.ReadBytes('\n')
		want, wrong := head(meta)
		if err = errors.Join(err, wrong); err == nil && !bytes.Equal(line, want) {
			err = errors.New("its description is another")
		}
		if err != nil {
			return nil, nil, errors.Join(err, state.Close())
		}
		short := *meta
		short.Size -= int64(len(line))
		meta = &short
	}
	return meta, struct {
		io.Reader
		io.Closer
	}{in, state}, nil
}

// check reads all snapshots that raft keeps, and returns the index of the newest; zero without snapshots. An unreadable
// snapshot, which raft would skip, is an error.
//
// Raft removes an older snapshot file by file once enough newer snapshots are complete. A process that is killed during
// the removal leaves a part of the snapshot (TestSnapshotThatWasBeingRemoved). That is not damage, and check completes
// the removal. A partial snapshot among the newest has another cause, and is damage.
func (s *checkedSnapshots) check() (newest uint64, err error) {
	names, err := s.finished()
	if err != nil {
		return 0, err
	}
	for i, name := range names {
		path := filepath.Join(s.dir, name.text)
		if i >= snapshotsKept {
			if err := os.RemoveAll(path); err != nil {
				return 0, err
			}
			continue
		}
		meta, state, err := s.Open(name.text)
		why := ""
		switch {
		case err != nil:
			why = err.Error()
		case meta.Version != raft.SnapshotVersionMax || meta.ID != name.text,
			meta.Term != name.term, meta.Index != name.index:
			why = "its description is another"
		}
		if err == nil {
			err = state.Close()
		}
		if why != "" {
			return 0, &CorruptError{File: path, Why: why}
		}
		if err != nil {
			return 0, err
		}
		newest = max(newest, name.index)
	}
	return newest, nil
}

// snapshotName is raft's name of a finished snapshot.
type snapshotName struct {
	text            string
	term, index, at uint64
}

// finished returns the names of the finished snapshots, the newest first, in raft's order.
func (s *checkedSnapshots) finished() (names []snapshotName, err error) {
	all, err := os.ReadDir(s.dir)
	for _, x := range all {
		name := snapshotName{text: x.Name()}
		n, _ := fmt.Sscanf(name.text, "%d-%d-%d", &name.term, &name.index, &name.at)
		if n == 3 && name.text == fmt.Sprintf("%d-%d-%d", name.term, name.index, name.at) {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b snapshotName) int {
		return cmp.Or(cmp.Compare(b.term, a.term), cmp.Compare(b.index, a.index), cmp.Compare(b.text, a.text))
	})
	return names, err
}
