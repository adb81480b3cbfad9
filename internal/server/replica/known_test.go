package replica

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/raft"
)

// Known indexes of members survive a restart. A damaged file has none.
func TestKnownIsKept(t *testing.T) {
	dir := t.TempDir()
	k := openKnown(dir)
	k.note("a", 7)
	k.note("a", 5)
	k.note("gone", 9)
	members := []raft.Server{{ID: "a"}, {ID: "b"}}
	if err := k.write(members); err != nil {
		t.Fatal(err)
	}
	again := openKnown(dir)
	if a, b, gone := again.of("a"), again.of("b"), again.of("gone"); a != 7 || b != 0 || gone != 0 {
		t.Errorf("a %d, b %d, gone %d; want 7, 0, 0", a, b, gone)
	}
	if err := os.WriteFile(filepath.Join(dir, knownFile), []byte(`{"a":`), 0o600); err != nil {
		t.Fatal(err)
	}
	if a := openKnown(dir).of("a"); a != 0 {
		t.Errorf("damaged: a %d, want 0", a)
	}
}

// answering answers AppendEntries like a follower whose log ends with last.
type answering struct {
	transport
	last uint64
}

func (x answering) AppendEntries(
	_ raft.ServerID, _ raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	*resp = raft.AppendEntriesResponse{Term: req.Term, LastLog: x.last}
	return nil
}

// A follower whose log ends before its acknowledgements gets no more entries, and this is logged once. A follower that
// is only behind gets entries.
func TestFollowerThatForgetsGetsNoEntries(t *testing.T) {
	var log bytes.Buffer
	p := newProof(answering{last: 10}, newSilence())
	p.known = &known{index: map[raft.ServerID]uint64{"a": 10}}
	p.log = slog.New(slog.NewTextHandler(&log, nil))
	reconnected := 0
	p.forgot = func(raft.ServerID) { reconnected++ }
	send := func() error {
		return p.AppendEntries("a", "", &raft.AppendEntriesRequest{Term: 1}, &raft.AppendEntriesResponse{})
	}
	if err := send(); err != nil {
		t.Errorf("behind: %v", err)
	}
	p.known.note("a", 11)
	for range 2 {
		if err := send(); err == nil {
			t.Error("a follower that has forgotten an entry is served")
		}
	}
	if n := strings.Count(log.String(), "has lost entries"); n != 1 || reconnected != 1 {
		t.Errorf("the log says so %d times, and it was dialled anew %d times:\n%s", n, reconnected, &log)
	}
}

// The next start completes an interrupted setAside.
func TestSetAsideIsFinished(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{nodeIDFile, knownFile} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const aside = asideName + "x"
	if err := os.WriteFile(filepath.Join(dir, asideFile), []byte(aside+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, aside), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, knownFile), filepath.Join(dir, aside, knownFile)); err != nil {
		t.Fatal(err)
	}
	if err := finishAside(dir); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || left[0].Name() != aside {
		t.Errorf("left: %v, %v", left, err)
	}
	if moved, err := os.ReadDir(filepath.Join(dir, aside)); err != nil || len(moved) != 2 {
		t.Errorf("set aside: %v, %v", moved, err)
	}
	if err := finishAside(dir); err != nil {
		t.Errorf("with nothing to finish: %v", err)
	}
}
