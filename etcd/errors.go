package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
)

// errWatch: a watch could not be set up or was cut off.
var errWatch = errors.New("the watch ended")

// callError names the call, and maps what etcd and gRPC say to the errors of the contract.
func (d *Driver) callError(call, name string, err error) error {
	if err == nil {
		return nil
	}
	return &backend.CallError{Driver: driverName, Call: call, Name: name, Err: classify(call, err)}
}

// known are the errors that need no translation.
var known = []error{
	backend.ErrHeld, backend.ErrNotHeld, backend.ErrUnsupported, backend.ErrUnavailable, backend.ErrUnknown,
	backend.ErrMisconfigured, backend.ErrInvalidName, backend.ErrInvalidTTL, backend.ErrInvalidOption, backend.ErrClosed,
	backend.ErrCompacted, backend.ErrLimitMismatch, backend.ErrHistoryLost,
}

func classify(call string, err error) error {
	for _, k := range known {
		if errors.Is(err, k) {
			return err
		}
	}
	switch status.Code(err) {
	case codes.Canceled:
		err = fmt.Errorf("%w (%w)", context.Canceled, err)
	case codes.DeadlineExceeded:
		err = fmt.Errorf("%w (%w)", context.DeadlineExceeded, err)
	}
	switch {
	case forbidden(err):
		return fmt.Errorf("%w: %w", backend.ErrMisconfigured, err)
	case errors.Is(err, errSessionLost), errors.Is(err, errOutgrown), errors.Is(err, errOvertaken), errors.Is(err, errWatch), unsent(err), refused(err):
		return fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
	case call != "release" && call != "renew" && isContext(err):
		return err // what was asked for and not answered has been marked where it was asked
	}
	return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
}

func isContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// unsent reports whether the request of a failed call never left: no connection stood.
func unsent(err error) bool {
	text := rpctypes.ErrorDesc(err)
	return status.Code(err) == codes.Unavailable &&
		(strings.Contains(text, "error while dialing") || strings.Contains(text, "Error while dialing") ||
			strings.Contains(text, "no address available") || strings.Contains(text, "no connection available"))
}

// forbidden reports whether the server does not let this user in, or not at these keys. It will not change its mind.
func forbidden(err error) bool {
	return isOneOf(err, rpctypes.ErrPermissionDenied, rpctypes.ErrAuthFailed, rpctypes.ErrAuthNotEnabled, rpctypes.ErrUserEmpty)
}

// refused reports whether the server said that it did not do it.
func refused(err error) bool {
	return forbidden(err) || isOneOf(err, rpctypes.ErrLeaseNotFound, rpctypes.ErrNoSpace, rpctypes.ErrTooManyRequests,
		rpctypes.ErrNoLeader, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision, rpctypes.ErrRequestTooLarge,
		rpctypes.ErrTooManyOps, rpctypes.ErrNotCapable, rpctypes.ErrNotLeader) || fromLearner(err)
}

// fromLearner reports whether a member without a vote has answered, which serves no request of ours. Another one does.
func fromLearner(err error) bool {
	return rpctypes.ErrorDesc(err) == rpctypes.ErrorDesc(rpctypes.ErrGRPCNotSupportedForLearner)
}

func isOneOf(err error, etcdErrors ...error) bool {
	err = rpctypes.Error(err)
	return slices.ContainsFunc(etcdErrors, func(e error) bool { return errors.Is(err, e) })
}

// transient reports whether another attempt may do better.
func transient(err error) bool {
	switch {
	case errors.Is(err, backend.ErrHistoryLost):
		return false
	case errors.Is(err, errSessionLost), errors.Is(err, errOutgrown), errors.Is(err, errOvertaken), errors.Is(err, errWatch),
		errors.Is(err, backend.ErrUnavailable):
		return true
	}
	if isOneOf(err, rpctypes.ErrLeaseNotFound, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision) {
		return true
	}
	if fromLearner(err) || isContext(err) {
		return true // of the attempt; the caller looks at its own context
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted, codes.Unknown:
		return true
	}
	return false
}
