// Command batchfiles lets several workers convert the files of a folder, each file once.
//
//	go run ./examples/stories/batchfiles
//	go run ./examples/stories/batchfiles -unsafe
//
// Tier: efficiency. The result of a conversion depends on the file alone, and is put in its place by a rename: a second
// run writes the same content and wastes an hour of work. So any driver will do. If a second run did harm, by adding to
// a sum for example, the tier would be correctness and the sum would check the token: see examples/stories/webhook.
//
// Each file has its own lock. A worker that finds one held goes on to the next file, and comes back at the end to
// wait for the skipped files: should their worker die, its locks end with their TTL, and another converts the
// file. A worker that gets a lock looks for the result first, since the last holder may have written it.
//
// With -unsafe there are no locks: every worker converts every file.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
)

const (
	files   = 6
	workers = 3
)

func main() { story.Main(tell) }

func tell(ctx context.Context, s *story.Story) error {
	b, err := open(s)
	if err != nil {
		return err
	}
	names, err := b.pending()
	if err != nil {
		return err
	}
	s.Tell("%d files are to be converted, by %d workers", len(names), workers)

	var hung *fencelock.Lease
	if !s.Unsafe {
		if hung, err = hang(ctx, s, names[0]); err != nil {
			return err
		}
	}
	var all []*worker
	for i := range workers {
		locks, err := s.Open(ctx, fencelock.Efficiency, fmt.Sprintf("worker-%d", i))
		if err != nil {
			return err
		}
		all = append(all, &worker{batch: b, number: i, locks: locks})
	}
	if err := story.Together(len(all), func(i int, meet func()) error { return all[i].work(ctx, meet) }); err != nil {
		return err
	}
	if hung != nil {
		if !errors.Is(hung.Err(), fencelock.ErrLost) {
			return fmt.Errorf("the worker that hung has not learnt of its loss: %v", hung.Err())
		}
		s.Tell("the worker that hung is back, looks at its lease, and stops: %v", hung.Err())
	}

	if names, err = b.pending(); err != nil {
		return err
	}
	runs := int(b.runs.Load())
	if s.Unsafe {
		s.Tell("%d files are left; there were %d conversions, %d of them for nothing", len(names), runs, runs-files)
	} else {
		s.Tell("%d files are left; there were %d conversions", len(names), runs)
	}
	if len(names) > 0 || (runs == files) == s.Unsafe {
		return fmt.Errorf("%d files are left after %d conversions with -unsafe=%t", len(names), runs, s.Unsafe)
	}
	return nil
}

// hang is a worker that takes a file and does no more: it neither renews the lock nor releases it.
func hang(ctx context.Context, s *story.Story, name string) (*fencelock.Lease, error) {
	locks, err := s.Open(ctx, fencelock.Efficiency, "worker-that-hangs")
	if err != nil {
		return nil, err
	}
	lease, err := locks.TryAcquire(ctx, lockOf(name), fencelock.TTL(story.ShortTTL(locks)), fencelock.NoRenew())
	if err == nil {
		s.Tell("another worker has taken %s, and hangs", name)
	}
	return lease, err
}

// lockOf is the name of the lock on a file.
func lockOf(name string) string { return "batch/" + name }

// open makes the folders, and the files to be converted.
func open(s *story.Story) (*batch, error) {
	b := &batch{story: s, in: filepath.Join(s.Dir, "in"), out: filepath.Join(s.Dir, "out")}
	for _, dir := range []string{b.in, b.out} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, err
		}
	}
	for i := range files {
		name := fmt.Sprintf("order-%d", i)
		if err := os.WriteFile(filepath.Join(b.in, name), []byte("the text of "+name), 0o600); err != nil {
			return nil, err
		}
	}
	return b, nil
}
