package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/server/replica"
)

// A copy of a data directory starts neither beside the original nor instead of it, unless Moved is set. A renamed
// directory starts, and so does a directory of an earlier version.
func TestCopiedDirectoryDoesNotStart(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux detects a copy")
	}
	run := func(c Config) error {
		c.Log = quiet(t)
		s, err := Start(t.Context(), c)
		if err != nil {
			return err
		}
		return s.Close(context.Background())
	}
	in := t.TempDir()
	original, copied := filepath.Join(in, "original"), filepath.Join(in, "copied")
	if err := run(Config{DataDir: original}); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(copied, withoutSockets{os.DirFS(original)}); err != nil {
		t.Fatal(err)
	}
	var refused *replica.CopiedError
	if err := run(Config{DataDir: copied}); !errors.As(err, &refused) || refused.Dir != copied ||
		!strings.Contains(err.Error(), "--moved") {
		t.Errorf("a copy: %v", err)
	}
	if err := run(Config{DataDir: original}); err != nil {
		t.Errorf("the original: %v", err)
	}
	if err := run(Config{DataDir: copied, Moved: true}); err != nil {
		t.Errorf("a copy that replaces the original: %v", err)
	}
	if err := run(Config{DataDir: copied}); err != nil {
		t.Errorf("the copy that replaced the original, once more: %v", err)
	}
	renamed := filepath.Join(in, "renamed")
	if err := os.Rename(original, renamed); err != nil {
		t.Fatal(err)
	}
	if err := run(Config{DataDir: renamed}); err != nil {
		t.Errorf("renamed: %v", err)
	}
	if err := os.Remove(filepath.Join(renamed, "node-id-place")); err != nil {
		t.Fatal(err)
	}
	if err := run(Config{DataDir: renamed}); err != nil {
		t.Errorf("of an earlier version: %v", err)
	}
}

// filesIn returns a text that differs if the files in a directory differ.
func filesIn(dir string) (string, error) {
	all := ""
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		about, err := d.Info()
		if err == nil {
			all += fmt.Sprintln(path, about.Size(), about.ModTime())
		}
		return err
	})
	return all, err
}

// copyAtRest copies the data of a running server, as a snapshot of its disk does. If the server writes meanwhile,
// such as a snapshot after the feature level has risen, the copy mixes two instants: copyAtRest copies again.
func copyAtRest(t testing.TB, dir string) (copied string) {
	t.Helper()
	eventually(t, "a copy of one instant", func() bool {
		before, failed := filesIn(dir)
		copied = filepath.Join(t.TempDir(), "copied")
		err := os.CopyFS(copied, withoutSockets{os.DirFS(dir)})
		after, err2 := filesIn(dir)
		return errors.Join(failed, err, err2) == nil && before == after
	})
	return copied
}

