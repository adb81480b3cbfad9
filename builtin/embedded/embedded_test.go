package embedded_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/embedded"
	"github.com/fencelock/fencelock/builtin/server"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t testing.TB, dir string) *embedded.Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := embedded.Start(ctx, embedded.Options{DataDir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestTokensIncreaseAcrossStarts(t *testing.T) {
	dir := t.TempDir()
	var last uint64
	for range 3 {
		s := start(t, dir)
		locks, err := fencelock.ForCorrectness(s.Driver(nil), nil)
		if err != nil {
			t.Fatal(err)
		}
		lease, err := locks.Acquire(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		if token := uint64(lease.Token()); token <= last {
			t.Errorf("token %d after %d", token, last)
		} else {
			last = token
		}
		for _, closer := range []func(context.Context) error{lease.Release, locks.Close, s.Close} {
			if err := closer(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestLeaseOutlivesARestart(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir)
	d := s.Driver(nil)
	r := backend.Request{Name: "x", Owner: "a", RequestID: backend.NewRequestID(), TTL: time.Minute}
	if _, err := d.Acquire(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	// The server ends first, as in a crash: the client cannot give anything back.
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	_ = d.Close(ctx)
	cancel()
	s = start(t, dir)
	defer s.Close(context.Background())
	d = s.Driver(nil)
	defer d.Close(context.Background())
	info, err := d.Look(t.Context(), "x")
	if err != nil || len(info.Holders) != 1 || info.Holders[0].HoldID != r.HoldID {
		t.Errorf("after a restart within the TTL the holder is %+v, %v", info, err)
	}
}

func TestNoFolder(t *testing.T) {
	if _, err := embedded.Start(t.Context(), embedded.Options{}); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("start without a folder: %v, want ErrInvalidOption", err)
	}
}

func Example() {
	dir, err := os.MkdirTemp("", "locks")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	ctx := context.Background()
	server, err := embedded.Start(ctx, embedded.Options{DataDir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.Close(ctx)
	locks, err := fencelock.ForCorrectness(server.Driver(nil), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locks.Close(ctx)
	err = locks.Do(ctx, "accounts/42", func(_ context.Context, lease *fencelock.Lease) error {
		fmt.Println("fenced:", lease.Token().Exclusive())
		return nil
	})
	fmt.Println(err)
	// Output:
	// fenced: true
	// <nil>
}

func TestBackup(t *testing.T) {
	first := start(t, t.TempDir())
	token := func(s *embedded.Server) uint64 {
		t.Helper()
		locks, err := fencelock.ForCorrectness(s.Driver(nil), nil)
		if err != nil {
			t.Fatal(err)
		}
		lease, err := locks.Acquire(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(lease.Release(t.Context()), locks.Close(t.Context())); err != nil {
			t.Fatal(err)
		}
		return uint64(lease.Token())
	}
	var b bytes.Buffer
	if err := first.Backup(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	last := token(first)
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := first.Backup(t.Context(), &bytes.Buffer{}); err == nil {
		t.Error("a server that is closed makes a backup")
	}
	dir := filepath.Join(t.TempDir(), "restored")
	if _, err := server.Restore(dir, &b, server.RestoreOptions{ClosedFor: -1}); err != nil {
		t.Fatal(err)
	}
	second := start(t, dir)
	if next := token(second); next <= last {
		t.Errorf("token %d after the restore; %d was issued after the backup", next, last)
	}
	if err := second.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
