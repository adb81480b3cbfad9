package kit

// Classes of errors. A driver gets errors from a client library, the network and its service; its callers branch on
// the errors of package backend. A wrong default in the translation does harm: an error that is taken for "not
// done" although the request was sent closes a name for its TTL. So there is one function for all drivers, and
// unknown errors are ErrUnknown.

import (
	"context"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
)

// classes are the answers of the contract, which need no class.
var classes = []error{
	backend.ErrHeld, backend.ErrNotHeld, backend.ErrUnsupported, backend.ErrUnavailable, backend.ErrUnknown,
	backend.ErrMisconfigured, backend.ErrDenied, backend.ErrQueueFull, backend.ErrDeadlock, backend.ErrLimitMismatch,
	backend.ErrInvalidName, backend.ErrInvalidTTL, backend.ErrInvalidOption, backend.ErrClosed, backend.ErrHistoryLost, backend.ErrCompacted,
}

// Classified reports whether err has an error of the contract in its chain. The error of a context is not one.
func Classified(err error) bool {
	for _, class := range classes {
		if errors.Is(err, class) {
			return true
		}
	}
	return false
}

// CallError adds the call and the name to err (a *backend.CallError), and its class. A nil err is nil.
//
// classOf knows the service's own errors. It returns backend.ErrUnavailable for errors which prove that the service
// did not act, backend.ErrMisconfigured, backend.ErrUnknown, or nil for an unknown error. It is not called for errors
// that are classified already, so that code near the exchange, which knows whether the request was sent, decides
// first.
//
// An unclassified error is backend.ErrUnknown: the caller then looks again, which does no harm. Taking it for
// backend.ErrUnavailable would close a name if the request was sent. The error of a context stays unchanged in a
// read-only call, and in a call that marks sent requests, such as acquire; elsewhere it is backend.ErrUnknown too,
// see Changes.
//
// The cause stays in the chain in every case.
//
// For example:
//
//	func classOf(err error) error {
//		switch code := service.CodeOf(err); {
//		case errors.Is(err, service.ErrNoConnection), code == service.Overloaded: // refused before it was carried out
//			return backend.ErrUnavailable
//		case code == service.ReadOnly, code == service.NoPermission:
//			return backend.ErrMisconfigured
//		}
//		return nil
//	}
func CallError(driver, call, name string, err error, classOf func(error) error) error {
	if err == nil {
		return nil
	}
	if !Classified(err) {
		class := classOf(err)
		if class == nil && (!IsContext(err) || Changes(call)) {
			class = backend.ErrUnknown
		}
		if class != nil {
			err = fmt.Errorf("%w: %w", class, err)
		}
	}
	return &backend.CallError{Driver: driver, Call: call, Name: name, Err: err}
}

// Changes reports whether an unanswered call may have had an effect that its driver has not marked. Drivers do not
// record that release, renew and force-release were sent, so their outcome is unknown if a context ends during one.
// Acquire is different: a driver has to know anyway whether an acquire was sent, and returns backend.ErrUnknown
// itself.
func Changes(call string) bool {
	return call == "release" || call == "renew" || call == "force-release"
}

// IsContext reports whether err is from a context that has ended, by cancellation or by its deadline.
func IsContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
