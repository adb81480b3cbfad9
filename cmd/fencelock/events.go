package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/gateway"
	"github.com/fencelock/fencelock/internal/poll"
)

const watchHelp = `Usage: fencelock watch NAME [options]

Prints the changes of the lock NAME, one line for each event, until INT or TERM. Every event has a revision, from which
a later watch can continue without a gap; "fencelock holder NAME --json" shows the current revision. If the backend has
no watch, fencelock polls once a second: then there is no history, short holds may be missed, and the reason for the end
of a hold is unknown.

Options:

{options}

Services store a limited history. If the events after REVISION are no longer stored, fencelock prints the revision from
which to continue; check first who holds NAME now.

Exit codes:

    0  ended by INT or TERM
   64  the command line is invalid, or the backend cannot watch
   66  the events after REVISION are no longer stored
   69  the lock service cannot be reached, or is not configured for locks
   77  the rules of the lock service deny the request
`

// eventColumns are wide enough for most rows: later ones are unknown when a line is printed.
const eventColumns = "%-20s  %-12s  %-14s  %-12s  %-40s  %-20s  %s\n"

func defineWatch(o *options) func([]string) error {
	since := o.Uint64("since", 0, "begin with the events after `REVISION`; the default is to begin now")
	s := o.look("watch")
	return func(args []string) error {
		return s.run(s.parse(args, "NAME"), func(ctx context.Context) error {
			ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
			defer stop()
			return s.watch(ctx, s.args[0], *since)
		})
	}
}

func (s *lookSettings) watch(ctx context.Context, name string, since uint64) error {
	needs := backend.CapWatch
	if since != 0 {
		needs |= backend.CapWatchReplay
	}
	d, closeDriver, err := open[backend.Watcher](ctx, s, needs)
	if errors.Is(err, backend.ErrUnsupported) && since == 0 {
		if looks, end, failed := open[backend.Inspector](ctx, s, backend.CapInspect); failed == nil {
			d, closeDriver, err = poll.Watcher{Inspector: looks}, end, nil
			say("watch: this backend has no history, so fencelock polls once a second: short holds may be missed, " +
				"and how a hold ended is not known")
		}
	}
	if err != nil {
		return err
	}
	defer closeDriver()
	show := showEvent
	if s.json {
		lines := json.NewEncoder(os.Stdout)
		show = func(e *gateway.Change) error { return lines.Encode(e) }
	} else {
		fmt.Printf(eventColumns, "TIME", "REVISION", "EVENT", "TOKEN", "OWNER", "BY", "REASON")
	}
	last := since
	for e, err := range d.Watch(ctx, name, since) {
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, backend.ErrCompacted):
			return s.compacted(ctx, d, name, last, err)
		case err != nil && last != 0:
			return fmt.Errorf("%w; continue with --since %d", err, last)
		case err != nil:
			return err
		}
		last = e.Revision
		if err := show(gateway.ChangeOf(&e)); err != nil {
			return err
		}
	}
	return nil
}

func showEvent(e *gateway.Change) error {
	token := ""
	if e.FencingToken != 0 {
		token = strconv.FormatUint(e.FencingToken, 10)
	}
	at := ""
	if e.At != 0 {
		at = time.UnixMilli(e.At).UTC().Format(time.RFC3339)
	}
	_, err := fmt.Printf(eventColumns, cell(at),
		strconv.FormatUint(e.Revision, 10), cell(e.Type), cell(token), cell(e.OwnerID),
		cell(cmp.Or(e.By, e.Principal)), cell(e.Reason))
	return err
}

// compacted explains how to continue after a gap in the history.
func (s *lookSettings) compacted(ctx context.Context, d backend.Watcher, name string, last uint64, err error) error {
	again := "watch it from now on, without --since"
	if i, ok := d.(backend.Inspector); ok {
		ctx, cancel := context.WithTimeout(ctx, attemptTime)
		defer cancel()
		if now, failed := i.Look(ctx, name); failed == nil {
			again = fmt.Sprintf("check who holds it now (fencelock holder), and continue with --since %d", now.Revision)
		}
	}
	return fmt.Errorf("%w; the events of %q after revision %d are no longer stored: %s", err, name, last, again)
}
