// Package standardlog keeps the bundled server from changing package log of the program around it. A dependency of
// raft-wal, github.com/coreos/pkg/capnslog, takes the output of package log over when it is initialized, and removes
// flags and prefix. This package is imported beside raft-wal and restores them right after.
package standardlog

import (
	_ "github.com/coreos/pkg/capnslog" // is initialized before

	"github.com/fencelock/fencelock/internal/standardlog/kept"
)

func init() { kept.Restore() }
