package zookeeper

import (
	"context"
	"errors"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// callError names the call, and maps what the library says to the errors of the contract.
func (d *Driver) callError(call, name string, err error) error {
	return kit.CallError(driverName, call, name, err, func(err error) error {
		switch {
		case errors.Is(err, zk.ErrNoAuth), errors.Is(err, zk.ErrAuthFailed), errors.Is(err, zk.ErrInvalidACL):
			return backend.ErrMisconfigured
		case errors.Is(err, errNoConnection), errors.Is(err, errSessionLost), errors.Is(err, errGone), refused(err):
			return backend.ErrUnavailable
		case kit.Changes(call):
			return backend.ErrUnknown
		case errors.Is(err, zk.ErrConnectionClosed), errors.Is(err, zk.ErrClosing),
			call == "ping" && errors.Is(err, context.DeadlineExceeded):
			return backend.ErrUnavailable
		}
		return nil
	})
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
	return kit.IsContext(err) // of the attempt; the caller looks at its own context
}
