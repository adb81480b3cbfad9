package backend

// The answers of the contract. A caller branches on the sentinels with errors.Is, and asks the types with errors.As for
// what a person needs to know: who holds, which setting, which cycle. Each type answers errors.Is for its sentinel, so
// a driver returns the type alone, and wraps it in a CallError.
//
// The sentinels divide failures by what the caller has to do next, not by what went wrong below: wait, look again, fix
// the program, fix the service, stop. The cause stays in the chain for those who want it.

import (
	"errors"
	"fmt"
	"time"
)

// The answers a driver can give, to branch on with errors.Is. Package fencelock re-exports them under the same names.
var (
	// ErrHeld: somebody else holds the lock, or waits for it on a fair driver. A *HeldError is in the chain. Nothing
	// was left in the service. Try again later, or wait.
	ErrHeld = errors.New("lock is held")
	// ErrNotHeld: the hold that was named does not exist any more, or never did. From Renew it is a loss; from a
	// repeated Release it is success.
	ErrNotHeld = errors.New("lock is not held by this request")
	// ErrUnsupported: the driver does not do this, in this configuration, and has changed nothing. The same value as
	// errors.ErrUnsupported.
	ErrUnsupported = errors.ErrUnsupported
	// ErrUnavailable: the service could not be reached, and nothing was done. It is the answer only if no part of the
	// request can have left the process, or if the service refused it before carrying it out; ErrUnknown is the answer
	// in doubt.
	ErrUnavailable = errors.New("lock service is unavailable")
	// ErrUnknown: the request left, no answer came: the service may or may not have done it. The core releases in the
	// background what an acquire may have left; a renewal is tried again until the deadline.
	ErrUnknown = errors.New("outcome is unknown")
	// ErrMisconfigured: the service's settings make it unfit (Redis that evicts keys, a replica). A *ConfigError is in
	// the chain. It will be the same next time, until an operator changes the setting.
	ErrMisconfigured = errors.New("lock service is misconfigured")
	// ErrDeadlock: waiting would close a cycle of holders that wait for each other. A *DeadlockError is in the chain.
	// The way out is to release what is held and to begin again.
	ErrDeadlock = errors.New("waiting would deadlock")
	// ErrLimitMismatch: the name is in use with another kind, or with another limit of permits, or as a path. It ends
	// when all who use it that way have gone; usually two parts of a program disagree.
	ErrLimitMismatch = errors.New("name is in use with another kind or limit")
	// ErrInvalidName: the name fails ValidateName. An *InvalidError is in the chain.
	ErrInvalidName = errors.New("invalid lock name")
	// ErrInvalidTTL: the TTL is outside the driver's range or granularity. An *InvalidError is in the chain.
	ErrInvalidTTL = errors.New("invalid TTL")
	// ErrInvalidOption: another option has a value that makes no sense. An *InvalidError is in the chain.
	ErrInvalidOption = errors.New("invalid option")
	// ErrClosed: the client or driver was closed, before the call or while it waited.
	ErrClosed = errors.New("closed")
	// ErrHistoryLost: the service has forgotten what it acknowledged: it was wiped, restored from a backup, or is
	// another one behind the same address. Nothing was acquired. A *HistoryError is in the chain. It stays until the
	// program creates a new driver, because holders of the forgotten holds may still be running, and a person has to
	// make sure that they are not.
	ErrHistoryLost = errors.New("lock service has lost its history")
	// ErrCompacted: the changes since the revision that was asked for are no longer kept. Look again, and watch from
	// there.
	ErrCompacted = errors.New("revision is compacted")
)

// Reason says why a hold ended against its holder's will. It is text, so that it reads well in logs and a service's own
// reasons can be passed on.
//
// The core hands it to the holder in a fencelock.LostError. What a driver answers in a NotHeldError, or tells through
// Request.Lost, is passed on as it is.
type Reason string

