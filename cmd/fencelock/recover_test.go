//go:build unix

package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server"
)

func TestRecover(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	s, err := server.Start(t.Context(), server.Config{DataDir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := s.WaitLeader(ctx); err != nil {
		t.Fatal(err)
	}
	start(t, "recover", "--data-dir", dir).expectExit(exitNoCreate, "in use")
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	p := start(t, "recover", "--data-dir", dir)
	p.await("fencelock: after its start, the server refuses clients for 1h")
	p.expectExit(exitOK)
	start(t, "recover", "--data-dir", dir).expectExit(exitNoCreate, dir+".lost exists")
	start(t, "recover", "--closed-for", "-1s").expectExit(exitUsage, "negative")
	start(t, "recover", "x").expectExit(exitUsage, "no arguments")
}

// A restore beside a running server of the cluster does nothing, unless --supersede ends the generation of that
// server.
func TestRestoreBesideAServerThatRuns(t *testing.T) {
	t.Parallel()
	at := freeport.Addresses(t, 2)
	s, err := server.Start(t.Context(), server.Config{
		DataDir: t.TempDir(), PeerListen: at[0], Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := s.WaitLeader(ctx); err != nil {
		t.Fatal(err)
	}
	file, dir := filepath.Join(t.TempDir(), "backup"), filepath.Join(t.TempDir(), "data")
	out, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Backup(t.Context(), out), out.Close()); err != nil {
		t.Fatal(err)
	}
	start(t, "restore", file, "--data-dir", dir, "--join", at[0]).expectExit(exitUnavailable, "answers at "+at[0])
	p := start(t, "restore", file, "--data-dir", dir, "--join", at[0]+","+at[1], "--supersede")
	p.expectExit(exitOK)
	if out := p.output(); !strings.Contains(out, ", generation 1.") {
		t.Errorf("restored:\n%s", out)
	}
}
