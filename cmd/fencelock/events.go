package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/fencelock/fencelock/backend"
)

const watchHelp = `Usage: fencelock watch NAME [options]

Prints what happens to the lock NAME, a line for each event, until INT or TERM. Every event has a revision, from which a
later watch can go on without a gap; "fencelock holder NAME --json" tells the present one.

Options:

  --since REV    begin after the revision REV, with what has happened meanwhile. Default: from now on
` + lookOptions + `
Services keep a limited history. If what happened after REV is no longer kept, fencelock says so, and from which
revision to go on, after a look at who holds NAME now.

Exit codes:

    0  ended by INT or TERM
   64  the command line makes no sense, or the backend cannot watch
   66  what happened after REV is no longer kept
   69  the lock service cannot be reached, or is not fit for locks
`

// event is what is printed of an event.
type event struct {
	Revision uint64 `json:"revision,omitempty,string"`
	Type     string `json:"type"`
	Name     string `json:"name"`
	Token    string `json:"token,omitempty"`
	Owner    string `json:"owner,omitempty"`
	Reason   string `json:"reason,omitempty"`
}

// eventColumns are wide enough for most: what comes later is not known when a line is printed.
const eventColumns = "%-12s  %-14s  %-12s  %-40s  %s\n"

// watchMain is "fencelock watch".
func watchMain(args []string) int {
	s, f := newLook("watch")
	since := f.Uint64("since", 0, "")
	return s.run(s.parse(f, args, "NAME"), watchHelp, func(ctx context.Context) error {
		ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
		defer stop()
		return s.watch(ctx, s.args[0], *since)
	})
}

func (s *lookSettings) watch(ctx context.Context, name string, since uint64) error {
	needs := backend.CapWatch
	if since != 0 {
		needs |= backend.CapWatchReplay
	}
	d, closeDriver, err := open[backend.Watcher](ctx, s, needs)
	if err != nil {
		return err
	}
	defer closeDriver()
	show := showEvent
	if s.json {
		lines := json.NewEncoder(os.Stdout)
		show = func(e *event) error { return lines.Encode(e) }
	} else {
		fmt.Printf(eventColumns, "REVISION", "EVENT", "TOKEN", "OWNER", "REASON")
	}
	last := since
	for e, err := range d.Watch(ctx, name, since) {
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, backend.ErrCompacted):
			return s.compacted(ctx, d, name, last, err)
		case err != nil && last != 0:
			return fmt.Errorf("%w; go on with --since %d", err, last)
		case err != nil:
			return err
		}
		last = e.Revision
		if err := show(eventOf(&e)); err != nil {
			return err
		}
	}
	return nil
}

func eventOf(e *backend.Change) *event {
	out := &event{Revision: e.Revision, Type: string(e.Type), Name: e.Name, Owner: e.Owner, Reason: e.Reason}
	if e.Token.Valid() {
		out.Token = e.Token.String()
	}
	return out
}

func showEvent(e *event) error {
	_, err := fmt.Printf(eventColumns,
		strconv.FormatUint(e.Revision, 10), cell(e.Type), cell(e.Token), cell(e.Owner), cell(e.Reason))
	return err
}

// compacted tells how to go on after a gap in the history.
func (s *lookSettings) compacted(ctx context.Context, d backend.Watcher, name string, last uint64, err error) error {
	again := "watch it from now on, without --since"
	if i, ok := d.(backend.Inspector); ok {
		ctx, cancel := context.WithTimeout(ctx, attemptTime)
		defer cancel()
		if now, failed := i.Look(ctx, name); failed == nil {
			again = fmt.Sprintf("see who holds it now (fencelock holder), and go on with --since %d", now.Revision)
		}
	}
	return fmt.Errorf("%w; what happened to %q after revision %d is not known any more: %s", err, name, last, again)
}
