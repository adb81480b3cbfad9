//go:build unix

package main

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/fencelock/fencelock/internal/server"
)

func TestVerify(t *testing.T) {
	dir := t.TempDir()
	s, err := server.Start(t.Context(), server.Config{DataDir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := s.WaitLeader(ctx); err != nil {
		t.Fatal(err)
	}
	start(t, "verify", "--data-dir", dir).expectExit(exitNoInput, "in use")
	if err := s.Close(ctx); err != nil {
		t.Fatal(err)
	}
	all := objects[verified](t, succeed(t, "verify", "--data-dir", dir, "--json"))
	if len(all) != 1 || all[0].NodeID == "" || all[0].ClusterID == "" || all[0].Last == 0 || all[0].Unsummed != 0 {
		t.Errorf("verified: %+v", all)
	}
	logs, err := filepath.Glob(filepath.Join(dir, "wal/*.wal"))
	if err != nil || len(logs) != 1 {
		t.Fatal(logs, err)
	}
	text, err := os.ReadFile(logs[0])
	if err != nil {
		t.Fatal(err)
	}
	text[bytes.Index(text, []byte(all[0].ClusterID))] ^= 1
	if err := os.WriteFile(logs[0], text, 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, "verify", "--data-dir", dir).expectExit(exitDamaged, logs[0], "log entry")
	start(t, "serve", "--data-dir", dir, "--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0").
		expectExit(exitUnavailable, logs[0])
	start(t, "verify", "--data-dir", filepath.Join(dir, "none")).expectExit(exitNoInput)
}
