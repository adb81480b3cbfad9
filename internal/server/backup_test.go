package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// backupOf is a backup of what s keeps.
func backupOf(t *testing.T, s *Server) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := s.Backup(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// restored restores the backup into a new data directory.
func restored(t *testing.T, backup []byte, o replica.RestoreOptions) (string, replica.Restored) {
	t.Helper()
	dir := t.TempDir()
	r, err := replica.Restore(dir, bytes.NewReader(backup), o)
	if err != nil {
		t.Fatal(err)
	}
	return dir, r
}

func TestRestoredServer(t *testing.T) {
	t.Parallel()
	for _, kind := range []replica.Store{replica.StoreWAL, replica.StoreBolt} {
		t.Run(string(kind), func(t *testing.T) {
			const ttl = 700 * time.Millisecond
			before := alone(t, Config{DataDir: t.TempDir(), MinTTL: time.Millisecond, MaxTTL: ttl})
			x := attach(t, before)
			session, _ := x.holdShort(ttl/2, "x")
			backup := backupOf(t, before)
			// After the backup: a name changes hands, another one is taken, and time passes.
			_, last := x.holdShort(ttl, "y") // for longer than anybody held before
			cluster := before.replica.State.Cluster()
			if err := before.Close(context.Background()); err != nil {
				t.Fatal(err)
			}

			dir, about := restored(t, backup, replica.RestoreOptions{Store: kind})
			if about.Cluster != cluster || about.ClosedFor != ttl || about.Revision < last+1<<32 {
				t.Errorf("restored: %+v; the cluster was %s, the TTL %v, the last token %d", about, cluster, ttl, last)
			}
			began := time.Now()
			config := Config{DataDir: dir, Store: kind, MinTTL: time.Millisecond}
			after := alone(t, config)
			if closed := time.Since(began); closed < ttl {
				t.Errorf("it serves after %v: who held a lock may believe so still", closed)
			}
			y := attach(t, after)
			if r := y.call(attachOf(session, "", 0)); codeOf(r) != lockpb.Code_CODE_SESSION_ENDED {
				t.Errorf("a session of before: %v", r)
			}
			if r := y.call(watchOf("x", false, last)).GetError(); r.GetCode() != lockpb.Code_CODE_COMPACTED ||
				r.CompactRevision != about.Revision {
				t.Errorf("events of before: %v; want them compacted up to %d", r, about.Revision)
			}
			anew := y.open(longTTL)
			for _, name := range []string{"x", "y"} {
				if _, token := y.hold(anew, name); token <= about.Revision {
					t.Errorf("token %d of %s; %d was issued before, and the restore set %d",
						token, name, last, about.Revision)
				}
			}
			if err := after.Close(context.Background()); err != nil {
				t.Fatal(err)
			}

			again := alone(t, config)
			if wait, _ := again.replica.State.Closed(); wait != 0 || again.replica.State.Cluster() != cluster {
				t.Errorf("started again it is closed for %v, in cluster %s", wait, again.replica.State.Cluster())
			}
			if r := attach(t, again).call(attachOf(anew, "", 0)); len(r.GetSession().GetHolds()) != 2 {
				t.Errorf("and has lost what was held: %v", r)
			}
		})
	}
}

// What a restored server issues is below what comes after the next restore of the same backup.
func TestRestoredTwice(t *testing.T) {
	t.Parallel()
	first := alone(t, Config{DataDir: t.TempDir()})
	backup := backupOf(t, first)
	last := uint64(0)
	for range 2 {
		dir, about := restored(t, backup, replica.RestoreOptions{ClosedFor: -1})
		x := attach(t, alone(t, Config{DataDir: dir}))
		session := x.open(longTTL)
		if about.ClosedFor != 0 || about.Revision <= last {
			t.Errorf("restored: %+v; the last token was %d", about, last)
		}
		for range 10 {
			id, token := x.hold(session, "x")
			x.call(releaseOf(session, "x", id, token))
			last = token
		}
	}
}

func TestRestoredAsAnotherCluster(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{DataDir: t.TempDir()})
	dir, about := restored(t, backupOf(t, s), replica.RestoreOptions{NewCluster: true, ClosedFor: -1})
	copied := alone(t, Config{DataDir: dir})
	if name := copied.replica.State.Cluster(); name == s.replica.State.Cluster() || name != about.Cluster ||
		copied.welcome().ClusterId != name {
		t.Errorf("the copy is cluster %q, clients get %q, the original is %q",
			name, copied.welcome().ClusterId, s.replica.State.Cluster())
	}
}

