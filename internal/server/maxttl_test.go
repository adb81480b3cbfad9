package server

import (
	"bytes"
	"testing"
	"time"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// closes returns how long a cluster that is restored from a backup of s stays closed.
func closes(t *testing.T, s *Server) replica.Restored {
	t.Helper()
	_, about := restored(t, backupOf(t, s), replica.RestoreOptions{})
	return about
}

// A restored cluster stays closed for the greatest TTL that was permitted, whether or not a session had it. A lower
// --max-ttl counts once nobody can believe in a longer TTL any more.
func TestClosedForThePermittedTTL(t *testing.T) {
	t.Parallel()
	const long, short = 6 * time.Second, time.Second
	dir := t.TempDir()
	s := alone(t, Config{DataDir: dir, MinTTL: time.Millisecond, MaxTTL: long})
	eventually(t, "a backup has a session that lives", func() bool {
		attach(t, s).open(short)
		about := closes(t, s)
		if about.ClosedFor != long {
			t.Errorf("closed for %v, want %v", about.ClosedFor, long)
		}
		return about.UsedTTL == short // unless it has ended before
	})
	x := attach(t, s)
	session := x.open(long)
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}

	began := time.Now()
	s = alone(t, Config{DataDir: dir, MinTTL: time.Millisecond, MaxTTL: short})
	if about := closes(t, s); about.ClosedFor != long {
		t.Errorf("closed for %v with a lower setting; want %v still", about.ClosedFor, long)
	}
	x = attach(t, s)
	x.call(attachOf(session, "", 0))
	alive := func() bool { return codeOf(x.call(keepAliveOf(session))) == lockpb.Code_CODE_UNSPECIFIED }
	for time.Since(began) < long+2*time.Second && alive() {
		if about := closes(t, s); about.ClosedFor != long && alive() {
			t.Fatalf("closed for %v while a session has a TTL of %v", about.ClosedFor, long)
		}
		time.Sleep(100 * time.Millisecond)
	}
	x.call(&lockpb.Request{
		Session: session, Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}},
	})
	eventually(t, "the lower TTL counts", func() bool { return closes(t, s).ClosedFor == short })
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}

	s = alone(t, Config{DataDir: dir, MinTTL: time.Millisecond, MaxTTL: 2 * long})
	if about := closes(t, s); about.ClosedFor != 2*long {
		t.Errorf("closed for %v before a session has the TTL that is permitted now; want %v", about.ClosedFor, 2*long)
	}
}

// Three members with another --max-ttl each: what a leader permits is in every log.
func TestPermittedTTLIsReplicated(t *testing.T) {
	t.Parallel()
	most := DefaultMaxTTL
	c := newCluster(t, 3, func(c *Config) { c.MaxTTL, most = most, most+time.Hour })
	c.leader()
	greatest := time.Duration(0)
	for range 3 {
		leader := c.leader()
		greatest = max(greatest, c.servers[leader].config.MaxTTL)
		for i, s := range c.servers {
			var backup bytes.Buffer
			eventually(t, "a member gives a backup", func() bool { // on a busy machine nobody may lead just now
				backup.Reset()
				return s.Backup(t.Context(), &backup) == nil
			})
			if _, about := restored(t, backup.Bytes(), replica.RestoreOptions{}); about.ClosedFor < greatest {
				t.Errorf("member %d: closed for %v, %v was permitted", i, about.ClosedFor, greatest)
			}
		}
		eventually(t, "another member leads", func() bool {
			if now := c.leader(); now != leader { // also without us, on a busy machine
				return true
			}
			_ = c.servers[leader].replica.Transfer(t.Context(), "")
			return false
		})
	}
}
