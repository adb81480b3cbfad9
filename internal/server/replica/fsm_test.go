package replica

import (
	"io"
	"strings"
	"testing"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
)

func TestContentsOfAnotherClusterAreRefused(t *testing.T) {
	t.Parallel()
	f := NewFSM(newMachine(), func() {}, func(error) {})
	f.kept = "ours"
	if err := f.learn(&raft.Log{Index: 1, Term: 1}, []byte(`{"cluster": "theirs"}`)); err == nil || !strings.Contains(err.Error(), "theirs") {
		t.Errorf("an entry: %v", err)
	}
	if err := f.Restore(io.NopCloser(strings.NewReader(`{"cluster": "theirs"}` + "\n"))); err == nil ||
		!strings.Contains(err.Error(), "theirs") {
		t.Errorf("a snapshot: %v", err)
	}
}

// An entry of a later version stops the replica.
func TestUnknownEntryStopsTheReplica(t *testing.T) {
	t.Parallel()
	for name, entry := range map[string]func(term uint64) []byte{
		"kind":  func(term uint64) []byte { return beginEntry(99, term) },
		"empty": func(uint64) []byte { return nil },
		"term":  func(uint64) []byte { return []byte{entryBatch, 0x80} },
		"operation": func(term uint64) []byte {
			return EncodeBatch(term, &machine.Batch{Commands: []machine.Command{{Op: 9999}}})
		},
		"garbage": func(term uint64) []byte { return append(beginEntry(entryBatch, term), 1, 2, 3) },
		"fact":    func(term uint64) []byte { return append(beginEntry(entryFact, term), 'x') },
	} {
		t.Run(name, func(t *testing.T) {
			var fatal error
			f := NewFSM(newMachine(), func() {}, func(err error) { fatal = err })
			if err, failed := f.Apply(&raft.Log{Index: 7, Term: 3, Data: entry(3)}).(error); !failed || fatal == nil ||
				!strings.Contains(fatal.Error(), "log entry 7") {
				t.Errorf("it gets %v, and stops for %v", err, fatal)
			}
			if _, err := f.Freeze(); err == nil {
				t.Error("it makes snapshots still")
			}
		})
	}
}
