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

// Errors of etcd and gRPC, in the classes of the contract. Three questions are asked of an error. Did the request
// leave (unsent)? If it left, did the server say that it has not been done (refused)? If neither, it may have been
// done, or may yet be. And may another try succeed (transient)? The answers are not each other's opposites: a missing
// lease is refused and transient; a user without rights is refused and not transient.
//
// Errors of this package that only say "not now" wrap backend.ErrUnavailable where they are made, so that they have a
// class.

// errWatch: a watch could not be set up or was cut off. The caller reads the state with a new watch or a new try.
var errWatch = fmt.Errorf("%w: the watch ended", backend.ErrUnavailable)

// callError names the call and the lock's name, and gives etcd's and gRPC's errors their class. gRPC's own Canceled
// and DeadlineExceeded become the context's errors, from which gRPC made them.
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

// classOf returns the class of an etcd error, or nil for an unknown error. kit.CallError makes that ErrUnknown,
// unless it is the end of a context in a call that tracks its requests.
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
// unsent looks for the texts of its balancer and dialler. A changed text would count as "may have been done", which
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

// forbidden reports whether the server refuses this user, at all or at these keys. The server will not change its
// mind, so the error is a misconfiguration and the caller does not wait.
func forbidden(err error) bool {
	return isOneOf(err,
		rpctypes.ErrPermissionDenied, rpctypes.ErrAuthFailed, rpctypes.ErrAuthNotEnabled, rpctypes.ErrUserEmpty)
}

// refused reports whether the server said that it did not do it. These errors come before any part of a request is
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

// isOneOf reports whether err is one of etcdErrors. An error of gRPC is converted to etcd's first
// (rpctypes.Error).
func isOneOf(err error, etcdErrors ...error) bool {
	err = rpctypes.Error(err)
	return slices.ContainsFunc(etcdErrors, func(e error) bool { return errors.Is(err, e) })
}

// transient reports whether another try may succeed. The end of a context counts, since each request has its own
// bound; the caller checks its own context as well. The loss of the past never counts. gRPC's Unknown counts: servers
// return it for errors without a code, and a repetition writes the same keys.
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
