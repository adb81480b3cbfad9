package server

import (
	"bytes"
	"path/filepath"
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/generation"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// A client of an earlier version, which names no nonce, is given one. A forced release by the nonce of a hold that
// ended leaves the next hold alone. The snapshot at the new level is there without a log that has grown.
func TestNoncesOnTheWire(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := alone(t, Config{DataDir: dir, Listen: "127.0.0.1:0"})
	eventually(t, "the level is raised", func() bool { return s.replica.State.Machine.Level() == machine.MaxLevel })
	eventually(t, "a snapshot was made", func() bool {
		made, err := filepath.Glob(filepath.Join(dir, "snapshots", "*[0-9]", "state.bin"))
		return err == nil && len(made) > 0
	})
	x := dial(t, s.Addr().String())
	session := x.open(longTTL)
	acquire := func(nonce []byte) *lockpb.Grant {
		t.Helper()
		q := acquireOf(session, "x", backend.NewRequestID(), false)
		q.GetAcquire().Nonce = nonce
		grants := x.call(q).GetAcquired().GetGrants()
		if len(grants) != 1 {
			t.Fatal("not granted")
		}
		return grants[0]
	}
	first := acquire(nil)
	if len(first.Nonce) != 16 {
		t.Errorf("the nonce of a request without one: %x", first.Nonce)
	}
	own := bytes.Repeat([]byte{7}, 16)
	force := func(nonce []byte, token uint64) *lockpb.Reply {
		return x.call(&lockpb.Request{Call: &lockpb.Request_ForceRelease{ForceRelease: &lockpb.ForceRelease{
			Name: "x", Reason: "gone", By: "ann", Nonce: nonce, Token: token,
		}}})
	}
	before := s.replica.State.Machine.Revision()
	if r := force(first.Nonce, first.Token); r.GetDone() == nil {
		t.Errorf("by nonce and token: %v", r)
	}
	second := acquire(own)
	if !bytes.Equal(second.Nonce, own) {
		t.Errorf("nonce %x, want %x", second.Nonce, own)
	}
	if r := force(first.Nonce, 0); codeOf(r) != lockpb.Code_CODE_NOT_HELD {
		t.Errorf("by the nonce of a hold that ended: %v", r)
	}
	if r := force([]byte("short"), 0); codeOf(r) != lockpb.Code_CODE_INVALID || r.GetError().Field != "nonce" {
		t.Errorf("by 5 bytes: %v", r)
	}
	holders := x.call(holderOf("x")).GetName().GetHolders()
	if len(holders) != 1 || !bytes.Equal(holders[0].Nonce, own) {
		t.Errorf("holders %v, want one with the nonce %x", holders, own)
	}
	events, err := s.replica.State.Machine.EventsSince(before, 1)
	if err != nil || len(events) != 1 {
		t.Fatal(events, err)
	}
	if e := eventOut(&events[0]); e.By != "ann" || e.Principal != "address:127.0.0.1" {
		t.Errorf("by %q, principal %q", e.By, e.Principal)
	}
}

// Each restore raises the generation of its backup by one, and names it anew.
func TestRestoresRaiseTheGeneration(t *testing.T) {
	t.Parallel()
	before := alone(t, Config{DataDir: t.TempDir()})
	backup, seen := backupOf(t, before), map[string]bool{"": true}
	for number := uint64(1); number <= 2; number++ {
		var last []byte
		for range 2 { // of the same backup
			dir, _ := restored(t, backup, replica.RestoreOptions{ClosedFor: -1})
			s := alone(t, Config{DataDir: dir})
			name := s.welcome().History
			if g := generation.Of(name); g.Number != number || seen[name] {
				t.Errorf("restore of generation %d: %q", number-1, name)
			}
			seen[name] = true
			last = backupOf(t, s)
		}
		backup = last
	}
}
