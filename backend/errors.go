package backend

import (
	"errors"
	"fmt"
	"time"
)

// The answers a driver can give, to branch on with errors.Is. Package fencelock re-exports them under the same names.
var (
	// ErrHeld: somebody else holds the lock. A *HeldError is in the chain.
	ErrHeld = errors.New("lock is held")
	// ErrNotHeld: the hold that was named does not exist any more, or never did.
	ErrNotHeld = errors.New("lock is not held by this request")
	// ErrUnsupported: the driver does not do this, in this configuration. The same value as errors.ErrUnsupported.
	ErrUnsupported = errors.ErrUnsupported
	// ErrUnavailable: the service could not be reached, and nothing was done.
	ErrUnavailable = errors.New("lock service is unavailable")
	// ErrUnknown: the request left, no answer came: the service may or may not have done it.
	ErrUnknown = errors.New("outcome is unknown")
	// ErrMisconfigured: the service's settings make it unfit (Redis that evicts keys, a replica). A *ConfigError is in
	// the chain.
	ErrMisconfigured = errors.New("lock service is misconfigured")
	// ErrDeadlock: waiting would close a cycle of holders that wait for each other. A *DeadlockError is in the chain.
	ErrDeadlock = errors.New("waiting would deadlock")
	// ErrLimitMismatch: the name is in use with another kind, or with another limit of permits.
	ErrLimitMismatch = errors.New("name is in use with another kind or limit")
	// ErrInvalidName: the name fails ValidateName. An *InvalidError is in the chain.
	ErrInvalidName = errors.New("invalid lock name")
	// ErrInvalidTTL: the TTL is outside the driver's range or granularity. An *InvalidError is in the chain.
	ErrInvalidTTL = errors.New("invalid TTL")
	// ErrInvalidOption: another option has a value that cannot be meant. An *InvalidError is in the chain.
	ErrInvalidOption = errors.New("invalid option")
	// ErrClosed: the client or driver was closed.
	ErrClosed = errors.New("closed")
	// ErrHistoryLost: the service has forgotten what it acknowledged: it was wiped, restored from a backup, or is
	// another one behind the same address. Nothing was acquired. A *HistoryError is in the chain.
	ErrHistoryLost = errors.New("lock service has lost its history")
	// ErrCompacted: the events since the asked revision are no longer kept.
	ErrCompacted = errors.New("revision is compacted")
)

// Reason says why a hold ended against its holder's will.
type Reason string

const (
	// ReasonExpired: the local deadline passed without a confirmed renewal.
	ReasonExpired Reason = "expired"
	// ReasonSessionExpired: the service ended the session on which the hold lived.
	ReasonSessionExpired Reason = "session-expired"
	// ReasonForceReleased: an administrator took the hold away.
	ReasonForceReleased Reason = "force-released"
	// ReasonEvicted: the service no longer has the entry although its TTL had not passed: it was evicted, flushed,
	// deleted, lost in a failover, or the server's clock jumped.
	ReasonEvicted Reason = "evicted"
	// ReasonHistoryLost: the service has forgotten what it acknowledged, see ErrHistoryLost.
	ReasonHistoryLost Reason = "history-lost"
	// ReasonReplaced: an acquire with the same request id through the same client got the hold, see
	// fencelock.RequestID.
	ReasonReplaced Reason = "replaced"
	// ReasonClosed: the client was closed under the hold.
	ReasonClosed Reason = "closed"
)

// CallError says which call on which name failed: `redis: acquire "orders/7": …`.
type CallError struct {
	Driver string // who says so
	Call   string // acquire, renew, release, ping, …
	Name   string // the lock's name; empty for calls without one
	Err    error
}

func (e *CallError) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("%s: %s: %v", e.Driver, e.Call, e.Err)
	}
	return fmt.Sprintf("%s: %s %q: %v", e.Driver, e.Call, e.Name, e.Err)
}

func (e *CallError) Unwrap() error { return e.Err }

