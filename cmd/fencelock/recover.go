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

Stop every server of the old cluster first, for good: those that stand in the log, and those of --join, are asked
whether they run. Take the disk with the highest LAST of "fencelock verify". As long
as most members are left, or come back with their disks, nothing is to be recovered: see "fencelock help member".

Tokens go on far above all that were issued, so that guards accept the new holders and refuse the old ones. Whoever held
or waited for a lock has lost it, and may not know: the new server serves nobody at first, for the longest TTL that the
old ones permitted (the greatest --max-ttl that was in force), unless --closed-for says otherwise; "fencelock open" ends
it.

Options (durations like 500ms, 30s, 5m):

{options}

Exit codes:

    0  done
   64  the command line makes no sense
   65  the data is damaged; the message names the file and the entry
   69  a server of the old cluster answers; the message names its address
   73  DIR cannot be read or written, or DIR.lost is there
`

func defineRecover(f *options) func([]string) error {
	var o replica.RestoreOptions
	var asked superseding
	var dir string
	f.dataDir(&dir, "the data `DIRECTORY`")
	closed := f.Duration("closed-for", 0, "how long it serves nobody at first: the longest TTL in use, less if the old "+
		"cluster has been down for a while, or 0")
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
		printRestored(dir, "what was there on", r)
		return nil
	}
}
