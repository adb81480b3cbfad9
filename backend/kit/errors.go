package kit

// Classes of errors. A driver meets errors of a client library, of the network and of its service; its callers branch
// on the answers of package backend. The translation is the place where a wrong default does harm: an error that is
// taken for "nothing was done" although the request has left strands a lock for its TTL. So there is one function for
// all drivers, and what it does not know is ErrUnknown.

import (
	"context"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
)

// classes are the answers of the contract, which need no translation.
var classes = []error{
	backend.ErrHeld, backend.ErrNotHeld, backend.ErrUnsupported, backend.ErrUnavailable, backend.ErrUnknown,
	backend.ErrMisconfigured, backend.ErrDeadlock, backend.ErrLimitMismatch, backend.ErrInvalidName,
	backend.ErrInvalidTTL, backend.ErrInvalidOption, backend.ErrClosed, backend.ErrHistoryLost, backend.ErrCompacted,
}

// Classified reports whether err is an answer of the contract already, anywhere in its chain. The error of a context is
// none.
func Classified(err error) bool {
	for _, class := range classes {
		if errors.Is(err, class) {
			return true
		}
	}
	return false
}

// CallError says which call on which name failed (a *backend.CallError), and gives err its class. A nil err is nil.
//
// classOf knows the service's own errors. It returns backend.ErrUnavailable for what proves that nothing was done,
// backend.ErrMisconfigured, backend.ErrUnknown, or nil for an error that it does not know. It is not asked about errors
// that are classified already, so that code near the exchange, which knows whether the request had left, decides first.
//
// An error that nobody knows is backend.ErrUnknown: the caller then looks again, and loses nothing by it. Taking it for
// backend.ErrUnavailable would strand a lock whenever the request had left. The end of a context stays what it is in a
// call that changes nothing or that marks what it has sent, such as acquire; elsewhere it is backend.ErrUnknown too,
// see Changes.
//
// The cause stays in the chain in every case.
//
// For example:
//
//	func classOf(err error) error {
//		switch code := service.CodeOf(err); {
//		case errors.Is(err, service.ErrNoConnection), code == service.Overloaded: // refused before it was looked at
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

// Changes reports whether an unanswered call of that name may have done something that its driver has not marked.
// Release, renew and force-release are sent without the driver noting that they left, so a context that ends during one
// says nothing about its outcome. Acquire is not among them: a driver has to know anyway whether an acquire has left,
// and marks it with backend.ErrUnknown itself.
func Changes(call string) bool {
	return call == "release" || call == "renew" || call == "force-release"
}

// IsContext reports whether err says that a context has ended, by cancellation or by its deadline.
func IsContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
