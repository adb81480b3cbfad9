package backend

// The errors of the contract. A caller branches on the sentinels with errors.Is, and gets details from the types with
// errors.As: the holder, the setting, the cycle. Each type matches its sentinel, so a driver returns the type alone,
// and wraps it in a CallError.
//
// The sentinels divide failures by the caller's next step, not by their cause: wait, look, fix the program, fix
// the service, stop. The cause stays in the chain.

import (
	"errors"
	"fmt"
	"time"
)

// The answers a driver can give, to branch on with errors.Is. Package fencelock re-exports them under the same names.
var (
	// ErrHeld: another client holds the lock, or waits for it on a fair driver. A *HeldError is in the chain. No
	// entry was left in the service. Retry later, or wait.
	ErrHeld = errors.New("lock is held")
	// ErrNotHeld: the hold no longer exists, or never did. From Renew it is a loss; from a
	// repeated Release it is success.
	ErrNotHeld = errors.New("lock is not held by this request")
	// ErrUnsupported: the driver does not support the call in this configuration, and has made no change. The same
	// value as errors.ErrUnsupported.
	ErrUnsupported = errors.ErrUnsupported
	// ErrUnavailable: the service could not be reached, and did not act. Return it only if no part of the request can
	// have left the process, or if the service refused it before carrying it out; in doubt return ErrUnknown.
	ErrUnavailable = errors.New("lock service is unavailable")
	// ErrUnknown: the request left, no answer came: the service may or may not have done it. The core releases in the
	// background the possible leftover of an acquire; a renewal is retried until the deadline.
	ErrUnknown = errors.New("outcome is unknown")
	// ErrMisconfigured: the service's settings make it unfit (Redis that evicts keys, a replica). A *ConfigError is in
	// the chain. It will be the same next time, until an operator changes the setting.
	ErrMisconfigured = errors.New("lock service is misconfigured")
	// ErrDenied: the rules of the service do not permit it to this caller, or its credential is not valid. The call had
	// no effect. The error stays until an operator changes the rules or the credential.
	ErrDenied = errors.New("denied")
	// ErrDeadlock: waiting would close a cycle of holders that wait for each other. A *DeadlockError is in the chain.
	// The caller should release its holds and retry.
	ErrDeadlock = errors.New("waiting would deadlock")
	// ErrQueueFull: the name is held, and its queue is full. The call had no effect. Retry
	// with a pause: immediate retries add to the load.
	ErrQueueFull = errors.New("the lock's queue is full")
	// ErrLimitMismatch: the name is in use with another kind, or with another limit of permits, or as a path. A
	// *LimitError is in the chain. It ends when all clients with the other use have left; usually two parts of a program
	// disagree.
	ErrLimitMismatch = errors.New("name is in use with another kind or limit")
	// ErrInvalidName: the name fails ValidateName. An *InvalidError is in the chain.
	ErrInvalidName = errors.New("invalid lock name")
	// ErrInvalidTTL: the TTL is outside the driver's range or granularity. An *InvalidError is in the chain.
	ErrInvalidTTL = errors.New("invalid TTL")
	// ErrInvalidOption: another option has an invalid value. An *InvalidError is in the chain.
	ErrInvalidOption = errors.New("invalid option")
	// ErrClosed: the client or driver was closed, before the call or while it waited.
	ErrClosed = errors.New("closed")
	// ErrHistoryLost: the service has lost acknowledged state: it was wiped, restored from a backup, or is another
	// service behind the same address. No lock was acquired. A *HistoryError is in the chain. The error is permanent
	// until the program creates a new driver, because holders of the lost holds may still be running, and an operator
	// has to make sure that they are not.
	ErrHistoryLost = errors.New("lock service has lost its history")
	// ErrCompacted: the changes since the requested revision are no longer kept. Call Look, and watch from
	// there.
	ErrCompacted = errors.New("revision is compacted")
)

// Reason is the reason why a hold was lost. It is text, so that it reads well in logs and a service's own reasons can
// be passed on.
//
// The core passes it to the holder in a fencelock.LostError. The reason in a driver's NotHeldError, or in
// Request.Lost, is passed on unchanged.
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
	// ReasonHistoryLost: the service has lost acknowledged state, see ErrHistoryLost.
	ReasonHistoryLost Reason = "history-lost"
	// ReasonReplaced: an acquire with the same request id through the same client got the hold, see
	// fencelock.RequestID.
	ReasonReplaced Reason = "replaced"
	// ReasonMaxHold: the hold has lasted as long as a policy of the service permits, and is no longer extended: see
	// Renewal.Last. The core declares the loss before the service grants the name to another client.
	ReasonMaxHold Reason = "max-hold"
	// ReasonClosed: the client was closed under the hold.
	ReasonClosed Reason = "closed"
)

