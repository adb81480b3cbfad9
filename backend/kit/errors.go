package kit

import (
	"context"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
)

// classes are the answers of the contract, which need no translation.
var classes = []error{
	backend.ErrHeld, backend.ErrNotHeld, backend.ErrUnsupported, backend.ErrUnavailable, backend.ErrUnknown,
	backend.ErrMisconfigured, backend.ErrDeadlock, backend.ErrLimitMismatch, backend.ErrInvalidName, backend.ErrInvalidTTL,
	backend.ErrInvalidOption, backend.ErrClosed, backend.ErrHistoryLost, backend.ErrCompacted,
}

// Classified reports whether err is an answer of the contract already.
func Classified(err error) bool {
	for _, class := range classes {
		if errors.Is(err, class) {
			return true
		}
	}
	return false
}

// CallError says which call on which name failed (a *backend.CallError), and gives err its class: classOf knows the
// service's own errors, and returns backend.ErrUnavailable, backend.ErrMisconfigured, backend.ErrUnknown, or nil for an
// error that it does not know. The end of a context stays what it is in a call that changes nothing or that marks what
// it has sent, such as acquire. Everything else is backend.ErrUnknown: whoever reads that looks again, and loses
// nothing by it. A nil err is nil.
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
func Changes(call string) bool {
	return call == "release" || call == "renew" || call == "force-release"
}

// IsContext reports whether err says that a context has ended.
func IsContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
