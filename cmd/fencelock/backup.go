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

Writes the data of a cluster of bundled servers to FILE: sessions, locks, waiters and the token counter, including every
change that was acknowledged before. Locks are not affected. FILE is replaced once the backup is complete and has been
checked. It contains lock names and owners, so keep it private. The data comes from a follower, if there is one.

A backup is for the loss of most members. If a cluster of three loses one, see "fencelock help member" instead.

Options (durations like 500ms, 30s, 5m):

{options}

Exit codes:

    0  done
   64  the command line is invalid
   69  no leader can be reached, or the backup was interrupted
   73  FILE cannot be written
`

// backup is the printed form of a backup.
type backup struct {
	Cluster  string `json:"cluster"`
	Revision uint64 `json:"revision,string"`
	Bytes    int64  `json:"bytes,string"`
	File     string `json:"file"`
}

func defineBackup(o *options) func([]string) error {
	var to schedule
	o.StringVar(&to.dir, "dir", "", "write to a new file in `DIR`, which is created if it does not exist: "+
		"fencelock-20260131T235959Z.backup, by the time in UTC")
	o.DurationVar(&to.every, "every", 0, "make a backup immediately, and then every `DURATION`, at least 1s, until "+
		"INT or TERM. If a backup fails, an error is printed to standard error, and the next backup is made as "+
		"scheduled")
	o.IntVar(&to.keep, "keep", 0, "after each backup, keep the newest `N` backup files in DIR and delete the others; "+
		"the default is to keep all")
	s := o.administer("backup")
	return func(args []string) error { return s.backUpTo(o, &to, args) }
}

func (s *lookSettings) backUpTo(o *options, to *schedule, args []string) error {
	err := s.parseSome(args)
	switch {
	case err != nil:
	case to.dir == "" && (o.given("every") || o.given("keep")):
		err = errors.New("--every and --keep need --dir")
	case to.dir == "" && len(s.args) == 0:
		err = errors.New("FILE is missing")
	case to.dir == "" && len(s.args) > 1, to.dir != "" && len(s.args) > 0:
		err = fmt.Errorf("%q: backup takes one FILE, or --dir", s.args[len(s.args)-1])
	case o.given("every") && to.every < time.Second:
		err = fmt.Errorf("--every %v: want at least 1s", to.every)
	case o.given("keep") && to.keep < 1:
		err = fmt.Errorf("--keep %d: want at least 1", to.keep)
	}
	return s.runAdmin(err, func(ctx context.Context, admin *builtin.Admin) error {
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

// backUp makes one backup and prints its description.
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

// prune deletes the oldest backups, down to keep.
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

// fetchBackup replaces file by a complete backup, or leaves it as it is.
func fetchBackup(ctx context.Context, admin *builtin.Admin,
	file string) (info replica.BackupInfo, size int64, err error) {
	f, err := os.CreateTemp(filepath.Dir(file), filepath.Base(file)+".*.part")
	if err != nil {
		return info, 0, fileError{err}
	}
	defer func() {
		f.Close()
		if err != nil {
			_ = os.Remove(f.Name()) // a partial backup is useless
		}
	}()
	if err := admin.Backup(ctx, fileWriter{f}); err != nil {
		return info, 0, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return info, 0, fileError{err}
	}
	if info, err = replica.CheckBackup(f); err != nil {
		return info, 0, fmt.Errorf("%w: the stream: %w", backend.ErrUnavailable, err)
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

// fileWriter marks its errors, to distinguish them from errors of the cluster.
type fileWriter struct{ f *os.File }

func (w fileWriter) Write(p []byte) (int, error) {
	n, err := w.f.Write(p)
	if err != nil {
		err = fileError{err}
	}
	return n, err
}
