package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/server"
)

const backupHelp = `Usage: fencelock backup FILE [options]

Writes all that a cluster of bundled servers keeps to FILE: sessions, locks, waiters and the count of tokens, with
everything that was acknowledged to anybody before. The locks go on meanwhile. FILE is replaced once the backup is
complete and was checked; it is of use to nobody who must not know the names and owners of locks.

A cluster of three that loses one machine needs no backup: see "fencelock help member". It is for the loss of most.

Options:

` + lookOptions + `
Exit codes:

    0  done
   64  the command line makes no sense
   69  no leader can be reached, or it did not answer to the end
   73  FILE cannot be written
`

// backup is what is printed of one.
type backup struct {
	Cluster  string `json:"cluster"`
	Revision uint64 `json:"revision,string"`
	Bytes    int64  `json:"bytes,string"`
}

// backupMain is "fencelock backup".
func backupMain(args []string) int {
	s, f := newLook("backup")
	return s.run(s.parse(f, args, "FILE"), backupHelp, func(ctx context.Context) error { return s.backUp(ctx, s.args[0]) })
}

func (s *lookSettings) backUp(ctx context.Context, file string) error {
	admin, err := builtin.OpenAdmin(s.backend)
	if err != nil {
		return err
	}
	info, size, err := fetchBackup(ctx, admin, file)
	if err != nil {
		return err
	}
	out := s.newPrinter("CLUSTER", "REVISION", "BYTES")
	done := backup{Cluster: info.Cluster, Revision: info.Revision, Bytes: size}
	if err := out.print(done, []string{done.Cluster, fmt.Sprint(done.Revision), fmt.Sprint(size)}); err != nil {
		return err
	}
	return out.flush()
}

// fileError is a file that cannot be written.
type fileError struct{ error }

func (e fileError) Unwrap() error { return e.error }

// fetchBackup replaces file by a backup that is complete, or leaves it as it is.
func fetchBackup(ctx context.Context, admin *builtin.Admin, file string) (info server.BackupInfo, size int64, err error) {
	f, err := os.CreateTemp(filepath.Dir(file), filepath.Base(file)+".*.part")
	if err != nil {
		return info, 0, fileError{err}
	}
	defer func() {
		f.Close()
		if err != nil {
			_ = os.Remove(f.Name()) // what is left of it is of no use to anybody
		}
	}()
	if err := admin.Backup(ctx, fileWriter{f}); err != nil {
		return info, 0, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return info, 0, fileError{err}
	}
	if info, err = server.CheckBackup(f); err != nil {
		return info, 0, fmt.Errorf("%w: what it sent: %w", backend.ErrUnavailable, err)
	}
	about, err := f.Stat()
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		return info, 0, fileError{err}
	}
	return info, about.Size(), nil
}

// fileWriter tells its errors from those of the cluster.
type fileWriter struct{ f *os.File }

func (w fileWriter) Write(p []byte) (int, error) {
	n, err := w.f.Write(p)
	if err != nil {
		err = fileError{err}
	}
	return n, err
}
