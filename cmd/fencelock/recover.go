package main

import (
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/internal/server/replica"
)

const recoverHelp = `Usage: fencelock recover [options]

For a cluster that has lost most of its members, with their disks: makes a new cluster with one member of the data
directory of one that is left, with all that is on this disk. "fencelock serve --data-dir DIR" starts it, without
--join, and other members join it with empty directories. The old directory is kept as DIR.lost.

Stop every server of the old cluster first, for good. Take the disk with the highest LAST of "fencelock verify". As long
as most members are left, or come back with their disks, nothing is to be recovered: see "fencelock help member".

Tokens go on far above all that were issued, so that guards accept the new holders and refuse the old ones. Whoever held
or waited for a lock has lost it, and may not know: the new server serves nobody at first, for 24 hours, the longest TTL
that servers grant by default, unless --closed-for says otherwise.

Options (durations like 500ms, 30s, 5m):

  --data-dir DIR  Default: fencelock-data
  --closed-for D  how long it serves nobody at first: the longest TTL in use (--max-ttl, if that was set higher than
                  24h), less if the old cluster has been down for a while, or 0

Exit codes:

    0  done
   64  the command line makes no sense
   65  the data is damaged; the message names the file and the entry
   73  DIR cannot be read or written, or DIR.lost is there
`

// recoverMain is "fencelock recover".
func recoverMain(args []string) int {
	f := newFlags("recover")
	dir := f.String("data-dir", "fencelock-data", "")
	closed := f.Duration("closed-for", 0, "")
	var o replica.RestoreOptions
	err := f.Parse(args)
	switch {
	case err != nil:
	case f.NArg() > 0:
		err = fmt.Errorf("%q: recover takes no arguments", f.Arg(0))
	case *dir == "":
		err = errors.New("--data-dir is empty")
	default:
		o.ClosedFor, err = closedFor(f, *closed)
	}
	if code, done := unparsed("recover", recoverHelp, err); done {
		return code
	}
	r, err := replica.Recover(*dir, o)
	switch {
	case errors.As(err, new(*replica.CorruptError)):
		say("%v", err)
		return exitDamaged
	case err != nil:
		say("%v", err)
		return exitNoCreate
	}
	printRestored(*dir, "what was there on", r)
	return exitOK
}
