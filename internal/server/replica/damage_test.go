package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/serverfault"
	"github.com/fencelock/fencelock/internal/testtier"
)

// settings returns the settings of a single replica, which reports a fatal error to the test.
func settings(t *testing.T) Config {
	return Config{
		Store: StoreMemory, Now: time.Now, Changed: func() {}, Fatal: func(err error) { t.Error(err) },
		Log: quiet(t), Rig: &serverfault.Rig{},
	}
}

// alone starts a replica without others and returns it once it leads, with its term and a function that closes it.
func alone(t *testing.T, c Config) (*Replica, *Term, func()) {
	t.Helper()
	r, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := r.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	term := uint64(0)
	eventually(t, "it leads", func() (leads bool) { term, leads = r.LeadingTerm(); return leads })
	leading := r.Lead(term)
	if !leading.Begin(ctx) {
		t.Fatal("the term does not begin")
	}
	return r, leading, func() {
		cancel()
		running.Wait()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}

// carryOut applies one command.
func carryOut(t *testing.T, term *Term, c machine.Command) machine.Result {
	t.Helper()
	out, err := term.Propose(&machine.Batch{Commands: []machine.Command{c}})()
	if err != nil {
		t.Fatal(err)
	}
	return out.Results[0]
}

func acquire(session machine.SessionID, name string) machine.Command {
	return machine.Command{
		Op: machine.OpAcquire, Session: session, Requests: []machine.Request{{Name: name, ID: "0123456789abcdef"}},
	}
}

// written returns the settings of a closed replica with snapshots and log files, and the hash of its state.
func written(t *testing.T) (Config, [32]byte) {
	t.Helper()
	config := settings(t)
	config.DataDir, config.Store = t.TempDir(), StoreWAL
	config.Rig = &serverfault.Rig{SegmentBytes: 16 << 10, TrailingEntries: 40}
	r, term, end := alone(t, config)
	session := machine.SessionID{1}
	carryOut(t, term, machine.Command{Op: machine.OpOpenSession, Session: session, TTL: time.Hour})
	for i := range 150 {
		if x := carryOut(t, term, acquire(session, fmt.Sprintf("name/%06d", i))); x.Code != machine.CodeGranted {
			t.Fatalf("%+v", x)
		}
		if i == 50 || i == 80 {
			if err := r.Snapshot(); err != nil {
				t.Fatal(err)
			}
		}
	}
	hash := r.State.Machine.Hash()
	end()
	return config, hash
}

// filesOf returns the files of the log and the snapshots.
func filesOf(t *testing.T, dir string) (all []string) {
	t.Helper()
	for _, pattern := range []string{"wal/*.wal", "snapshots/*/*", markFile} {
		found, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(found), err)
		}
		all = append(all, found...)
	}
	return all
}

