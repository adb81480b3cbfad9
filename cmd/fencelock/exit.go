package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/fencing"
)

// Exit codes of fencelock, after sysexits.h and the shell. All others are the command's. They are part of the
// interface: scripts branch on them.
const (
	exitOK          = 0
	exitNobody      = 1   // the lock has no holder
	exitRefused     = 1   // the cluster has no such member or session, or cannot do without it; a stale claim
	exitUncovered   = 1   // a table takes writes without a claim
	exitUsage       = 64  // EX_USAGE: the command line, or its request to the lock service, is invalid
	exitDamaged     = 65  // EX_DATAERR: the data directory is damaged
	exitCompacted   = 66  // EX_NOINPUT: the requested history is no longer kept
	exitNoInput     = 66  // EX_NOINPUT: the file is no backup
	exitUnavailable = 69  // EX_UNAVAILABLE: the lock service is unreachable or unfit
	exitSystem      = 71  // EX_OSERR: the guardian did not start, or processes of the command survive KILL
	exitNoCreate    = 73  // EX_CANTCREAT: the backup, or the data directory of a restored one, cannot be written
	exitHeld        = 75  // EX_TEMPFAIL: another holder has the lock
	exitLost        = 76  // the lock was lost while the command ran
	exitDenied      = 77  // EX_NOPERM: the rules deny it, or the credential is not valid
	exitCannotRun   = 126 // as in the shell
	exitNotFound    = 127 // as in the shell
	exitSignal      = 128 // plus the number of the signal
)

// exitOf returns the exit code for a lock that was not acquired.
func exitOf(err error) int {
	if errors.Is(err, fencelock.ErrDenied) {
		return exitDenied
	}
	if errors.Is(err, fencelock.ErrHeld) || errors.Is(err, fencelock.ErrQueueFull) || errors.Is(err, fencelock.ErrDeadlock) {
		return exitHeld
	}
	for _, mistake := range []error{
		fencelock.ErrTier, fencelock.ErrInvalidName, fencelock.ErrInvalidTTL, fencelock.ErrInvalidOption,
		fencelock.ErrUnsupported, fencelock.ErrLimitMismatch,
	} {
		if errors.Is(err, mistake) {
			return exitUsage
		}
	}
	return exitUnavailable
}

// nobodyError names a lock without a holder.
type nobodyError string

func (e nobodyError) Error() string { return fmt.Sprintf("%q is not held", string(e)) }

// noMatchError names a lock without a hold that meets a condition.
type noMatchError string

func (e noMatchError) Error() string {
	return fmt.Sprintf("no hold of %q has that nonce and token", string(e))
}

// exitOfLook returns the exit code of the subcommands that hold no lock.
func exitOfLook(err error) int {
	var nobody nobodyError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &nobody), errors.As(err, new(noMatchError)):
		return exitNobody
	case errors.As(err, new(uncoveredError)):
		return exitUncovered
	case fencing.Refusal(err):
		return exitRefused
	case errors.Is(err, fencing.ErrInvalid):
		return exitUsage
	case errors.Is(err, builtin.ErrNoMember), errors.Is(err, builtin.ErrNoSession), errors.Is(err, builtin.ErrRefused):
		return exitRefused
	case errors.Is(err, backend.ErrCompacted):
		return exitCompacted
	case errors.As(err, new(verifyError)):
		return exitOfVerify(err)
	case errors.As(err, new(fileError)):
		return exitNoCreate
	}
	return exitOf(err)
}

// exitOfStart returns the exit code for a command that could not be started.
func exitOfStart(err error) int {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		return exitNotFound
	}
	return exitCannotRun
}
