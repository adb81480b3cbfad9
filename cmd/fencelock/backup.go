package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/server/replica"
)

const backupHelp = `Usage: fencelock backup FILE [options]
       fencelock backup --dir DIR [--every D] [--keep N] [options]

Writes all that a cluster of bundled servers keeps to FILE: sessions, locks, waiters and the count of tokens, with
everything that was acknowledged to anybody before. The locks go on meanwhile. FILE is replaced once the backup is
complete and was checked; it is of use to nobody who must not know the names and owners of locks. It comes from a member
that does not lead, if there is one.

A cluster of three that loses one machine needs no backup: see "fencelock help member". It is for the loss of most.

Options (durations like 500ms, 30s, 5m):

  --dir DIR      write to a new file in DIR, which is made if it does not exist: fencelock-20260131T235959Z.backup, by
                 the time in UTC
  --every D      go on until INT or TERM, and make one each D, at least 1s: one at once, and one after D. One that fails
                 is told on standard error, and the next one is tried in its time
  --keep N       after each that is made, delete the oldest files of such names in DIR, so that N are left. Default: all
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
	File     string `json:"file"`
}

// backupMain is "fencelock backup".
func backupMain(args []string) int {
	s, f := newLook("backup")
	var to schedule
	f.StringVar(&to.dir, "dir", "", "")
	f.DurationVar(&to.every, "every", 0, "")
	f.IntVar(&to.keep, "keep", 0, "")
	err := s.parseSome(f, args)
	given := givenOf(f)
	switch {
	case err != nil:
	case to.dir == "" && (given["every"] || given["keep"]):
		err = errors.New("--every and --keep need --dir")
	case to.dir == "" && len(s.args) == 0:
		err = errors.New("FILE is missing")
	case to.dir == "" && len(s.args) > 1, to.dir != "" && len(s.args) > 0:
		err = fmt.Errorf("%q: backup takes one FILE, or --dir", s.args[len(s.args)-1])
	case given["every"] && to.every < time.Second:
		err = fmt.Errorf("--every %v: it is less than 1s", to.every)
	case given["keep"] && to.keep < 1:
		err = fmt.Errorf("--keep %d: it is less than 1", to.keep)
	}
	return s.runAdmin(err, backupHelp, func(ctx context.Context, admin *builtin.Admin) error {
		out := s.newPrinter("CLUSTER", "REVISION", "BYTES", "FILE")
		if to.dir == "" {
			return s.backUp(ctx, admin, out, s.args[0])
		}
		if err := os.MkdirAll(to.dir, 0o700); err != nil {
			return fileError{err}
		}
		return to.run(ctx, func(ctx context.Context, file string) error { return s.backUp(ctx, admin, out, file) })
	})
}

// backUp makes one backup and prints what it is.
func (s *lookSettings) backUp(ctx context.Context, admin *builtin.Admin, out *printer, file string) error {
	info, size, err := fetchBackup(ctx, admin, file)
	if err != nil {
		return err
	}
	done := backup{Cluster: info.Cluster, Revision: info.Revision, Bytes: size, File: file}
	if err := out.print(done, []string{done.Cluster, fmt.Sprint(done.Revision), fmt.Sprint(size), file}); err != nil {
		return err
	}
	return out.flush()
}

// schedule is a directory of backups.
type schedule struct {
	dir   string
	every time.Duration // 0: once
	keep  int           // 0: all
}

// backupName is the form of the names of its files, which sort as their times do.
const backupName = "fencelock-20060102T150405Z.backup"

// run makes one backup, or one after the other until ctx ends or a signal comes.
func (d *schedule) run(ctx context.Context, backUp func(ctx context.Context, file string) error) error {
	one := func() error {
		err := backUp(ctx, filepath.Join(d.dir, time.Now().UTC().Format(backupName)))
		if err == nil {
			err = d.prune()
		}
		return err
	}
	if d.every == 0 {
		return one()
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	tick := time.NewTicker(d.every)
	defer tick.Stop()
	for {
		if err := one(); err != nil && ctx.Err() == nil {
			say("%v", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// prune deletes the oldest backups, so that keep are left.
func (d *schedule) prune() error {
	if d.keep == 0 {
		return nil
	}
	entries, err := os.ReadDir(d.dir) // sorted by name
	if err != nil {
		return fileError{err}
	}
	var all []string
	for _, e := range entries {
		if _, err := time.Parse(backupName, e.Name()); err == nil {
			all = append(all, e.Name())
		}
	}
	for _, name := range all[:max(0, len(all)-d.keep)] {
		if err := os.Remove(filepath.Join(d.dir, name)); err != nil {
			return fileError{err}
		}
	}
	return nil
}

// fileError is a file that cannot be written.
type fileError struct{ error }

func (e fileError) Unwrap() error { return e.error }

// fetchBackup replaces file by a backup that is complete, or leaves it as it is.
func fetchBackup(ctx context.Context, admin *builtin.Admin,
	file string) (info replica.BackupInfo, size int64, err error) {
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
	if info, err = replica.CheckBackup(f); err != nil {
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
