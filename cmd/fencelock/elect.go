package main

import (
	"errors"
	"fmt"
	"os/exec"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

const electHelp = `Usage: fencelock elect --name NAME [options]

Stands for election among all processes that give the same NAME, until INT, TERM or HUP. While it leads, it holds the
lock NAME. After it loses leadership, it stands again. If the lock service cannot be reached, it waits.

  fencelock elect --name scheduler --state-file /run/leader.json --on-gain 'exec ./scheduler'

Options (durations like 500ms, 30s, 5m):

{options}

Each option except --name and --owner can also be set in the environment, as FENCELOCK_BACKEND and so on; an empty
variable counts as unset. The command line overrides the environment, and the environment overrides --config.

Both commands have the same environment as COMMAND of "fencelock run". When leadership is lost, all descendants of
--on-gain get TERM, and KILL after --kill-after; a guardian process ensures this even if fencelock is killed or stopped.
Processes that a command leaves running are ended in the same way.

Exit codes:

    0  INT, TERM or HUP has ended the election
   64  the command line is invalid, or the backend does not support the request
   69  the lock service is not configured for locks
   73  the state file cannot be written
`

// electSettings are the command line of "fencelock elect", checked.
type electSettings struct {
	runSettings
	stateFile      string
	onGain, onLoss string
}

func defineElect(o *options) func([]string) error {
	s := &electSettings{}
	o.String(configOption, "", configUsage)
	from := o.backend("the lock service")
	name := o.String(nameOption, "", "the `NAME` of the election")
	o.StringVar(&s.stateFile, "state-file", "", "write to `FILE`, as JSON, whether this process leads (\"state\": "+
		"leading, following or stopped), the leader (\"leaderId\") and the fencing token. \"leading\" is valid only "+
		"until \"expiresAt\", which each renewal extends, because a stopped process cannot update the file")
	o.StringVar(&s.onGain, "on-gain", "", "a shell `COMMAND` that runs while this process leads. If it exits with 0, "+
		"this process keeps leading; if it exits with another code, this process resigns and stands again")
	o.StringVar(&s.onLoss, "on-loss", "", "a shell `COMMAND` that runs when leadership ends, even at the end of this "+
		"process. It is killed after --kill-after, right before another process can lead")
	s.define(o)
	return func(args []string) error {
		err := s.read(from, o.given("kill-after"))
		switch {
		case err != nil:
			return err
		case len(args) > 0:
			return fmt.Errorf("%q: elect takes no arguments; --on-gain names a command", args[0])
		case *name == "":
			return errors.New("--name is missing")
		}
		if s.path, err = exec.LookPath("sh"); err != nil && s.onGain+s.onLoss != "" {
			return err
		}
		s.names, s.runLog.names, s.wait = []string{*name}, []string{*name}, forever
		if err := errors.Join(backend.ValidateName(*name), s.runLog.open()); err != nil {
			return err
		}
		return exit(s.elect())
	}
}

// electState is the content of the state file. It has the field names of docs/HTTP.md.
type electState struct {
	State        string    `json:"state"` // leading, following or stopped
	Since        time.Time `json:"since"`
	LockKey      string    `json:"lockKey"`
	PID          int       `json:"pid"`
	LeaderID     string    `json:"leaderId,omitempty"` // the owner text of the leader, if the service reports it
	FencingToken uint64    `json:"fencingToken,omitempty"`
	TokenSpace   string    `json:"tokenSpace,omitempty"`
	ExpiresAt    time.Time `json:"expiresAt,omitzero"`
}

// States of an election.
const (
	stateLeading   = "leading"
	stateFollowing = "following"
	stateStopped   = "stopped"
)

// stateFile keeps the state in a file.
type stateFile struct {
	path string

	mu  sync.Mutex // protects now
	now electState
}

// set changes the state, and writes it.
func (f *stateFile) set(change func(*electState)) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.now.State
	change(&f.now)
	if f.now.State != before {
		f.now.Since = time.Now().UTC()
	}
	return replaceFile(f.path, &f.now)
}
