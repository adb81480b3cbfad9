package redlock

// This file has the errors that callers can look for, and the causes that stand in the texts of others. Every failure
// of a call wraps one of the classes of package backend; these name the events on the servers beneath that class.

import (
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
)

// QuarantineError is the reason why a server that answers has no vote: it started so recently that it may have
// forgotten locks which it granted before. It wraps backend.ErrUnavailable, because waiting helps.
type QuarantineError struct {
	Addr string
	// The server's uptime, as it reports it: whole seconds.
	Uptime string
	// The uptime from which on it votes: Options.MaxTTL.
	Want string
}

// Error names the server and both times.
func (e *QuarantineError) Error() string {
	return fmt.Sprintf("server %s has no vote before it is up for %s (it is for %s): it may have forgotten locks",
		e.Addr, e.Want, e.Uptime)
}

// Is reports true for backend.ErrUnavailable: no request was sent to the server.
func (e *QuarantineError) Is(target error) bool { return target == backend.ErrUnavailable }

// Causes of failures that no server reports.
var (
	// errSilent: a server was asked and had no answer when its time was over.
	errSilent = errors.New("the server does not answer")
)
