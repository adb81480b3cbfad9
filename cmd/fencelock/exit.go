package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
)

// Exit codes of our own, after sysexits.h and the shell. Everything else is the command's. They are part of the
// interface: scripts branch on them.
const (
	exitOK          = 0
	exitNobody      = 1   // nobody holds the lock that was asked about
	exitRefused     = 1   // the cluster has no such member or session, or cannot do without it
	exitUsage       = 64  // EX_USAGE: the command line, or what it asks of the lock service, makes no sense
	exitDamaged     = 65  // EX_DATAERR: the data directory is damaged
	exitCompacted   = 66  // EX_NOINPUT: the history that was asked for is no longer kept
	exitNoInput     = 66  // EX_NOINPUT: the file is no backup
	exitUnavailable = 69  // EX_UNAVAILABLE: the lock service cannot be reached, or is not fit
	exitNoCreate    = 73  // EX_CANTCREAT: the backup, or the data directory of a restored one, cannot be written
	exitHeld        = 75  // EX_TEMPFAIL: somebody else holds the lock
	exitLost        = 76  // the lock was lost while the command ran
	exitCannotRun   = 126 // as in the shell
	exitNotFound    = 127 // as in the shell
	exitSignal      = 128 // plus the number of the signal
)

// exitOf is the exit code for a lock that was not acquired.
func exitOf(err error) int {
	if errors.Is(err, fencelock.ErrHeld) {
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

// nobodyError names a lock that nobody holds.
type nobodyError string

func (e nobodyError) Error() string { return fmt.Sprintf("nobody holds %q", string(e)) }

// exitOfLook is the exit code of the subcommands that hold nothing.
func exitOfLook(err error) int {
	var nobody nobodyError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &nobody):
		return exitNobody
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

// exitOfStart is the exit code for a command that could not be started.
func exitOfStart(err error) int {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		return exitNotFound
	}
	return exitCannotRun
}
