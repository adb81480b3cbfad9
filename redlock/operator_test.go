package redlock

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
)

// startDurable starts n servers that keep their votes, and so vote immediately after a restart. The test can replace their
// files.
func startDurable(t *testing.T, n int) (s servers) {
	t.Helper()
	for range n {
		s = append(s, containers.Redis(t, containers.AsProcess(),
			containers.Args("--appendonly", "yes", "--appendfsync", "always")))
	}
	return s
}

// replace restarts server i with the files in from.
func (s servers) replace(t *testing.T, i int, from string) {
	t.Helper()
	s.stop(t, i)
	folder := s[i].Folder(t)
	if err := errors.Join(os.RemoveAll(folder), os.CopyFS(folder, os.DirFS(from))); err != nil {
		t.Fatal(err)
	}
	s.startAgain(t, i)
}

// The data of one of five servers that keep their votes are replaced: its own of before, or a copy of another server's. Its
// votes are lost, and it votes at once. A hold that has the votes of all servers is not affected; one with a bare majority is
// granted a second time, and its holder is notified at its next renewal.
func TestOldDataOfOneServer(t *testing.T) {
	t.Parallel()
	s := startDurable(t, 5)
	const victim, other = 2, 3
	for name, of := range map[string]int{"a disk that went back": victim, "a copied server": other} {
		t.Run(name, func(t *testing.T) {
			holder, links := s.linked(t, nil)
			rival := s.driver(t, nil)
			take(t, rival, request(name+" before"))
			old := t.TempDir()
			s.stop(t, of)
			if err := os.CopyFS(old, os.DirFS(s[of].Folder(t))); err != nil {
				t.Fatal(err)
			}
			s.startAgain(t, of)
			whole := take(t, holder, request(name+" whole"))
			eventually(t, "all servers vote", func() bool { return s.votes(t, whole.Name) == 5 })
			links[3].Refuse()
			links[4].Refuse()
			bare := take(t, holder, request(name+" bare"))
			if n := s.votes(t, bare.Name); n != 3 {
				t.Fatalf("%d votes, want 3", n)
			}
			s.replace(t, victim, old)
			if n := s.votes(t, bare.Name) + s.votes(t, whole.Name); n != 2+4 {
				t.Errorf("%d votes are left, want 6", n)
			}
			if _, err := rival.Acquire(within(t, 30*time.Second), request(whole.Name)); !errors.Is(err, backend.ErrHeld) {
				t.Errorf("a rival for the hold with all votes: %v, want ErrHeld", err)
			}
			eventually(t, "a rival is granted the hold with a bare majority, which no driver prevents", func() bool {
				_, err := rival.Acquire(within(t, 10*time.Second), request(bare.Name)) // its connection may be broken
				return err == nil
			})
			links[3].Pass()
			links[4].Pass()
			eventually(t, "the holder is notified", func() bool {
				return errors.Is(holder.Renew(within(t, 30*time.Second), []backend.Grant{bare})[0].Err, backend.ErrNotHeld)
			})
			eventually(t, "the hold with all votes has them again", func() bool {
				if err := holder.Renew(within(t, 30*time.Second), []backend.Grant{whole})[0].Err; err != nil {
					t.Fatalf("Renew = %v", err)
				}
				return s.votes(t, whole.Name) == 5
			})
		})
	}
}
