package replica

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"
)

// A kill while raft removes an old snapshot leaves a part of it, which is not damage. A part of a current snapshot is
// damage.
func TestSnapshotThatWasBeingRemoved(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, err := openSnapshots(dir, newRaftLog(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	var made []string
	for index := uint64(1); index <= snapshotsKept; index++ {
		sink, err := s.Create(raft.SnapshotVersionMax, 9*index, 2, raft.Configuration{}, 1, nil)
		if err == nil {
			_, err = sink.Write([]byte("{}"))
		}
		if err := errors.Join(err, sink.Close()); err != nil {
			t.Fatal(err)
		}
		made = append(made, sink.ID())
	}
	part := func(name, left string) string {
		path := filepath.Join(dir, "snapshots", name)
		err := os.MkdirAll(path, 0o700)
		if err == nil && left != "" {
			err = os.WriteFile(filepath.Join(path, left), []byte("{}"), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, left := range []string{"", "meta.json", "state.bin"} {
		old := part("2-3-1795418792099", left)
		if newest, err := s.check(); err != nil || newest != 9*snapshotsKept {
			t.Errorf("with %q left of an old one: the newest is %d (%v), want %d", left, newest, err, 9*snapshotsKept)
		}
		if _, err := os.Stat(old); !os.IsNotExist(err) {
			t.Errorf("with %q left of an old one: it is not removed: %v", left, err)
		}
	}
	if err := os.Remove(filepath.Join(dir, "snapshots", made[0], "meta.json")); err != nil {
		t.Fatal(err)
	}
	damaged := (*CorruptError)(nil)
	if _, err := s.check(); !errors.As(err, &damaged) {
		t.Errorf("without the description of a snapshot that counts: %v, want a CorruptError", err)
	}
}