const (
	// ReasonExpired: the local deadline passed without a confirmed renewal. From a driver: the TTL of the hold ran out
	// in the service.
	ReasonExpired Reason = "expired"
	// ReasonSessionExpired: the service ended the session on which the hold lived, and with it every other hold of the
	// session.
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

// CallError says which call on which name failed: `redis: acquire "orders/7": …`. Every error of a driver's methods has
// one in its chain; the core adds its own only where the driver has not named that call already.
type CallError struct {
	// Driver is Description.Name, or "fencelock" for what the core itself noticed.
	Driver string
	// Call is the verb: acquire, renew, release, ping, …
	Call string
	// Name is the lock's name; empty for calls without one.
	Name string
	// Err is the cause, which errors.Is and errors.As see through Unwrap.
	Err error
}

// Error returns the driver, the call, the quoted name and the cause.
func (e *CallError) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("%s: %s: %v", e.Driver, e.Call, e.Err)
	}
	return fmt.Sprintf("%s: %s %q: %v", e.Driver, e.Call, e.Name, e.Err)
}

// Unwrap returns the cause.
func (e *CallError) Unwrap() error { return e.Err }

// HeldError is ErrHeld with what the service told about the holder. All fields but Name may be zero: not every service
// tells. What they say may be out of date when it arrives.
//
//	held := (*backend.HeldError)(nil)
//	if errors.As(err, &held) && held.RetryAfter > 0 {
//		log.Printf("%s has it for up to %v", held.Holder, held.RetryAfter)
//	}
type HeldError struct {
	Name       string
	Holder     string        // the holder's Owner; empty if not known
	HoldID     string        // the holder's Request.HoldID; empty if not known
	RetryAfter time.Duration // when the hold ends unless it is renewed; 0 if not known

	// SameRequest: the holder got the lock with the same request id, through another client: the former life of a
	// restarted process, usually. Set by the core.
	SameRequest bool
}

// Error says who holds the lock and for how long, as far as it is known. It never shows a request id.
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

// NotHeldError is ErrNotHeld with the reason, where the service tells. With an empty Reason the core takes
// ReasonEvicted.
type NotHeldError struct {
	Name   string
	Reason Reason
}

// Error returns the text of ErrNotHeld and the reason.
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
//
// For example, Ann's worker holds "a" and asks for "b", while Bob's holds "b" and waits for "a". Ann's request is
// refused, and Bob goes on waiting:
//
//	waiting would deadlock: ann has "a" and wants "b"; bob has "b" and wants "a"
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

// Error lists the edges of the cycle, or names the two locks that go against the order.
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

// InvalidError names a value that was refused, and why, before anything was sent. Its text is for the programmer who
// wrote the value.
type InvalidError struct {
	Kind  error  // ErrInvalidName, ErrInvalidTTL or ErrInvalidOption
	What  string // name, TTL, WaitAtMost, …
	Value string // the value, quoted where it is text
	Why   string
}

// Error returns what was invalid, its value and the reason.
func (e *InvalidError) Error() string {
	return fmt.Sprintf("invalid %s %s: %s", e.What, e.Value, e.Why)
}

// Unwrap returns Kind, the sentinel.
func (e *InvalidError) Unwrap() error { return e.Kind }

// ConfigError names a setting of the service that makes it unfit, and the value that would do. It is for an operator:
// Error can be acted on without this library's source.
type ConfigError struct {
	Setting string // maxmemory-policy
	Value   string // allkeys-lru
	Want    string // noeviction
	Why     string
}

// Error returns the setting, its value, the value that is needed, and why.
func (e *ConfigError) Error() string {
	return fmt.Sprintf("%v: %s is %q, must be %s: %s", ErrMisconfigured, e.Setting, e.Value, e.Want, e.Why)
}

// Is reports true for ErrMisconfigured.
func (e *ConfigError) Is(target error) bool { return target == ErrMisconfigured }

// HistoryError is ErrHistoryLost: the sign that the service has forgotten what it acknowledged.
type HistoryError struct {
	What string // what fell or changed: "cluster id", "revision", `token of "orders/7"`, …
	// Was and Now are what this process had seen before, and what it sees now.
	Was, Now string
}

// Error names the sign and what an operator does next, in the order in which it has to be done: tokens may be issued
// again that guards have seen, so nothing may go on by itself.
func (e *HistoryError) Error() string {
	return fmt.Sprintf(
		"%v: %s was %s and is %s; it was wiped, restored from an older backup, or replaced. Make sure that no "+
			"holder of before still runs, let the guards accept the new tokens, then restart this process",
		ErrHistoryLost, e.What, e.Was, e.Now)
}

// Is reports true for ErrHistoryLost.
func (e *HistoryError) Is(target error) bool { return target == ErrHistoryLost }
