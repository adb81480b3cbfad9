package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/server/replica"
)

const restoreHelp = `Usage: fencelock restore FILE [options]

Makes a data directory of a backup, for a new cluster that begins with one member: "fencelock serve --data-dir DIR"
starts it, and other members join it with empty directories, as they join any cluster.

Stop every server of the old cluster first, for good. What comes of the backup is another cluster for its members, and
the same for clients and for the guards of what the locks protect: tokens go on far above all that were issued, also
after the backup was made, so that the guards accept the new holders and refuse the old ones.

Whoever held or waited for a lock has lost it. When the new server is started it serves nobody for the longest TTL that
the old ones permitted (the greatest --max-ttl that was in force): for that long, a client that held a lock when the
cluster was lost may believe so still. --closed-for makes that shorter, where you know better, and "fencelock open" ends
it. What is printed as the longest TTL in use is that of the time of the backup.

Options (durations like 500ms, 30s, 5m):

{options}

Exit codes:

    0  done
   64  the command line makes no sense
   66  FILE cannot be read, is no backup, or is cut off or damaged
   69  a server of the old cluster answers; the message names its address
   73  DIR is not empty, or cannot be written
`

// superseding are the options for the old cluster's members, which are asked before a cluster is made anew.
type superseding struct {
	join, key, ca string
	peer          certificates
}

func (s *superseding) define(f *options, o *replica.RestoreOptions) {
	f.StringVar(&s.join, joinOption, "", "the peer addresses `A,B,C` of the members of the old cluster, which are asked "+
		"first whether they run")
	f.StringVar(&s.key, joinKeyOption, "", "a `FILE` with the key of \"fencelock serve\": only members that have it are "+
		"believed; the key in "+variable(joinKeyOption)+" if it is not given")
	s.peer.definePeer(f, &s.ca)
	f.BoolVar(&o.Supersede, "supersede", false, "go on although a member answers. Each that has heard of the new cluster "+
		"stops")
}

// read copies the values into o.
func (s *superseding) read(o *replica.RestoreOptions) (err error) {
	if s.join != "" {
		o.Members = strings.Split(s.join, ",")
	}
	if o.JoinKey, err = sharedKey(joinKeyOption, s.key, server.MinJoinKey); err != nil {
		return err
	}
	peers, err := s.peer.forPeers(s.ca, slog.Default())
	if peers != nil {
		o.TLS = peers.Current()
	}
	return err
}

// restoring are the options of "fencelock restore".
type restoring struct {
	replica.RestoreOptions
	dir    string
	closed time.Duration
	asked  superseding
}

func defineRestore(f *options) func([]string) error {
	o := newRestore(f)
	return func(args []string) error {
		if err := o.read(f, args); err != nil {
			return err
		}
		r, err := restore(o.dir, args[0], o.RestoreOptions)
		if err != nil {
			return failed(exitOfRestore(err), err)
		}
		printRestored(o.dir, "the backup of", r)
		return nil
	}
}

func newRestore(f *options) *restoring {
	o := &restoring{}
	f.dataDir(&o.dir, "the `DIRECTORY` to make; it must be empty, or not exist")
	f.StringVar((*string)(&o.Store), logStoreOption, string(replica.StoreWAL), logStoreUsage)
	f.DurationVar(&o.closed, "closed-for", 0, "how long it serves nobody at first: the longest TTL in use, less if the old "+
		"cluster has been down for a while, or 0 if it has been down for longer than that")
	f.BoolVar(&o.NewCluster, "new-cluster", false, "give it another name, so that clients and guards that know the old "+
		"cluster refuse it: for a copy beside the original")
	o.asked.define(f, &o.RestoreOptions)
	return o
}

// read checks the options, and reads their files.
func (o *restoring) read(f *options, args []string) (err error) {
	switch {
	case len(args) == 0:
		return errors.New("FILE is missing")
	case len(args) > 1:
		return fmt.Errorf("%q: restore takes one FILE", args[1])
	case o.dir == "":
		return errors.New("--data-dir is empty")
	}
	if o.ClosedFor, err = f.closedFor(o.closed); err != nil {
		return err
	}
	return o.asked.read(&o.RestoreOptions)
}

// printRestored describes a new data directory.
func printRestored(dir, what string, r replica.Restored) {
	fmt.Printf("fencelock: %s has %s %s, cluster %s, generation %v, with tokens above %d\n",
		dir, what, r.BackedUp.Local().Format(time.DateTime), r.Cluster, r.Generation, r.Revision)
	if r.ClosedFor > 0 {
		fmt.Printf("fencelock: when started it serves nobody for %v; the longest TTL in use was %s\n", r.ClosedFor,
			usedTTL(r.UsedTTL))
	}
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

// exitOfRestore returns the exit code of "fencelock restore".
func exitOfRestore(err error) int {
	var mistake *replica.ConfigError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &mistake):
		return exitUsage
	case errors.As(err, new(*replica.RivalError)):
		return exitUnavailable
	case errors.Is(err, replica.ErrNoBackup), errors.As(err, new(noInputError)):
		return exitNoInput
	}
	return exitNoCreate
}
