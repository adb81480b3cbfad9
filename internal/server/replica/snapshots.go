package replica

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// checkedSnapshots are snapshots whose description is as safe as their contents: raft keeps a checksum of the state
// alone, in a file beside it that has the index, the term and the members. They are written down once more at the head
// of the state. The head is of this disk; other members get the state without it.
type checkedSnapshots struct {
	raft.SnapshotStore
	dir string
}

// snapshotHead begins the head, which is one line. The state without it begins with a brace.
const snapshotHead = "fencelock snapshot 1 "

func openSnapshots(dir string, logger hclog.Logger) (*checkedSnapshots, error) {
	store, err := raft.NewFileSnapshotStoreWithLogger(dir, snapshotsKept, logger)
	if err != nil {
		return nil, fmt.Errorf("snapshots in %s: %w", dir, err)
	}
	return &checkedSnapshots{store, filepath.Join(dir, "snapshots")}, nil
}

// head is what the state begins with.
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

// check reads all snapshots, also those that raft would pass over since it cannot read them, and returns the index of
// the newest; zero without any.
func (s *checkedSnapshots) check() (newest uint64, err error) {
	all, err := os.ReadDir(s.dir)
	if err != nil {
		return 0, err
	}
	for _, x := range all {
		var term, index, at uint64
		n, _ := fmt.Sscanf(x.Name(), "%d-%d-%d", &term, &index, &at)
		if n != 3 || x.Name() != fmt.Sprintf("%d-%d-%d", term, index, at) {
			continue // it is not finished
		}
		meta, state, err := s.Open(x.Name())
		why := ""
		switch {
		case err != nil:
			why = err.Error()
		case meta.Version != raft.SnapshotVersionMax || meta.ID != x.Name() || meta.Term != term || meta.Index != index:
			why = "its description is another"
		}
		if err == nil {
			err = state.Close()
		}
		if why != "" {
			return 0, &CorruptError{File: filepath.Join(s.dir, x.Name()), Why: why}
		}
		if err != nil {
			return 0, err
		}
		newest = max(newest, index)
	}
	return newest, nil
}
