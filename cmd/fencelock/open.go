package main

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/builtin"
)

const openHelp = `Usage: fencelock open --yes [options]

Opens a cluster of bundled servers that refuses clients after a restore or a recovery. Without --yes, it shows when the
cluster opens, and changes nothing.

A client that held a lock when the old cluster was lost may still use it for the TTL of that lock. So the cluster stays
closed for the longest TTL that it permitted. Open it earlier if every earlier client has stopped, or if the old cluster
has been down for longer than the longest TTL that your clients use. The output shows the longest TTL that was in use
when the backup was made, or when the disk was last written; a longer one may have been in use later.

Options:

{options}

Exit codes:

    0  the cluster is open; without --yes, it may still be closed
   64  the command line is invalid
   69  no leader reachable, or no answer in time; the cluster may have been opened
`

// closedState is the output of "fencelock open" for a cluster that serves no clients.
type closedState struct {
	ClosedUntil string  `json:"closedUntil"`
	UsedTTL     float64 `json:"usedTtlSeconds"`
}

func defineOpen(o *options) func([]string) error {
	yes := o.Bool("yes", false, "open it")
	s := o.administer("open")
	return func(args []string) error {
		return s.runAdmin(s.parse(args), func(ctx context.Context, admin *builtin.Admin) error {
			if *yes {
				return admin.Open(ctx)
			}
			return s.showClosed(ctx, admin)
		})
	}
}

func (s *lookSettings) showClosed(ctx context.Context, admin *builtin.Admin) error {
	out := s.newPrinter("CLOSED UNTIL", "LONGEST TTL IN USE BEFORE")
	for _, m := range admin.Status(ctx) {
		if m.Err != nil || m.ClosedNanos == 0 {
			continue
		}
		until, used := closedUntil(m.ClosedNanos), time.Duration(m.UsedTtlNanos)
		if err := out.print(&closedState{until, used.Seconds()}, []string{until, usedTTL(used)}); err != nil {
			return err
		}
	}
	return out.flush()
}

// closedUntil returns when a cluster that stays closed for that time serves clients.
func closedUntil(nanos int64) string {
	return time.Now().Add(time.Duration(nanos)).Round(time.Second).Format(time.RFC3339)
}

// usedTTL formats the longest TTL in use, for people.
func usedTTL(d time.Duration) string {
	if d == 0 {
		return "none"
	}
	return fmt.Sprint(d)
}
