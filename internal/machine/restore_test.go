package machine

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"testing"
	"testing/iotest"
)

// busy returns a story with every kind of state.
func busy(t *testing.T) *story {
	s := newStory(t, 1000)
	s.wantTold(`a: granted x (token 2)
a kept: granted kept (token 3, at least 1m0s) | a left: granted left (token 4, at least 1m0s)
a: ok; to the leader: left lingers (token 4, a, at least 1m0s)
a: granted t/1/2 (token 6s)
a: granted z (token 7s)
b: queued with ticket 8
b: refused: a holds x`, "open a,b", "acquire a x hold=of-a", "acquire a kept,left min=1m", "release a left linger",
		"acquire a t/1/2 tree shared", "acquire a z permits=2/4", "acquire b x y under=c wait",
		"acquire b x id=b-other seq=3")
	return s
}

func TestRestore(t *testing.T) {
	r := busy(t)
	copied := New(8)
	if err := copied.Restore(iotest.OneByteReader(bytes.NewReader(snapshot(t, r.m)))); err != nil {
		t.Fatal(err)
	}
	checkState(t, copied)
	if copied.Hash() != r.m.Hash() || copied.Revision() != r.m.Revision() {
		t.Error("another state was restored")
	}
	compacted := (*CompactedError)(nil)
	if _, err := copied.EventsSince(r.m.Revision()-1, 1); !errors.As(err, &compacted) ||
		compacted.Revision != r.m.Revision() {
		t.Errorf("events from before: %v", err)
	}
	copied.Apply(1, &Command{Op: OpForceRelease, Name: "x"})
	if events, err := copied.EventsSince(r.m.Revision(), 1); err != nil || len(events) != 1 ||
		events[0].Type != EventForced {
		t.Errorf("events from now on: %+v, %v", events, err)
	}
}

func TestHashIsTheChecksumOfTheSnapshot(t *testing.T) {
	r := busy(t)
	data := snapshot(t, r.m)
	if data[len(magic)] != snapshotFirst {
		t.Errorf("at the first level, the snapshot has version %d", data[len(magic)])
	}
	if sum := r.m.Hash(); !bytes.HasSuffix(data, sum[:]) {
		t.Error("they differ")
	}
	if f := r.m.Freeze(); f.Revision() != r.m.Revision() {
		t.Errorf("frozen at %d, the revision is %d", f.Revision(), r.m.Revision())
	}
}

func TestBrokenSnapshotsAreRefused(t *testing.T) {
	r := busy(t)
	data := snapshot(t, r.m)
	before := r.m.Hash()
	refused := func(what string, data []byte) {
		t.Helper()
		bad := (*FormatError)(nil)
		if err := r.m.Restore(bytes.NewReader(data)); !errors.As(err, &bad) || bad.What != "snapshot" {
			t.Errorf("%s: %v, want a FormatError", what, err)
		}
	}
	for i := range data {
		refused("a cut", data[:i])
		broken := bytes.Clone(data)
		broken[i] ^= 1
		refused("a flipped bit", broken)
	}
	refused("more", append(bytes.Clone(data), 0))
	refused("more, with a checksum", sealed(append(bytes.Clone(data[:len(data)-sha256.Size]), 0)))
	other := bytes.Clone(data[:len(data)-sha256.Size])
	other[len(magic)]++
	refused("another version", sealed(other))
	if err := r.m.Restore(iotest.ErrReader(io.ErrUnexpectedEOF)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a reader that fails: %v", err)
	}
	if r.m.Hash() != before {
		t.Error("a snapshot that was refused changed the state")
	}
}

// sealed appends the checksum.
func sealed(body []byte) []byte {
	sum := sha256.Sum256(body)
	return append(body, sum[:]...)
}

func TestWriteErrorsAreReported(t *testing.T) {
	r := busy(t)
	for _, room := range []int{0, 10, len(snapshot(t, r.m)) - 1} {
		if _, err := r.m.Freeze().WriteTo(&small{room}); !errors.Is(err, io.ErrShortWrite) {
			t.Errorf("with room for %d bytes: %v", room, err)
		}
	}
}

// small is a writer with room for that many bytes.
type small struct{ room int }

func (s *small) Write(p []byte) (int, error) {
	n := min(s.room, len(p))
	s.room -= n
	if n < len(p) {
		return n, io.ErrShortWrite
	}
	return n, nil
}

