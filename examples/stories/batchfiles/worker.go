package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
)

type worker struct {
	*batch
	number int
	locks  *fencelock.Client
}

// work converts the pending files. The workers meet when all of them have seen all the files.
func (w *worker) work(ctx context.Context, meet func()) error {
	names, err := w.pending()
	meet()
	if err != nil {
		return err
	}
	if w.story.Unsafe {
		for _, name := range names {
			if err := w.convert(ctx, w.number, name); err != nil {
				return err
			}
		}
		return nil
	}

	var later []string
	for _, name := range names {
		lease, err := w.locks.TryAcquire(ctx, lockOf(name))
		if errors.Is(err, fencelock.ErrHeld) {
			later = append(later, name)
			continue
		}
		if err != nil {
			return err
		}
		err = w.convertIfPending(lease.Context(), name)
		if err := errors.Join(err, lease.Release(ctx)); err != nil {
			return err
		}
	}
	for _, name := range later {
		err := w.locks.Do(ctx, lockOf(name), func(ctx context.Context, _ *fencelock.Lease) error {
			return w.convertIfPending(ctx, name)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *worker) convertIfPending(ctx context.Context, name string) error {
	if done, err := w.done(name); done || err != nil {
		return err
	}
	return w.convert(ctx, w.number, name)
}

// batch is a folder of files, and a folder of results.
type batch struct {
	story   *story.Story
	in, out string
	runs    atomic.Int32
}

// pending lists the files without a result, in order.
func (b *batch) pending() (names []string, err error) {
	entries, err := os.ReadDir(b.in)
	for _, e := range entries {
		done, failed := b.done(e.Name())
		err = errors.Join(err, failed)
		if !done {
			names = append(names, e.Name())
		}
	}
	return names, err
}

func (b *batch) done(name string) (bool, error) {
	_, err := os.Lstat(filepath.Join(b.out, name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// convert writes the result of one file, whole or not at all. It stops when ctx ends, as it does when the lease is
// lost.
func (b *batch) convert(ctx context.Context, worker int, name string) error {
	b.runs.Add(1)
	text, err := os.ReadFile(filepath.Join(b.in, name))
	if err != nil {
		return err
	}
	unfinished, err := os.CreateTemp(b.out, ".unfinished-*")
	if err != nil {
		return err
	}
	defer os.Remove(unfinished.Name()) //nolint:errcheck // after the rename there is none
	_, err = unfinished.Write(bytes.ToUpper(text))
	if err := errors.Join(err, unfinished.Close()); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("worker %d: convert %s: %w", worker, name, context.Cause(ctx))
	}
	if err := os.Rename(unfinished.Name(), filepath.Join(b.out, name)); err != nil {
		return err
	}
	b.story.Tell("worker %d converted %s", worker, name)
	return nil
}
