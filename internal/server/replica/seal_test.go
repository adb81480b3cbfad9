package replica

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"
	"github.com/hashicorp/raft-wal/types"

	"github.com/fencelock/fencelock/internal/serverfault"
)

// unlisted is the list of the log's files, which no longer changes once shut is set, as after a kill between the last
// entry of a file and the creation of the next file.
type unlisted struct {
	metadb.BoltMetaDB
	shut bool
}

var errKilled = errors.New("killed")

func (l *unlisted) CommitState(s types.PersistentState) error {
	if l.shut {
		return errKilled
	}
	return l.BoltMetaDB.CommitState(s)
}

func entry(i uint64) *raft.Log {
	return &raft.Log{Index: i, Term: 1, Data: fmt.Appendf(nil, "entry %d, %0200d", i, i)}
}

// A member that was killed when a file of its log was full continues with that log and all of its entries.
func TestLogThatWasSealedWhenKilled(t *testing.T) {
	t.Parallel()
	for _, trimmed := range []bool{false, true} {
		t.Run(fmt.Sprintf("trimmed=%v", trimmed), func(t *testing.T) {
			dir := t.TempDir()
			openAt := dir + "/wal"
			if err := os.Mkdir(openAt, 0o700); err != nil {
				t.Fatal(err)
			}
			list := &unlisted{}
			before, err := wal.Open(openAt, wal.WithSegmentSize(4<<10), wal.WithMetaStore(list),
				wal.WithLogger(newRaftLog(quiet(t))))
			if err != nil {
				t.Fatal(err)
			}
			last := uint64(0)
			add := func() error {
				err := before.StoreLog(entry(last + 1))
				if err == nil {
					last++
				}
				return err
			}
			for range 100 { // a few files
				if err := add(); err != nil {
					t.Fatal(err)
				}
			}
			first := uint64(1)
			if trimmed {
				first = last - 2
				if err := before.DeleteRange(1, first-1); err != nil {
					t.Fatal(err)
				}
			}
			list.shut = true
			for err = add(); err == nil; err = add() {
			}
			if !errors.Is(err, types.ErrSealed) {
				t.Fatalf("the log ends with %v; want that it is sealed: nothing is shown", err)
			}
			if err := before.Close(); err != nil {
				t.Fatal(err)
			}

			for range 2 { // the log stays usable
				after, err := openLog(StoreWAL, dir, newRaftLog(quiet(t)), &serverfault.Rig{SegmentBytes: 4 << 10}, &disk{})
				if err != nil {
					t.Fatal(err)
				}
				if got, err := after.FirstIndex(); got != first || err != nil {
					t.Errorf("the log begins at %d, %v; want %d", got, err, first)
				}
				if got, err := after.LastIndex(); got != last || err != nil {
					t.Errorf("the log ends at %d, %v; want %d", got, err, last)
				}
				last++
				if err := after.StoreLogs([]*raft.Log{entry(last)}); err != nil {
					t.Fatalf("entry %d: %v", last, err)
				}
				for i := first; i <= last; i++ {
					var got raft.Log
					if err := after.GetLog(i, &got); err != nil || string(got.Data) != string(entry(i).Data) {
						t.Fatalf("entry %d is %q, %v", i, got.Data, err)
					}
				}
				if err := after.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}
