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

Creates a data directory from a backup, for a new cluster with one member. Start it with "fencelock serve --data-dir
DIR"; other members then join it with empty directories, as they join any cluster.

First stop every server of the old cluster permanently. Members of the old cluster cannot join the restored one, but
clients and guards treat it as the same cluster: new tokens are far above all earlier ones, even those issued after the
backup, so that guards accept the new holders and refuse the old ones.

All holders and waiters lose their locks and places. After its start, the new server refuses clients for the longest
TTL that the old cluster permitted (the greatest --max-ttl in force), because a client that held a lock may still use
it for that long. --closed-for shortens this time, if you know better, and "fencelock open" opens the cluster earlier.
Restore prints the longest TTL that was in use when the backup was made.

Options (durations like 500ms, 30s, 5m):

{options}

Exit codes:

    0  done
   64  the command line is invalid
   66  FILE cannot be read, is not a backup, or is truncated or damaged
   69  a server of the old cluster answers; the message names its address
   73  DIR is not empty, or cannot be written
`

// superseding are the options for the old cluster's members, which are asked before a new cluster is made.
type superseding struct {
	join, key, ca string
	peer          certificates
}

func (s *superseding) define(f *options, o *replica.RestoreOptions) {
	f.StringVar(&s.join, joinOption, "", "the peer addresses `A,B,C` of the members of the old cluster, to check "+
		"first that none of them is running")
	f.StringVar(&s.key, joinKeyOption, "", "a `FILE` with the key of \"fencelock serve\": only answers of members "+
		"with this key count; the key in "+variable(joinKeyOption)+" if it is not given")
	s.peer.definePeer(f, &s.ca)
	f.BoolVar(&o.Supersede, "supersede", false, "continue even if a member answers. Members of the old cluster stop "+
		"once they learn of the new one")
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
	f.DurationVar(&o.closed, "closed-for", 0, "the time for which it refuses clients at first: the longest TTL in "+
		"use, minus the time for which the old cluster has been down, or 0 if it has been down for longer")
	f.BoolVar(&o.NewCluster, "new-cluster", false, "create a new token space, which clients and guards of the old "+
		"cluster refuse: for a copy that runs beside the original")
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
	fmt.Printf("fencelock: created %s from %s %s: cluster %s, generation %v, tokens above %d\n",
		dir, what, r.BackedUp.Local().Format(time.DateTime), r.Cluster, r.Generation, r.Revision)
	if r.ClosedFor > 0 {
		fmt.Printf("fencelock: after its start, the server refuses clients for %v; the longest TTL in use was %s\n", r.ClosedFor,
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
