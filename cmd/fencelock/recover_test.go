package main

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"

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
	p.await("fencelock: when started it serves nobody for 24h")
	p.expectExit(exitOK)
	start(t, "recover", "--data-dir", dir).expectExit(exitNoCreate, dir+".lost is there")
	start(t, "recover", "--closed-for", "-1s").expectExit(exitUsage, "negative")
	start(t, "recover", "x").expectExit(exitUsage, "no arguments")
}
