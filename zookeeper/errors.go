// This file maps errors of the client library to those of the contract. Callers act on the class:
// ErrUnavailable promises that the call had no effect, ErrUnknown makes the core clean up after the request. An unknown
// error becomes ErrUnknown, which costs a clean-up at worst; taking it for ErrUnavailable could leave a
// node behind that closes a name.

package zookeeper

import (
	"context"
	"errors"
	"slices"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// callError names the call and the lock, and gives err its class. After a lost connection a read-only call is
// ErrUnavailable; the request of any other call may have been carried out, so that it is ErrUnknown. Acquire marks its
// own leftovers (giveUp). It is nil for nil.
func (d *Driver) callError(call, name string, err error) error {
	return kit.CallError(driverName, call, name, err, func(err error) error {
		switch {
		case isOneOf(err, zk.ErrNoAuth, zk.ErrAuthFailed, zk.ErrInvalidACL):
			return backend.ErrMisconfigured
		case isOneOf(err, errNoConnection, errSessionLost, errGone, errSpent), refused(err):
			return backend.ErrUnavailable
		case kit.Changes(call):
			return backend.ErrUnknown
		case isOneOf(err, zk.ErrConnectionClosed, zk.ErrClosing),
			call == "ping" && errors.Is(err, context.DeadlineExceeded):
			return backend.ErrUnavailable
		}
		return nil
	})
}

// refused reports whether the server answered that it did not do it.
func refused(err error) bool {
	return isOneOf(err,
		// Answers of a server about the request, or of the library before it sent one.
		zk.ErrNoNode, zk.ErrNoAuth, zk.ErrBadVersion, zk.ErrNoChildrenForEphemerals, zk.ErrNodeExists, zk.ErrNotEmpty,
		zk.ErrSessionExpired, zk.ErrInvalidACL, zk.ErrAuthFailed, zk.ErrSessionMoved, zk.ErrBadArguments,
		zk.ErrAPIError, zk.ErrInvalidPath, zk.ErrNoServer)
}

// transient reports whether another try may do better, over another connection or on another session. The end of a
// context counts, since it may be the try's own; the caller looks at its context itself. A refusal that names the
// request (ErrNoNode, ErrBadVersion and the like) does not: the sender of the request knows its meaning.
func transient(err error) bool {
	return kit.IsContext(err) || isOneOf(err,
		// Errors that another session, connection, node or server may not have.
		errSessionLost, errGone, errSpent, errNoConnection, zk.ErrConnectionClosed, zk.ErrClosing, zk.ErrNoServer,
		zk.ErrSessionMoved, zk.ErrSessionExpired, backend.ErrUnavailable)
}

// isOneOf reports whether err is one of some errors.
func isOneOf(err error, some ...error) bool {
	return slices.ContainsFunc(some, func(e error) bool { return errors.Is(err, e) })
}
