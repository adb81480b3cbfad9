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
	"github.com/fencelock/fencelock/backend/kit"
)

// errWatch: a watch could not be set up or was cut off.
var errWatch = fmt.Errorf("%w: the watch ended", backend.ErrUnavailable)

// callError names the call, and maps what etcd and gRPC say to the errors of the contract.
func (d *Driver) callError(call, name string, err error) error {
	if !kit.Classified(err) {
		switch status.Code(err) {
		case codes.Canceled:
			err = fmt.Errorf("%w (%w)", context.Canceled, err)
		case codes.DeadlineExceeded:
			err = fmt.Errorf("%w (%w)", context.DeadlineExceeded, err)
		}
	}
	return kit.CallError(driverName, call, name, err, classOf)
}

// classOf gives etcd's errors their class.
func classOf(err error) error {
	switch {
	case forbidden(err):
		return backend.ErrMisconfigured
	case unsent(err), refused(err):
		return backend.ErrUnavailable
	}
	return nil
}

// errUnsent: a request was taken back before it left.
var errUnsent = errors.New("the request was not sent")

// unsent reports whether the request of a failed call never left: no connection stood.
func unsent(err error) bool {
	if errors.Is(err, errUnsent) {
		return true
	}
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
	case errors.Is(err, backend.ErrUnavailable), fromLearner(err),
		isOneOf(err, rpctypes.ErrLeaseNotFound, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision),
		kit.IsContext(err): // of the attempt; the caller looks at its own context
		return true
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted, codes.Unknown:
		return true
	}
	return false
}
