package builtin

// What the wire's errors mean in the words of the contract.

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

var (
	// errSessionEnded: the session is gone, and with it all that hung on it.
	errSessionEnded = errors.New("the session has ended")
	// errConflict: another session uses the request id.
	errConflict = errors.New("another client uses this request id")
	// errAgain: the sequence was used up by an earlier attempt of the same request.
	errAgain = errors.New("the attempt is over")
)

// LimitError says which limit of the server is reached: see docs/SERVER.md. Nothing was done, and later there may be
// room. It wraps backend.ErrUnavailable.
//
//	var full *builtin.LimitError
//	if errors.As(err, &full) && full.Limit == "waiters-per-name" {
//		// this queue is long enough
//	}
type LimitError struct {
	Limit   string // sessions, holds, waits, waiters-per-name, …: the name under which the server is told it
	Message string // for people
}

// Error names the limit, and what the server says of it.
func (e *LimitError) Error() string {
	return fmt.Sprintf("%v: the server takes no more: %s: %s", backend.ErrUnavailable, e.Limit, e.Message)
}

// Is reports true for backend.ErrUnavailable.
func (e *LimitError) Is(target error) bool { return target == backend.ErrUnavailable }

// replyError is an error of the wire in the words of the contract, or one of the driver's own above, which callers of
// ask deal with. Whatever this version does not know leaves the outcome open.
//
//	HELD                          *backend.HeldError
//	NOT_HELD                      *backend.NotHeldError, with the reason where the server remembers it
//	SESSION_ENDED, CONFLICT       errSessionEnded, errConflict
//	CANCELLED, STALE              errAgain
//	DEADLOCK                      *backend.DeadlockError
//	LIMIT_MISMATCH                backend.ErrLimitMismatch
//	INVALID                       *backend.InvalidError
//	COMPACTED, UNSUPPORTED        backend.ErrCompacted, backend.ErrUnsupported
//	DENIED                        backend.ErrMisconfigured
//	EXHAUSTED                     *LimitError
//	UNAVAILABLE, NOT_LEADER       backend.ErrUnavailable
//	UNKNOWN, and all others       backend.ErrUnknown
func replyError(e *lockpb.Error) error {
	switch e.Code {
	case lockpb.Code_CODE_HELD:
		return &backend.HeldError{
			Name: e.Name, Holder: e.Holder, HoldID: e.HoldId, RetryAfter: time.Duration(e.RetryAfterNanos),
		}
	case lockpb.Code_CODE_NOT_HELD:
		return &backend.NotHeldError{Reason: reasonOf(e.Reason)}
	case lockpb.Code_CODE_SESSION_ENDED:
		return errSessionEnded
	case lockpb.Code_CODE_CONFLICT:
		return errConflict
	case lockpb.Code_CODE_CANCELLED, lockpb.Code_CODE_STALE:
		return errAgain
	case lockpb.Code_CODE_DEADLOCK:
		return deadlockError(e)
	case lockpb.Code_CODE_LIMIT_MISMATCH:
		return fmt.Errorf("%w: %q", backend.ErrLimitMismatch, e.Message)
	case lockpb.Code_CODE_INVALID:
		return invalidError(e)
	case lockpb.Code_CODE_COMPACTED:
		return fmt.Errorf("%w: the oldest revision is %d", backend.ErrCompacted, e.CompactRevision)
	case lockpb.Code_CODE_UNSUPPORTED:
		return fmt.Errorf("%w: %s", backend.ErrUnsupported, e.Message)
	case lockpb.Code_CODE_DENIED:
		return fmt.Errorf("%w: %s", backend.ErrMisconfigured, e.Message)
	case lockpb.Code_CODE_EXHAUSTED:
		return &LimitError{Limit: e.Field, Message: e.Message}
	case lockpb.Code_CODE_UNAVAILABLE, lockpb.Code_CODE_NOT_LEADER:
		return fmt.Errorf("%w: %s", backend.ErrUnavailable, e.Message)
	}
	return fmt.Errorf("%w: %v: %s", backend.ErrUnknown, e.Code, e.Message)
}

// deadlockError tells of the cycle that the newcomer, who is the first and the last in it, would close.
//
// The server lists holders and waiters, each with the name that the one before it waits for. An edge of the contract is
// one owner with what it holds and what it wants, so each name stands in two edges, and the newcomer holds the last
// one.
func deadlockError(e *lockpb.Error) error {
	all := &backend.DeadlockError{}
	for i := range len(e.Cycle) - 1 {
		edge := backend.DeadlockEdge{Owner: e.Cycle[i].Owner, Holds: e.Cycle[i].Name, Wants: e.Cycle[i+1].Name}
		if i == 0 {
			edge.Holds = e.Cycle[len(e.Cycle)-1].Name
		}
		all.Cycle = append(all.Cycle, edge)
	}
	return all
}

// invalidError is for a value that the server refuses though it passed the checks here: its limits may be narrower.
func invalidError(e *lockpb.Error) error {
	kind := backend.ErrInvalidOption
	switch e.Field {
	case "ttl", "TTL":
		kind = backend.ErrInvalidTTL
	case "name", "Name", "NameBytes":
		kind = backend.ErrInvalidName
	}
	return &backend.InvalidError{Kind: kind, What: e.Field, Value: "of the request", Why: e.Message}
}

// reasonOf is the contract's word for why a hold ended; empty for what the server does not tell, and for a move, which
// is no loss by itself.
func reasonOf(r lockpb.Reason) backend.Reason {
	switch r {
	case lockpb.Reason_REASON_SESSION_ENDED:
		return backend.ReasonSessionExpired
	case lockpb.Reason_REASON_FORCE_RELEASED:
		return backend.ReasonForceReleased
	}
	return ""
}

// callError names the call and the name. It is the last step of every call of the contract: errors of this package's
// own must not leave it, and become ErrUnavailable, since all of them say that trying again is right.
//
// That the service has forgotten what it acknowledged is an error about a lost hold too, for the calls that are about
// one: the core ends the lease by that at once, and does not wait for its deadline.
func (d *Driver) callError(call, name string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, backend.ErrHistoryLost) && (call == "renew" || call == "release" || call == "expire") {
		err = fmt.Errorf("%w: %w", &backend.NotHeldError{Reason: backend.ReasonHistoryLost}, err)
	}
	var held *backend.HeldError
	if errors.As(err, &held) {
		held.Name = cmp.Or(held.Name, name)
	}
	var gone *backend.NotHeldError
	if errors.As(err, &gone) {
		gone.Name = name
	}
	switch {
	case errors.Is(err, errSessionEnded), errors.Is(err, errConflict), errors.Is(err, errAgain):
		err = fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
	}
	return &backend.CallError{Driver: driverName, Call: call, Name: name, Err: err}
}

// unavailable is the error of a call that ended before anything was sent.
func unavailable(err error) error {
	return fmt.Errorf("%w: nothing was sent: %w", backend.ErrUnavailable, err)
}
