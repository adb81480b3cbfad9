package zookeeper

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// callError names the call, and maps what the library says to the errors of the contract.
func (d *Driver) callError(call, name string, err error) error {
	if err == nil {
		return nil
	}
	return &backend.CallError{Driver: driverName, Call: call, Name: name, Err: classify(call, err)}
}

// known are the errors that need no translation.
var known = []error{
	backend.ErrHeld, backend.ErrNotHeld, backend.ErrUnsupported, backend.ErrUnavailable, backend.ErrUnknown,
	backend.ErrMisconfigured, backend.ErrLimitMismatch, backend.ErrInvalidName, backend.ErrInvalidTTL,
	backend.ErrInvalidOption, backend.ErrClosed, backend.ErrHistoryLost,
}

func classify(call string, err error) error {
	for _, k := range known {
		if errors.Is(err, k) {
			return err
		}
	}
	switch {
	case errors.Is(err, zk.ErrNoAuth), errors.Is(err, zk.ErrAuthFailed), errors.Is(err, zk.ErrInvalidACL):
		return fmt.Errorf("%w: %w", backend.ErrMisconfigured, err)
	case errors.Is(err, errNoConnection), errors.Is(err, errSessionLost), errors.Is(err, errGone), refused(err):
		return fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
	case changes(call):
		return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
	case call == "ping" && errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
	case isContext(err):
		return err // what was asked for and not answered has been marked where it was asked
	case errors.Is(err, zk.ErrConnectionClosed), errors.Is(err, zk.ErrClosing):
		return fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
	}
	return fmt.Errorf("%w: %w", backend.ErrUnknown, err) // of an error that nobody thought of, nothing is certain
}

// changes reports whether an unanswered call of that name may have done something. Acquire marks that itself.
func changes(call string) bool {
	return call == "release" || call == "renew" || call == "force-release"
}

func isContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// refused reports whether the server said that it did not do it.
func refused(err error) bool {
	for _, e := range []error{
		zk.ErrNoNode, zk.ErrNoAuth, zk.ErrBadVersion, zk.ErrNoChildrenForEphemerals, zk.ErrNodeExists, zk.ErrNotEmpty,
		zk.ErrSessionExpired, zk.ErrInvalidACL, zk.ErrAuthFailed, zk.ErrSessionMoved, zk.ErrBadArguments, zk.ErrAPIError,
		zk.ErrInvalidPath, zk.ErrNoServer,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// transient reports whether another attempt may do better.
func transient(err error) bool {
	for _, e := range []error{
		errSessionLost, errGone, errNoConnection, zk.ErrConnectionClosed, zk.ErrClosing, zk.ErrNoServer,
		zk.ErrSessionMoved, zk.ErrSessionExpired, backend.ErrUnavailable,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return isContext(err) // of the attempt; the caller looks at its own context
}