// Loss describes the end of a hold.
type Loss struct {
	Reason Reason
	// Text is the reason given to ForceRelease, if Reason is ReasonForceReleased and the service keeps it; By and
	// Principal are from the ForceRequest, or the identity that the service itself has authenticated.
	Text, By, Principal string
}

// NotHeld returns the error for a hold of the name that was lost so.
func (l Loss) NotHeld(name string) *NotHeldError {
	return &NotHeldError{Name: name, Reason: l.Reason, Text: l.Text, By: l.By, Principal: l.Principal}
}

// CallError names the failed call and its lock: `redis: acquire "orders/7": …`. Every error of a driver's methods has
// one in its chain; the core adds its own only where the driver has not named that call already.
type CallError struct {
	// Driver is Description.Name, or "fencelock" for errors of the core.
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

// HeldError is ErrHeld with information about the holder. All fields but Name may be zero: not every service returns
// them. They may be out of date when they arrive.
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

// Error returns a message with the holder and the remaining time, if they are known. It never shows a request id.
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

// LimitError is ErrLimitMismatch with the current use of the name. All fields but Name may be zero: not every service
// returns them.
type LimitError struct {
	Name string
	// Kind and Limit describe the current use. Limit is zero for a kind without permits.
	Kind  Kind
	Limit int
	// Holder is the Owner of a hold or a waiter that uses the name so.
	Holder string
}

// Error describes the current use of the name, and names the holder.
func (e *LimitError) Error() string {
	s := fmt.Sprintf("%v: %q is in use", ErrLimitMismatch, e.Name)
	switch {
	case e.Limit > 0:
		s += fmt.Sprintf(" with a limit of %d permits", e.Limit)
	case e.Holder != "":
		s += fmt.Sprintf(" with %v holds", e.Kind)
	}
	if e.Holder != "" {
		s += ", by " + e.Holder
	}
	return s
}

// Is reports true for ErrLimitMismatch.
func (e *LimitError) Is(target error) bool { return target == ErrLimitMismatch }

// NotHeldError is ErrNotHeld with the reason, if the service reports one. With an empty Reason the core takes
// ReasonEvicted.
type NotHeldError struct {
	Name   string
	Reason Reason

	Text, By, Principal string // see Loss
}

// Error returns the text of ErrNotHeld, the reason and its text.
func (e *NotHeldError) Error() string {
	s := ErrNotHeld.Error()
	if e.Reason != "" {
		s += ": " + string(e.Reason)
	}
	if e.Text != "" {
		s += ": " + e.Text
	}
	return s
}

// Is reports true for ErrNotHeld.
func (e *NotHeldError) Is(target error) bool { return target == ErrNotHeld }

// DeadlockError is ErrDeadlock with the cycle: each waits for a lock of the next one, and the last for a lock of the
// first. The first is the refused request. If Options.Order of the client refused it before a request was sent, Order
// is set and the cycle is the one edge that goes against the order.
//
// For example, Ann's worker holds "a" and asks for "b", while Bob's holds "b" and waits for "a". Ann's request is
// refused, and Bob still waits:
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

// Error names the invalid setting, its value and the reason.
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

// Error returns the setting, its value, the required value, and the reason.
func (e *ConfigError) Error() string {
	return fmt.Sprintf("%v: %s is %q, must be %s: %s", ErrMisconfigured, e.Setting, e.Value, e.Want, e.Why)
}

// Is reports true for ErrMisconfigured.
func (e *ConfigError) Is(target error) bool { return target == ErrMisconfigured }

// HistoryError is ErrHistoryLost with the sign that the service has lost acknowledged state.
type HistoryError struct {
	What string // what fell or changed: "cluster id", "revision", `token of "orders/7"`, …
	// Was and Now are the value that this process had seen before, and the current value.
	Was, Now string
}

// Error names the sign and the steps for the operator, in order: the service may reissue tokens that guards have
// seen, so there is no automatic recovery.
func (e *HistoryError) Error() string {
	return fmt.Sprintf(
		"%v: %s was %s and is %s; it was wiped, restored from an older backup, or replaced. Make sure that no "+
			"holder of before still runs, let the guards accept the new tokens, then restart this process",
		ErrHistoryLost, e.What, e.Was, e.Now)
}

// Is reports true for ErrHistoryLost.
func (e *HistoryError) Is(target error) bool { return target == ErrHistoryLost }
