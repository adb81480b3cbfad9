package main

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"

	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/metrics"
)

// auditing are the options of the audit log.
type auditing struct {
	dir   string
	locks bool
	keep  int

	log *audit.Log // nil without a directory
}

// maxAuditFiles bounds --audit-files.
const maxAuditFiles = 1 << 20

func (a *auditing) define(o *options) {
	o.StringVar(&a.dir, "audit", "", "write an audit log, as lines of JSON, to a `DIRECTORY` that no other process "+
		"uses: denials, forced releases, expired locks, changes of rules and members, backups, ended sessions; see "+
		"docs/SECURITY.md. Events that cannot be written are dropped and counted")
	o.BoolVar(&a.locks, "audit-locks", false, "also write each acquire and release to the audit log")
	o.IntVar(&a.keep, "audit-files", 16, "keep `N` full audit files of "+strconv.Itoa(audit.FileBytes>>20)+" MiB")
}

func (a *auditing) check() error {
	if a.keep < 1 || a.keep > maxAuditFiles {
		return fmt.Errorf("--audit-files %d: want 1 to %d", a.keep, maxAuditFiles)
	}
	return nil
}

// open opens the directory, if there is to be one. end writes the queued events.
func (a *auditing) open(log *slog.Logger) (end func(), err error) {
	if a.dir == "" {
		return func() {}, nil
	}
	if a.log, err = audit.Open(audit.Options{Dir: a.dir, Locks: a.locks, Keep: a.keep, Log: log}); err != nil {
		return nil, fmt.Errorf("--audit %s: %w", a.dir, err)
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), stopTime)
		defer cancel()
		if err := a.log.Close(ctx); err != nil {
			log.Error("audit events are dropped", "error", err)
		}
	}, nil
}

// export has m, which may be nil, show how many events were dropped.
func (a *auditing) export(m *metrics.Metrics) {
	if m != nil && a.log != nil {
		m.Audit(a.log.Dropped)
	}
}