// keepBack copies the data of a running server. The function back restores the disk to that copy, except for the
// files that identify the disk.
func keepBack(t testing.TB, dir string) (back func()) {
	t.Helper()
	copied := copyAtRest(t, dir)
	identity := func(name string) bool { return name == "node-id" || name == "node-id-place" }
	return func() {
		files, err := os.ReadDir(dir)
		for _, f := range files {
			if err == nil && !identity(f.Name()) {
				err = os.RemoveAll(filepath.Join(dir, f.Name()))
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		err = fs.WalkDir(os.DirFS(copied), ".", func(path string, d fs.DirEntry, err error) error {
			if err != nil || identity(path) {
				return err
			}
			if d.IsDir() {
				return os.MkdirAll(filepath.Join(dir, path), 0o700)
			}
			text, err := os.ReadFile(filepath.Join(copied, path))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, path), text, 0o600)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// The disk of one of three members goes back in time while the leader is down, and the third member never had the
// acknowledged entries: no running member knows better. When the leader returns, it does not drop entries that it
// acknowledged: it stops, and says why.
func TestLeaderOfAnotherHistoryStops(t *testing.T) {
	t.Parallel()
	rounds(t, 1, 20, anotherHistory)
}

func anotherHistory(t *testing.T, _ int) {
	c := newCluster(t, 3, calm)
	x := newCaller(t, c.connect)
	x.unlock(x.lock("before"))
	var leader, old, behind int
	var back func()
	var acknowledged uint64
	eventually(t, "one leads all the time", func() bool { // otherwise both histories may have the same terms
		leader = c.leader()
		old, behind = (leader+1)%3, (leader+2)%3
		term := c.servers[leader].replica.Status().Term
		back = c.keepBack(old)
		c.stop(behind)
		for range 10 {
			x.unlock(x.lock("x"))
		}
		end := c.servers[leader].replica.Status()
		if acknowledged = end.CommitIndex; end.Term != term || c.leader() != leader {
			c.start(behind)
			return false
		}
		return true
	})
	c.stop(old)
	c.stop(leader)
	back()
	c.start(old)
	c.start(behind)
	y := newCaller(t, c.connect) // the session of x is not known there
	y.lock("y")
	c.start(leader)
	eventually(t, "the leader of before stops", func() bool { return c.servers[leader].Err() != nil })
	var damage *replica.CorruptError
	err := c.servers[leader].Err()
	if !errors.As(err, &damage) || damage.Index == 0 || damage.Index > acknowledged ||
		!strings.Contains(err.Error(), "two histories") {
		t.Errorf("it stops with %v; entries up to %d were acknowledged", err, acknowledged)
	}
	c.servers[leader].Close(context.Background())
	c.servers[leader] = nil
	// Its data is intact, and has every acknowledged entry.
	if x, err := replica.Verify(c.configs[leader].DataDir); err != nil || x.Last < acknowledged {
		t.Errorf("its data: %+v, %v", x, err)
	}
}

// As in TestLeaderOfAnotherHistoryStops, but the entries of both histories have the same terms and indexes, since the
// reverted member was elected, and another process is elected in the same term. A member that gets entries of both stops.
func TestTermWithTwoLeaders(t *testing.T) {
	t.Parallel()
	for attempts := 1; !twoLeaders(t); attempts++ {
		if attempts == 3 {
			t.Fatal("the two histories have different terms each time")
		}
	}
}

// twoLeaders returns false if an election that nobody asked for gives the histories different terms.
func twoLeaders(t *testing.T) bool {
	c := newCluster(t, 3, calm)
	x := newCaller(t, c.connect)
	x.unlock(x.lock("before"))
	leader := c.leader()
	old, behind := (leader+1)%3, (leader+2)%3
	back := c.keepBack(old)
	c.stop(behind)
	c.lead(old)
	x.unlock(x.lock("x"))
	there := c.servers[old].replica.Status()
	eventually(t, "both have all", func() bool { return c.servers[leader].replica.Applied() >= there.CommitIndex })
	c.stop(leader)
	c.stop(old)
	back()
	c.start(old)
	c.start(behind)
	y := newCaller(t, c.connect) // the session of x is not known there
	for c.servers[c.leader()].replica.Status().CommitIndex <= there.LastIndex {
		y.unlock(y.lock("y"))
	}
	if here := c.servers[c.leader()].replica.Status(); here.Term != there.Term {
		return false
	}
	c.start(leader)
	eventually(t, "a member stops", func() bool { return c.servers[leader].Err() != nil })
	if err := c.servers[leader].Err(); !strings.Contains(err.Error(), "two histories") {
		t.Errorf("it stops with %v", err)
	}
	_ = c.servers[leader].Close(t.Context()) // it reports why the member stopped
	c.servers[leader] = nil
	y.unlock(y.lock("y"))
	return true
}

// withoutSockets hides the sockets of a directory, which cannot be copied.
type withoutSockets struct{ fs.FS }

func (w withoutSockets) ReadDir(name string) ([]fs.DirEntry, error) {
	all, err := fs.ReadDir(w.FS, name)
	return slices.DeleteFunc(all, func(e fs.DirEntry) bool { return e.Type()&fs.ModeSocket != 0 }), err
}
