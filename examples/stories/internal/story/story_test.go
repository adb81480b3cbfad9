package story_test

import (
	"context"
	"errors"
	"io"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNothingIsLeft(t *testing.T) {
	var dir, backend string
	err := story.Run(t.Context(), story.Options{Out: io.Discard}, func(ctx context.Context, s *story.Story) error {
		dir, backend = s.Dir, s.Backend
		db, err := s.Database(ctx)
		if err != nil {
			return err
		}
		if _, err := db.ExecContext(ctx, `CREATE TABLE t (n integer)`); err != nil {
			return err
		}
		locks, err := s.Open(ctx, fencelock.Correctness, "ann")
		if err != nil {
			return err
		}
		_, err = locks.Acquire(ctx, "left")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder of the story: %v; want %v", err, os.ErrNotExist)
	}
	if _, err := fencelock.Open(
		t.Context(), backend, fencelock.Correctness, nil,
	); !errors.Is(err, fencelock.ErrUnavailable) {
		t.Errorf("the server of the story: %v; want %v", err, fencelock.ErrUnavailable)
	}
}

func TestNoServer(t *testing.T) {
	// Port 1 is reserved and nobody listens there.
	o := story.Options{Backend: "redis://127.0.0.1:1", Dir: t.TempDir(), Out: io.Discard}
	err := story.Run(t.Context(), o, func(ctx context.Context, s *story.Story) error {
		_, err := s.Open(ctx, fencelock.Efficiency, "ann")
		return err
	})
	if !errors.Is(err, fencelock.ErrUnavailable) {
		t.Errorf("run: %v; want %v", err, fencelock.ErrUnavailable)
	}
}
