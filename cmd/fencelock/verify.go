package main

import (
	"context"
	"errors"
	"io/fs"
	"strconv"

	"github.com/fencelock/fencelock/internal/server/replica"
)

const verifyHelp = `Usage: fencelock verify [options]

Checks the data directory of a stopped server: it reads every log entry and every snapshot, verifies their checksums,
and applies the log in memory. A server verifies the checksums whenever it starts, and does not start if they are wrong.

UNSUMMED is the number of entries from a version without checksums: damage to them is detected only if they are
malformed.

Options:

{options}

Exit codes:

    0  no damage
   64  the command line is invalid
   65  the data is damaged; the message names the file and the entry
   66  DIR cannot be read, or a server uses it
`

// verified is the printed form of a data directory.
type verified struct {
	NodeID    string `json:"nodeId"`
	ClusterID string `json:"clusterId,omitempty"`
	First     uint64 `json:"first,string"`
	Last      uint64 `json:"last,string"`
	Snapshot  uint64 `json:"snapshot,string"`
	Unsummed  int    `json:"unsummed"`
	Revision  uint64 `json:"revision,string"`
}

func defineVerify(o *options) func([]string) error {
	var dir string
	o.dataDir(&dir, "the data `DIRECTORY`")
	s := &lookSettings{word: "verify"}
	o.BoolVar(&s.json, "json", false, "print one JSON object; numbers of 64 bits are strings")
	return func(args []string) error {
		return s.run(s.parse(args), func(context.Context) error { return s.verify(dir) })
	}
}

// verifyError is a data directory that cannot be read.
type verifyError struct{ error }

func (e verifyError) Unwrap() error { return e.error }

func (s *lookSettings) verify(dir string) error {
	v, err := replica.Verify(dir)
	if err != nil {
		return verifyError{err}
	}
	titles := []string{"NODE", "CLUSTER", "FIRST", "LAST", "SNAPSHOT", "UNSUMMED", "REVISION"}
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	p := verified{v.Node, v.Cluster, v.First, v.Last, v.Snapshot, v.Unsummed, v.Revision}
	return s.printOne(titles, p, []string{
		v.Node, v.Cluster, number(v.First), number(v.Last), number(v.Snapshot), strconv.Itoa(v.Unsummed),
		number(v.Revision),
	})
}

// exitOfVerify returns the exit code for a bad data directory.
func exitOfVerify(err error) int {
	if errors.As(err, new(*replica.CorruptError)) && !errors.Is(err, fs.ErrNotExist) {
		return exitDamaged
	}
	return exitNoInput
}