func TestRestoreBackup(t *testing.T) {
	r := busy(t)
	data := snapshot(t, r.m)
	// Changes after the backup was made.
	r.tell("acquire a later")
	later := r.m.Holder("later").Holders[0].Token
	const more = 12345
	before := r.m.Revision()
	longest, err := r.m.RestoreBackup(bytes.NewReader(data), more)
	if err != nil {
		t.Fatal(err)
	}
	if longest <= 0 || r.m.Revision() < before-1+1<<32+more {
		t.Errorf("the longest TTL is %v, the revision %d after %d", longest, r.m.Revision(), before)
	}
	checkState(t, r.m)
	if len(r.m.Sessions()) != 0 {
		t.Errorf("sessions %v are open", r.m.Sessions())
	}
	r.joined = nil
	r.wantTold("x is free | kept is held by nobody (of a, token 3, at least 1m0s)\n"+
		"left is held by nobody (of a, token 4, at least 1m0s)", "show x,kept,left")
	if left := r.m.Lingering(); len(left) != 2 {
		t.Errorf("lingering: %+v, want two", left)
	}
	compacted := (*CompactedError)(nil)
	if _, err := r.m.EventsSince(later.Order(), 1); !errors.As(err, &compacted) ||
		compacted.Revision != r.m.Revision() {
		t.Errorf("events from before: %v", err)
	}
	r.tell("open c", "acquire c x")
	if got := r.m.Holder("x").Holders[0].Token; got.Order() < later.Order()+1<<31 {
		t.Errorf("token %v after the restore, %v was seen before", got, later)
	}
	if _, err := r.m.RestoreBackup(bytes.NewReader(nil), 0); err == nil {
		t.Error("nothing was restored")
	}
}

// A cluster that is restored from a backup has its rules and policies.
func TestBackupsHaveRulesAndPolicies(t *testing.T) {
	s := newStory(t, 8)
	s.wantTold("ok\nok\nok", "raise level=5", "rules set=(allow cert:a acquire a)", "policies set=(max-hold=1m a)")
	data := snapshot(t, s.m)
	s.m, s.joined = New(8), nil
	if _, err := s.m.RestoreBackup(bytes.NewReader(data), 0); err != nil {
		t.Fatal(err)
	}
	s.wantTold(`level 5 | rules version 1 | in force as 1 | "allow cert:a acquire a" | policies "max-hold=1m a"
n: denied Name: cert:b may not acquire "a": no rule allows it`, "state", "open n principal=cert:b", "acquire n a")
}

func TestBackupsRunOutOfRevisions(t *testing.T) {
	m := New(1)
	m.revision = maxRevision - 1
	m.past.base = m.revision
	if _, err := New(1).RestoreBackup(bytes.NewReader(snapshot(t, m)), 0); err == nil {
		t.Error("a revision beyond the last was restored")
	}
	for _, more := range []uint64{maxRevision - 1, maxRevision, 1<<64 - 1} {
		if _, err := New(1).RestoreBackup(bytes.NewReader(snapshot(t, New(1))), more); err == nil {
			t.Errorf("a revision set ahead by %d was restored", more)
		}
	}
}

// FuzzRestore: a snapshot with a right checksum and any contents is refused, or leaves a machine that works and writes
// it back as it was.
func FuzzRestore(f *testing.F) {
	t := &testing.T{}
	f.Add(snapshot(t, New(1))[len(magic):])
	f.Add(snapshot(t, busy(t).m)[len(magic):])
	f.Fuzz(func(t *testing.T, body []byte) {
		data := sealed(append([]byte(magic), body...))
		m := New(1)
		if m.Restore(bytes.NewReader(data)) != nil {
			return
		}
		if !bytes.Equal(snapshot(t, m), data) {
			t.Fatal("what was restored is written in another way")
		}
		for _, s := range m.Sessions() {
			m.Apply(1, &Command{Op: OpExpire, Session: s.ID})
		}
		for _, h := range m.Lingering() {
			m.Apply(1, &Command{Op: OpFree, Name: h.Name, Token: h.Token})
		}
		if n := len(m.holds) + len(m.waits) + len(m.names) + len(m.claimants) + len(m.under); n > 0 {
			t.Fatalf("%d things are left over", n)
		}
	})
}