// A member of what was there before the restore is not of the restored cluster, also if it does not know yet where it
// belongs. New members are welcome.
func TestMembersOfARestoredCluster(t *testing.T) {
	t.Parallel()
	addresses := freeport.Addresses(t, 3)
	before := alone(t, Config{DataDir: t.TempDir(), PeerListen: addresses[0]})
	x := attach(t, before)
	x.hold(x.open(longTTL), "x")
	dir, _ := restored(t, backupOf(t, before), replica.RestoreOptions{ClosedFor: -1})
	after := alone(t, Config{DataDir: dir, PeerListen: addresses[1], Listen: "127.0.0.1:0", JoinKey: joinKey})
	if a, err := askedToAdmit(t, after, before); err == nil {
		t.Errorf("a member of before is answered %+v", a)
	}
	for _, home := range []string{"", homeOf(before)} {
		raftOf, err := net.Dial("tcp", addresses[1])
		if err != nil {
			t.Fatal(err)
		}
		defer raftOf.Close()
		if _, err := raftOf.Write(preface('r', home, after.replica.ID())); err != nil {
			t.Fatal(err)
		}
		raftOf.SetDeadline(time.Now().Add(patience))
		if n, err := raftOf.Read(make([]byte, 1)); n != 0 || err == nil || os.IsTimeout(err) {
			t.Errorf("raft of a member of %q is not turned away: %d, %v", home, n, err)
		}
	}

	joining := start(t, Config{DataDir: t.TempDir(), PeerListen: addresses[2], Join: addresses[1:], JoinKey: joinKey})
	eventually(t, "the new member votes and knows the cluster", func() bool {
		return after.replica.Voters() == 2 && homeOf(joining) == homeOf(after)
	})
	token := newCaller(t, leading(t, after, joining)).lock("x").Token
	eventually(t, "it has what is held", func() bool {
		holders := joining.replica.State.Machine.Holder("x").Holders
		return len(holders) == 1 && uint64(holders[0].Token) == token
	})
}

func TestRestoreRefusals(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{DataDir: t.TempDir()})
	x := attach(t, s)
	x.hold(x.open(longTTL), "x")
	backup := backupOf(t, s)
	refused := func(what string, dir string, backup []byte, part string) {
		t.Helper()
		if _, err := replica.Restore(dir, bytes.NewReader(backup), replica.RestoreOptions{}); err == nil ||
			!strings.Contains(err.Error(), part) {
			t.Errorf("%s: %v; want %q", what, err, part)
		}
	}
	dir := filepath.Join(t.TempDir(), "new")
	for i := range backup {
		flipped := bytes.Clone(backup)
		flipped[i] ^= 1
		refused("a flipped bit", dir, flipped, replica.ErrNoBackup.Error())
		refused("cut off", dir, backup[:i], replica.ErrNoBackup.Error())
	}
	refused("more", dir, append(bytes.Clone(backup), 0), replica.ErrNoBackup.Error())
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what is no backup leaves %s behind: %v", dir, err)
	}
	used := t.TempDir()
	if err := os.WriteFile(filepath.Join(used, "something"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refused("a directory with something in it", used, backup, "not empty: something")
	refused("the directory of a server", s.config.DataDir, backup, "not empty")
	if _, err := replica.Restore(dir, bytes.NewReader(backup), replica.RestoreOptions{Store: "paper"}); err == nil {
		t.Error("a log of paper was made")
	}

	broken, _ := restored(t, backup, replica.RestoreOptions{})
	if err := os.WriteFile(filepath.Join(broken, "restoring"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := Start(t.Context(), Config{DataDir: broken}); err == nil ||
		!strings.Contains(err.Error(), "broken off") {
		t.Errorf("a restore that was broken off is started: %v, %v", s, err)
	}
}

func TestBackupOverTheNetwork(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	x := newCaller(t, c.connect)
	blob := strings.Repeat("x", 4000)
	for i := range 200 { // more than one piece
		q := like(nil, "name/"+string(rune('a'+i%26))+backend.NewRequestID(), func(a *lockpb.Acquire) {
			a.Metadata = map[string]string{"blob": blob}
		})
		if r := x.must(q); len(r.GetAcquired().GetGrants()) != 1 {
			t.Fatalf("%v", r)
		}
	}
	fetch := func(i int) (all []byte, pieces int, err error) {
		stream, err := operate(t, c.configs[i].adminListen()).Backup(t.Context(), &lockpb.BackupRequest{})
		for err == nil {
			var p *lockpb.BackupPiece
			if p, err = stream.Recv(); err == nil {
				all, pieces = append(all, p.Data...), pieces+1
			}
		}
		return all, pieces, err
	}
	var all []byte
	var pieces, leader int
	var err error
	eventually(t, "a leader gives a backup", func() bool {
		leader = c.leader()
		all, pieces, err = fetch(leader)
		return errors.Is(err, io.EOF)
	})
	if pieces < 2 || len(all) < 200*len(blob) {
		t.Fatalf("%d pieces, %d bytes, %v", pieces, len(all), err)
	}
	_, about := restored(t, all, replica.RestoreOptions{})
	if about.Cluster != c.servers[leader].replica.State.Cluster() || about.ClosedFor != DefaultMaxTTL {
		t.Errorf("restored: %+v", about)
	}
	// A follower has all that was acknowledged before, and says so if there is nobody to ask how far that goes.
	follower := (leader + 1) % 3
	c.expectKnown(leader, follower)
	for range 20 {
		token := x.lock(backend.NewRequestID()).Token
		all, _, err := fetch(follower)
		if info, broken := replica.CheckBackup(bytes.NewReader(all)); !errors.Is(err, io.EOF) || broken != nil ||
			info.Revision < token {
			t.Fatalf("backup of a follower up to %d, token %d was acknowledged: %v, %v",
				info.Revision, token, err, broken)
		}
	}
	c.stop(leader)
	c.stop((leader + 2) % 3)
	_, _, err = fetch(follower)
	expectCode(t, err, codes.Unavailable, "")
}
