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

// What etcd and gRPC say, in the words of the contract. Three questions are asked of an error. Did the request leave
// (unsent)? If it left, did the server say that it has not been done (refused)? What is neither may have been done, and
// may yet be. And may another try do better (transient)? The answers are not each other's opposites: a lease that is
// not there is refused and transient, a user without rights refused and not.
//
// Errors of this package that only say "not now" wrap backend.ErrUnavailable where they are made, so that every
// question about them has its answer.

// errWatch: a watch could not be set up or was cut off. The state is read again, by a new watch or a new try.
var errWatch = fmt.Errorf("%w: the watch ended", backend.ErrUnavailable)

// callError names the call and the lock's name, and gives etcd's and gRPC's errors their class. gRPC's own Canceled and
// DeadlineExceeded become the context's errors, for they are what is left of those when they come back from a request.
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

// classOf gives etcd's errors their class, or nil to what it does not know. kit.CallError makes that ErrUnknown, unless
// it is the end of a context in a call that marks what it has sent.
func classOf(err error) error {
	switch {
	case forbidden(err):
		return backend.ErrMisconfigured
	case unsent(err), refused(err):
		return backend.ErrUnavailable
	}
	return nil
}

// errUnsent: a request was taken back before it left, by withdraw or by a closed driver.
var errUnsent = errors.New("the request was not sent")

// unsent reports whether the request of a failed call never left: no connection stood. gRPC has no code for that, so
// the texts of its balancer and dialler are looked for. A text that changes would count as "may have been done", which
// is safe.
func unsent(err error) bool {
	if errors.Is(err, errUnsent) {
		return true
	}
	text := rpctypes.ErrorDesc(err)
	return status.Code(err) == codes.Unavailable &&
		(strings.Contains(text, "error while dialing") || strings.Contains(text, "Error while dialing") ||
			strings.Contains(text, "no address available") || strings.Contains(text, "no connection available"))
}

// forbidden reports whether the server does not let this user in, or not at these keys. It will not change its mind,
// and the user is told of a misconfiguration instead of waiting.
func forbidden(err error) bool {
	return isOneOf(err,
		rpctypes.ErrPermissionDenied, rpctypes.ErrAuthFailed, rpctypes.ErrAuthNotEnabled, rpctypes.ErrUserEmpty)
}

// refused reports whether the server said that it did not do it. These errors come before anything of a request is
// applied.
func refused(err error) bool {
	return forbidden(err) || isOneOf(err, rpctypes.ErrLeaseNotFound, rpctypes.ErrNoSpace, rpctypes.ErrTooManyRequests,
		rpctypes.ErrNoLeader, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision, rpctypes.ErrRequestTooLarge,
		rpctypes.ErrTooManyOps, rpctypes.ErrNotCapable, rpctypes.ErrNotLeader) || fromLearner(err)
}

// fromLearner reports whether a member without a vote has answered, which serves no request of ours. Another one does,
// and the client sends the repetition there.
func fromLearner(err error) bool {
	return rpctypes.ErrorDesc(err) == rpctypes.ErrorDesc(rpctypes.ErrGRPCNotSupportedForLearner)
}

// isOneOf reports whether err is one of etcdErrors. What gRPC returns is read as an error of etcd's first
// (rpctypes.Error).
func isOneOf(err error, etcdErrors ...error) bool {
	err = rpctypes.Error(err)
	return slices.ContainsFunc(etcdErrors, func(e error) bool { return errors.Is(err, e) })
}

// transient reports whether another try may do better. The end of a context counts, since requests have bounds of their
// own; the caller looks at its own context beside it. The loss of the past never does. gRPC's Unknown counts, because
// servers answer so what they have no code for, and a repetition writes the same keys.
func transient(err error) bool {
	switch {
	case errors.Is(err, backend.ErrHistoryLost):
		return false
	case errors.Is(err, backend.ErrUnavailable), fromLearner(err),
		isOneOf(err, rpctypes.ErrLeaseNotFound, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision),
		kit.IsContext(err): // of the request; the caller looks at its own context
		return true
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted, codes.Unknown:
		return true
	}
	return false
}
