package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/fencelock/fencelock/internal/server/replica"
)

const restoreHelp = `Usage: fencelock restore FILE [options]

Makes a data directory of a backup, for a new cluster that begins with one member: "fencelock serve --data-dir DIR"
starts it, and other members join it with empty directories, as they join any cluster.

Stop every server of the old cluster first, for good. What comes of the backup is another cluster for its members, and
the same for clients and for the guards of what the locks protect: tokens go on far above all that were issued, also
after the backup was made, so that the guards accept the new holders and refuse the old ones.

Whoever held or waited for a lock has lost it. When the new server is started it serves nobody for the longest TTL that
the old one granted (its --max-ttl, 24 hours by default): for that long, one who held a lock when the cluster was lost
may believe so still. --closed-for makes that shorter, where you know better.

Options (durations like 500ms, 30s, 5m):

  --data-dir DIR  the directory to make; it must be empty, or not exist. Default: fencelock-data
  --store KIND    how its log is kept: wal (default) or bolt
  --closed-for D  how long it serves nobody at first: the longest TTL in use, less if the old cluster has been down for
                  a while, or 0 if it has been down for longer than that
  --new-cluster   give it another name, so that clients and guards that know the old cluster refuse it: for a copy
                  beside the original

Exit codes:

    0  done
   64  the command line makes no sense
   66  FILE cannot be read, is no backup, or is cut off or damaged
   73  DIR is not empty, or cannot be written
`

// restoreMain is "fencelock restore".
func restoreMain(args []string) int {
	dir, file, o, err := parseRestore(args)
	if code, done := unparsed("restore", restoreHelp, err); done {
		return code
	}
	r, err := restore(dir, file, o)
	if err != nil {
		say("%v", err)
		return exitOfRestore(err)
	}
	printRestored(dir, "the backup of", r)
	return exitOK
}

// printRestored tells of a new data directory, and what is in it.
func printRestored(dir, what string, r replica.Restored) {
	fmt.Printf("fencelock: %s has %s %s, cluster %s, with tokens above %d\n",
		dir, what, r.BackedUp.Local().Format(time.DateTime), r.Cluster, r.Revision)
	if r.ClosedFor > 0 {
		fmt.Printf("fencelock: when started it serves nobody for %v\n", r.ClosedFor)
	}
}

func parseRestore(args []string) (dir, file string, o replica.RestoreOptions, err error) {
	f := newFlags("restore")
	f.StringVar(&dir, "data-dir", "fencelock-data", "")
	store := f.String("store", string(replica.StoreWAL), "")
	closed := f.Duration("closed-for", 0, "")
	f.BoolVar(&o.NewCluster, "new-cluster", false, "")
	files, err := parseMixed(f, args)
	switch {
	case err != nil:
	case len(files) == 0:
		err = errors.New("FILE is missing")
	case len(files) > 1:
		err = fmt.Errorf("%q: restore takes one FILE", files[1])
	case dir == "":
		err = errors.New("--data-dir is empty")
	default:
		file, o.Store = files[0], replica.Store(*store)
		o.ClosedFor, err = closedFor(f, *closed)
	}
	return dir, file, o, err
}

// noInputError is a file that cannot be read.
type noInputError struct{ error }

func (e noInputError) Unwrap() error { return e.error }

func restore(dir, file string, o replica.RestoreOptions) (replica.Restored, error) {
	f, err := os.Open(file)
	if err != nil {
		return replica.Restored{}, noInputError{err}
	}
	defer f.Close()
	return replica.Restore(dir, f, o)
}

// exitOfRestore is the exit code of "fencelock restore".
func exitOfRestore(err error) int {
	var mistake *replica.ConfigError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &mistake):
		return exitUsage
	case errors.Is(err, replica.ErrNoBackup), errors.As(err, new(noInputError)):
		return exitNoInput
	}
	return exitNoCreate
}
