package main

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/fencelock/fencelock/builtin/embedded"
)

// withServer starts a durable lock server within this process for as long as f runs.
func withServer(ctx context.Context, f func(*embedded.Server) error) (err error) {
	folder, err := os.MkdirTemp("", "fencelock-quickstart-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	server, err := embedded.Start(ctx, embedded.Options{DataDir: folder, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close(context.WithoutCancel(ctx))) }()
	return f(server)
}