// HeldError is ErrHeld with what the service told about the holder.
type HeldError struct {
	Name       string
	Holder     string        // the holder's Owner; empty if not known
	HoldID     string        // the holder's Request.HoldID; empty if not known
	RetryAfter time.Duration // when the hold ends unless it is renewed; 0 if not known

	// SameRequest: the holder got the lock with the same request id, through another client: the former life of a
	// restarted process, usually. Set by the core.
	SameRequest bool
}

func (e *HeldError) Error() string {
	s := "lock is held"
	if e.Holder != "" {
		s += " by " + e.Holder
	}
	if e.RetryAfter > 0 {
		s += fmt.Sprintf(", for another %v unless renewed", e.RetryAfter)
	}
	if e.SameRequest {
		s += ", with the same request id through another client"
	}
	return s
}

// Is reports true for ErrHeld.
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// NotHeldError is ErrNotHeld with the reason, where the service tells.
type NotHeldError struct {
	Name   string
	Reason Reason
}

func (e *NotHeldError) Error() string {
	if e.Reason == "" {
		return ErrNotHeld.Error()
	}
	return ErrNotHeld.Error() + ": " + string(e.Reason)
}

// Is reports true for ErrNotHeld.
func (e *NotHeldError) Is(target error) bool { return target == ErrNotHeld }

// DeadlockError is ErrDeadlock with the cycle: each waits for what the next one has, and the last for what the first
// has. The first is the request that was refused. Where Options.Order of the client refused it before anything was
// sent, Order is set and the cycle is the one edge that goes against the order.
type DeadlockError struct {
	Cycle []DeadlockEdge
	Order bool
}

// DeadlockEdge is one line of work in a cycle.
type DeadlockEdge struct {
	Owner string // who: Request.Owner
	Holds string // the name that the one before waits for, which this one holds, or waits for ahead of it
	Wants string // the name that this one waits for
}

func (e *DeadlockError) Error() string {
	if e.Order && len(e.Cycle) == 1 {
		return fmt.Sprintf("%v: %q stands before %q, which is held, in the order of locks",
			ErrDeadlock, e.Cycle[0].Wants, e.Cycle[0].Holds)
	}
	s := ErrDeadlock.Error()
	for i, edge := range e.Cycle {
		sep := "; "
		if i == 0 {
			sep = ": "
		}
		s += fmt.Sprintf("%s%s has %q and wants %q", sep, edge.Owner, edge.Holds, edge.Wants)
	}
	return s
}

// Is reports true for ErrDeadlock.
func (e *DeadlockError) Is(target error) bool { return target == ErrDeadlock }

// InvalidError names a value that was refused, and why.
type InvalidError struct {
	Kind  error  // ErrInvalidName, ErrInvalidTTL or ErrInvalidOption
	What  string // name, TTL, WaitAtMost, …
	Value string // the value, quoted where it is text
	Why   string
}

func (e *InvalidError) Error() string {
	return fmt.Sprintf("invalid %s %s: %s", e.What, e.Value, e.Why)
}

func (e *InvalidError) Unwrap() error { return e.Kind }

// ConfigError names a setting of the service that makes it unfit.
type ConfigError struct {
	Setting string // maxmemory-policy
	Value   string // allkeys-lru
	Want    string // noeviction
	Why     string
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("%v: %s is %q, must be %s: %s", ErrMisconfigured, e.Setting, e.Value, e.Want, e.Why)
}

// Is reports true for ErrMisconfigured.
func (e *ConfigError) Is(target error) bool { return target == ErrMisconfigured }

// HistoryError is ErrHistoryLost: the sign that the service has forgotten what it acknowledged.
type HistoryError struct {
	What     string // what fell or changed: "cluster id", "revision", `token of "orders/7"`, …
	Was, Now string
}

func (e *HistoryError) Error() string {
	return fmt.Sprintf("%v: %s was %s and is %s; it was wiped, restored from an older backup, or replaced. Make sure that no "+
		"holder of before still runs, let the guards accept the new tokens, then restart this process",
		ErrHistoryLost, e.What, e.Was, e.Now)
}

// Is reports true for ErrHistoryLost.
func (e *HistoryError) Is(target error) bool { return target == ErrHistoryLost }
