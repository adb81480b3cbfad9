package main

import (
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/internal/server/replica"
)

const recoverHelp = `Usage: fencelock recover [options]

For a cluster that has lost most of its members with their disks: creates a new cluster with one member from the data
directory of a remaining member. Start it with "fencelock serve --data-dir DIR", without --join; other members then
join it with empty directories. The old directory is kept as DIR.lost.

First stop every server of the old cluster permanently. Recover asks the members in the log and those of --join, and
refuses if one of them answers. Use the disk with the highest LAST in "fencelock verify". If most members are left, or
will return with their disks, you need no recovery: see "fencelock help member".

New tokens are far above all earlier ones, so that guards accept the new holders and refuse the old ones. All holders
and waiters lose their locks and places, but may not know it yet. So the new server refuses clients for the longest TTL
that the old cluster permitted (the greatest --max-ttl in force), unless --closed-for says otherwise. "fencelock open"
opens it earlier.

Options (durations like 500ms, 30s, 5m):

{options}

Exit codes:

    0  done
   64  the command line is invalid
   65  the data is damaged; the message names the file and the entry
   69  a server of the old cluster answers; the message names its address
   73  DIR cannot be read or written, or DIR.lost exists
`

func defineRecover(f *options) func([]string) error {
	var o replica.RestoreOptions
	var asked superseding
	var dir string
	f.dataDir(&dir, "the data `DIRECTORY`")
	closed := f.Duration("closed-for", 0, "the time for which it refuses clients at first: the longest TTL in use, "+
		"minus the time for which the old cluster has been down, or 0")
	asked.define(f, &o)
	return func(args []string) (err error) {
		switch {
		case len(args) > 0:
			return fmt.Errorf("%q: recover takes no arguments", args[0])
		case dir == "":
			return errors.New("--data-dir is empty")
		}
		if o.ClosedFor, err = f.closedFor(*closed); err != nil {
			return err
		}
		if err = asked.read(&o); err != nil {
			return err
		}
		r, err := replica.Recover(dir, o)
		switch {
		case errors.As(err, new(*replica.CorruptError)):
			return failed(exitDamaged, err)
		case errors.As(err, new(*replica.RivalError)):
			return failed(exitUnavailable, err)
		case err != nil:
			return failed(exitNoCreate, err)
		}
		printRestored(dir, "the data of", r)
		return nil
	}
}