// stateOf returns the hash of the state in the directory after a start. There are no elections; they do not change the
// state.
func stateOf(config Config) (hash [32]byte, err error) {
	s, err := openStores(StoreWAL, config.DataDir, newRaftLog(config.Log), config.Rig, func(error) {})
	if err != nil {
		return hash, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	f := NewFSM(newMachine(), func() {}, func(error) {})
	if _, err := s.replay(f); err != nil {
		return hash, err
	}
	return f.Machine.Hash(), nil
}

// Replay detects a flipped bit anywhere in the log or in a snapshot, unless the bit has no effect.
func TestFlippedBits(t *testing.T) {
	t.Parallel()
	flips := 60
	if testtier.Wanted() {
		flips = 1000
	}
	config, want := written(t)
	if hash, err := stateOf(config); err != nil || hash != want {
		t.Fatalf("without damage: %v", err)
	}
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	noticed, harmless := 0, 0
	for i := range flips {
		damaged := config
		damaged.DataDir, damaged.Moved = t.TempDir(), true
		if err := os.CopyFS(damaged.DataDir, os.DirFS(config.DataDir)); err != nil {
			t.Fatal(err)
		}
		files := filesOf(t, damaged.DataDir)
		file := files[i%len(files)]
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		used := len(bytes.TrimRight(text, "\x00"))
		at := random.IntN(used)
		bit := byte(1) << random.IntN(8)
		text[at] ^= bit
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		hash, err := stateOf(damaged)
		switch {
		case err != nil:
			noticed++
		case hash == want:
			harmless++
		default:
			t.Errorf("seed %d: bit %#x of byte %d of %s: another state, and no error",
				seed, bit, at, filepath.Base(file))
		}
	}
	t.Logf("%d flips: %d noticed, %d harmless", flips, noticed, harmless)
	if noticed < flips/2 {
		t.Errorf("%d of %d are noticed: the test misses what it is for", noticed, flips)
	}
}

// The last record of the log is truncated, or overwritten with zeros, from any of its bytes on. The replica detects it,
// since log-mark has the end of the log.
func TestTornRecords(t *testing.T) {
	t.Parallel()
	config, _ := written(t)
	last := func() (file string, text []byte) {
		files, err := filepath.Glob(filepath.Join(config.DataDir, "wal/*.wal"))
		if err == nil {
			file = slices.Max(files)
			text, err = os.ReadFile(file)
		}
		if err != nil {
			t.Fatal(err)
		}
		return file, text
	}
	used := func(text []byte) int { return len(bytes.TrimRight(text, "\x00")) }
	before, text := last()
	from := used(text)
	_, term, end := alone(t, config)
	session := machine.SessionID{2}
	carryOut(t, term, machine.Command{Op: machine.OpOpenSession, Session: session, TTL: time.Hour})
	end()
	file, whole := last()
	if file != before {
		from = 0
	}
	tried := 0
	for at := from; at < used(whole); at += testtier.Rounds(17, 1) {
		for what, text := range map[string][]byte{
			"cut off": whole[:at], "zeroed": append(bytes.Clone(whole[:at]), make([]byte, len(whole)-at)...),
		} {
			if err := os.WriteFile(file, text, 0o600); err != nil {
				t.Fatal(err)
			}
			tried++
			if _, err := stateOf(config); err == nil {
				t.Errorf("%s from byte %d of %d on: no error", what, at, used(whole))
			}
		}
	}
	t.Logf("%d tried, from byte %d to %d", tried, from, used(whole))
	if tried == 0 {
		t.Error("nothing was tried")
	}
}

// The errors of a replica with damaged data.
func TestDamagedReplicaDoesNotOpen(t *testing.T) {
	t.Parallel()
	config, _ := written(t)
	if v, err := Verify(config.DataDir); err != nil || v.Last == 0 || v.Snapshot == 0 || v.Unsummed != 0 ||
		v.Revision == 0 || v.Cluster == "" {
		t.Errorf("before: %+v, %v", v, err)
	}
	logs, err := filepath.Glob(filepath.Join(config.DataDir, "wal/*.wal"))
	if err != nil || len(logs) == 0 {
		t.Fatal(err)
	}
	last := logs[len(logs)-1]
	whole, err := os.ReadFile(last)
	if err != nil {
		t.Fatal(err)
	}
	for what, spoil := range map[string]func([]byte){
		"a name":                      func(text []byte) { text[bytes.Index(text, []byte("name/"))+6] ^= 1 },
		"the end, which clients know": func(text []byte) { text[len(bytes.TrimRight(text, "\x00"))-1] ^= 1 },
	} {
		text := bytes.Clone(whole)
		spoil(text)
		if err := os.WriteFile(last, text, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Open(config)
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) || !strings.HasPrefix(corrupt.File, filepath.Dir(last)) || corrupt.Index == 0 {
			t.Errorf("%s: %v; want file and entry", what, err)
		}
		if _, err := Verify(config.DataDir); !errors.As(err, &corrupt) {
			t.Errorf("%s: Verify says %v", what, err)
		}
	}
	if err := os.WriteFile(last, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, end := alone(t, config)
	end()
}

// rot is a log that returns a damaged entry when now returns true.
type rot struct {
	raft.LogStore
	now func(*raft.Log) bool
}

func (l *rot) GetLog(index uint64, entry *raft.Log) error {
	err := l.LogStore.GetLog(index, entry)
	if err == nil && l.now(entry) {
		entry.Data = append(bytes.Clone(entry.Data), 1)
	}
	return err
}

// An entry that becomes damaged while the replica runs stops the member, not the program, and does not reach other
// members.
func TestDamagedEntryStopsTheMember(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store, err := openStores(StoreWAL, dir, newRaftLog(quiet(t)), &serverfault.Rig{}, func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	defer store.close()
	if err := store.log.StoreLogs([]*raft.Log{{Index: 1, Term: 1, Data: []byte("x")}}); err != nil {
		t.Fatal(err)
	}
	var fatal error
	damaged := *store.checked
	damaged.disk = &disk{fatal: func(err error) { fatal = err }}
	damaged.LogStore = &rot{damaged.LogStore, func(*raft.Log) bool { return true }}
	var entry raft.Log
	if err := damaged.GetLog(1, &entry); err != nil || intact(&entry) {
		t.Errorf("raft gets %+v, %v; want what no state machine takes", entry, err)
	}
	if corrupt := (*CorruptError)(nil); !errors.As(fatal, &corrupt) || corrupt.Index != 1 {
		t.Errorf("the member stops for %v", fatal)
	}
	if store.silence.reason() == nil {
		t.Error("the member still speaks to the others")
	}
	if err := damaged.StoreLogs([]*raft.Log{{Index: 2, Term: 1}}); err == nil {
		t.Error("it writes still")
	}
	f := NewFSM(newMachine(), func() {}, func(error) {})
	if _, failed := f.Apply(&entry).(error); !failed {
		t.Error("the state machine takes it")
	}
}
