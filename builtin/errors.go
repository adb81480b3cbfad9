package builtin

// The errors of the protocol, converted to those of the contract.

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// errConflict: another session uses the request id.
var errConflict = errors.New("another client uses this request id")

// LimitError names the server limit that is reached: see docs/SERVER.md. The call had no effect, and there may be room
// later. It wraps backend.ErrQueueFull if the name has too many waiters, otherwise backend.ErrUnavailable.
type LimitError struct {
	Limit   string // the server's option for the limit: sessions, holds, waits, waiters-per-name, …
	Message string // for people
}

// Error names the limit, and has the server's message.
func (e *LimitError) Error() string {
	return fmt.Sprintf("%v: the server takes no more: %s: %s", e.class(), e.Limit, e.Message)
}

// Is reports true for the class of the error.
func (e *LimitError) Is(target error) bool { return target == e.class() }

// Quota names the limit, for programs that forward it.
func (e *LimitError) Quota() string { return e.Limit }

func (e *LimitError) class() error {
	if e.Limit == "waiters-per-name" {
		return backend.ErrQueueFull
	}
	return backend.ErrUnavailable
}

// ClosedError means that the cluster was restored, from a backup or one disk, and refuses clients until every earlier
// lock has expired. It wraps backend.ErrUnavailable.
type ClosedError struct {
	Until time.Time // by this machine's clock, for people
}

// Error returns a message with Until.
func (e *ClosedError) Error() string {
	return "the cluster was restored and is closed until " + e.Until.Format(time.RFC3339)
}

// Is reports true for backend.ErrUnavailable.
func (e *ClosedError) Is(target error) bool { return target == backend.ErrUnavailable }

// closedError returns a *ClosedError if a leader serves no clients yet, for the given time, and nil for 0.
func closedError(nanos int64) error {
	if nanos == 0 {
		return nil
	}
	return &ClosedError{time.Now().Add(time.Duration(nanos))}
}

// replyError converts an error of the protocol to an error of the contract or the engine, or errConflict. An unknown code
// leaves the outcome open. CANCELLED and STALE answer sequences, which this client does not send.
func replyError(e *lockpb.Error) error {
	switch e.Code {
	case lockpb.Code_CODE_HELD:
		return &backend.HeldError{
			Name: e.Name, Holder: e.Holder, HoldID: e.HoldId, RetryAfter: time.Duration(e.RetryAfterNanos),
		}
	case lockpb.Code_CODE_NOT_HELD:
		return &backend.NotHeldError{Reason: reasonOf(e.Reason)}
	case lockpb.Code_CODE_SESSION_ENDED:
		return engine.ErrNoSession
	case lockpb.Code_CODE_CONFLICT:
		return errConflict
	case lockpb.Code_CODE_DEADLOCK:
		return deadlockError(e)
	case lockpb.Code_CODE_LIMIT_MISMATCH:
		return &backend.LimitError{
			Name: cmp.Or(e.Name, e.Message), Kind: kindOf(e.Kind), Limit: int(e.Limit), Holder: e.Holder,
		}
	case lockpb.Code_CODE_INVALID:
		return invalidError(e)
	case lockpb.Code_CODE_COMPACTED:
		return fmt.Errorf("%w: the oldest revision is %d", backend.ErrCompacted, e.CompactRevision)
	case lockpb.Code_CODE_UNSUPPORTED:
		return fmt.Errorf("%w: %s", backend.ErrUnsupported, e.Message)
	case lockpb.Code_CODE_DENIED:
		return fmt.Errorf("%w: %s", backend.ErrDenied, e.Message)
	case lockpb.Code_CODE_EXHAUSTED:
		return &engine.Refusal{Err: &LimitError{Limit: e.Field, Message: e.Message}}
	case lockpb.Code_CODE_UNAVAILABLE, lockpb.Code_CODE_NOT_LEADER, lockpb.Code_CODE_CANCELLED, lockpb.Code_CODE_STALE:
		return fmt.Errorf("%w: %s", backend.ErrUnavailable, e.Message)
	}
	return fmt.Errorf("%w: %v: %s", backend.ErrUnknown, e.Code, e.Message)
}

// deadlockError describes the cycle that the new request, which is the first and the last in it, would close.
//
// The server lists holders and waiters, each with the name that its predecessor waits for. An edge of the contract is
// one owner with its held and its wanted name, so each name is in two edges, and the owner of the new request holds
// the last one.
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

// invalidError returns the error for a value that passed the driver's checks but that the server refuses, because its
// limits may be narrower.
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

// reasonOf returns the contract's reason for the end of a hold; empty for reasons that the server does not report,
// and for a move, which is not a loss.
func reasonOf(r lockpb.Reason) backend.Reason {
	switch r {
	case lockpb.Reason_REASON_SESSION_ENDED:
		return backend.ReasonSessionExpired
	case lockpb.Reason_REASON_FORCE_RELEASED:
		return backend.ReasonForceReleased
	case lockpb.Reason_REASON_MAX_HOLD:
		return backend.ReasonMaxHold
	}
	return ""
}
