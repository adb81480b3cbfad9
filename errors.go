package fencelock

// The errors of calls. The sentinels and most types are aliases of names in package backend, so that a program that
// uses locks imports this package alone, and a driver's error matches without a translation. This file defines the
// errors of tiers and leases: ErrLost, ErrTier, LostError and CapabilityError.
//
//	err := locks.Do(ctx, "accounts/42", fn)
//	switch {
//	case errors.Is(err, fencelock.ErrLost):        // fn was stopped: another client may hold the lock
//	case errors.Is(err, fencelock.ErrHeld):        // another client holds the lock
//	case errors.Is(err, fencelock.ErrUnavailable): // retry later; the service did not act
//	case errors.Is(err, fencelock.ErrUnknown):     // the same, and the clean-up is under way
//	}

import (
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// The errors of calls, to branch on with errors.Is. A context's error stays in the chain beside them.
var (
	// ErrHeld: another client holds the lock, or is ahead in the queue. A *HeldError is in the chain.
	ErrHeld = backend.ErrHeld
	// ErrLost: the hold ended before its holder released it. A *LostError is in the chain. A later holder may have
	// overtaken work that was done under it; only a guard refuses such writes.
	ErrLost = errors.New("lock was lost")
	// ErrNotHeld: there is no hold to release: it was released before, or has ended. From Leader and ForceRelease:
	// the name is not held.
	ErrNotHeld = backend.ErrNotHeld
	// ErrTier: the driver cannot serve the tier, by its type or in its present configuration. A *CapabilityError is in
	// the chain.
	ErrTier = errors.New("driver cannot serve this tier")
	// ErrUnsupported: the driver does not support this; no request was sent. The same value as errors.ErrUnsupported.
	// A *CapabilityError is in the chain where the core noticed.
	ErrUnsupported = backend.ErrUnsupported
	// ErrUnavailable: the lock service could not be reached, and did not act. Usually temporary.
	ErrUnavailable = backend.ErrUnavailable
	// ErrUnknown: the service may or may not have carried out the call. The client cleans up in the background until
	// it knows.
	ErrUnknown = backend.ErrUnknown
	// ErrMisconfigured: the service's settings make it unfit for locks. A *ConfigError is in the chain. Permanent
	// until an operator changes them.
	ErrMisconfigured = backend.ErrMisconfigured
	// ErrDenied: the rules of the bundled server, or of a gateway, do not permit it to this client, or its credential
	// is not valid: see docs/SECURITY.md. The call had no effect. The error stays until an operator changes the rules
	// or the credential.
	ErrDenied = backend.ErrDenied
	// ErrDeadlock: waiting would close a cycle of holders that wait for each other, or goes against Options.Order. A
	// *DeadlockError is in the chain. Release your leases, and retry.
	ErrDeadlock = backend.ErrDeadlock
	// ErrQueueFull: the lock is held, and its queue is full. The call had no effect.
	ErrQueueFull = backend.ErrQueueFull
	// ErrLimitMismatch: the name is in use with another kind, or another limit of permits, or as a path. Two parts of
	// the program disagree about it.
	ErrLimitMismatch = backend.ErrLimitMismatch
	// ErrInvalidName: see ValidateName in package backend. An *InvalidError is in the chain.
	ErrInvalidName = backend.ErrInvalidName
	// ErrInvalidTTL: outside the driver's range or granularity. An *InvalidError is in the chain.
	ErrInvalidTTL = backend.ErrInvalidTTL
	// ErrInvalidOption: another option has an invalid value. An *InvalidError is in the chain.
	ErrInvalidOption = backend.ErrInvalidOption
	// ErrHistoryLost: the service has lost acknowledged state: it was wiped, restored from a backup, or replaced. A
	// *HistoryError is in the chain. This client never grants a lock after that; see docs/FENCING.md, "A service that
	// forgot".
	ErrHistoryLost = backend.ErrHistoryLost
	// ErrClosed: the client was closed, before the call or while it waited.
	ErrClosed = backend.ErrClosed
	// ErrCompacted: the service no longer keeps the changes since the revision given to Since.
	ErrCompacted = backend.ErrCompacted
)

// Error types to inspect with errors.As, from package backend.
type (
	// HeldError names the holder of the lock, and when the hold expires unless renewed, where the service knows.
	HeldError = backend.HeldError
	// DeadlockError names the cycle that waiting would have closed.
	DeadlockError = backend.DeadlockError
	// InvalidError names the value that was refused, and why.
	InvalidError = backend.InvalidError
	// ConfigError names the setting of the service that makes it unfit.
	ConfigError = backend.ConfigError
	// HistoryError names the sign by which a service that has lost its history was noticed.
	HistoryError = backend.HistoryError
	// CallError says which call on which name failed.
	CallError = backend.CallError
	// Reason says why a hold was lost.
	Reason = backend.Reason
)

// The reasons in a LostError.
const (
	// ReasonExpired: the deadline passed without a confirmed renewal.
	ReasonExpired = backend.ReasonExpired
	// ReasonSessionExpired: the service ended the session on which the hold lived.
	ReasonSessionExpired = backend.ReasonSessionExpired
	// ReasonForceReleased: an administrator took the lock away, see Client.ForceRelease.
	ReasonForceReleased = backend.ReasonForceReleased
	// ReasonEvicted: the service no longer has the hold, though its time was not over.
	ReasonEvicted = backend.ReasonEvicted
	// ReasonHistoryLost: the service has lost acknowledged state.
	ReasonHistoryLost = backend.ReasonHistoryLost
	// ReasonReplaced: a later acquire of this client with the same RequestID has the hold.
	ReasonReplaced = backend.ReasonReplaced
	// ReasonMaxHold: a policy of the bundled server bounds how long a hold of the name lasts, and that time was over.
	ReasonMaxHold = backend.ReasonMaxHold
	// ReasonClosed: the client was closed.
	ReasonClosed = backend.ReasonClosed
)

// LostError names the lost lock and the reason; it matches ErrLost. It is the cause of a lost lease's context, so
// that a function deep in the call stack can tell why it was stopped:
//
//	if lost := (*fencelock.LostError)(nil); errors.As(context.Cause(ctx), &lost) {
//		log.Printf("stopped: %s was lost: %s", lost.Name, lost.Reason)
//	}
type LostError struct {
	// Name is the lock's, without the client's namespace.
	Name string
	// Token of the hold; zero in the efficiency tier.
	Token fencing.Token
	// Reason says how it ended.
	Reason Reason
	// Text is the reason that the caller of ForceRelease gave, where the service keeps it, and By the name that the
	// caller gave. Principal is the identity that the gateway or the bundled server has authenticated; empty
	// elsewhere.
	Text, By, Principal string
	// Err is the driver's error, if the driver reported the loss; for ReasonExpired the error of the last renewal.
	Err error
}

// Error names the lock, its token if there is one, the reason and its text.
func (e *LostError) Error() string {
	s := fmt.Sprintf("lock %q was lost: %s", e.Name, e.Reason)
	if e.Token.Valid() {
		s = fmt.Sprintf("lock %q (token %v) was lost: %s", e.Name, e.Token, e.Reason)
	}
	if e.Text != "" {
		s += ": " + e.Text
	}
	if e.By != "" {
		s += fmt.Sprintf(" (by %s)", e.By)
	}
	return s
}

// Is reports true for ErrLost.
func (e *LostError) Is(target error) bool { return target == ErrLost }

// Unwrap returns the driver's error, or nil.
func (e *LostError) Unwrap() error { return e.Err }

// CapabilityError names the tier or the capabilities that a driver lacks in its current configuration. It matches
// ErrTier if the driver cannot serve a tier, and ErrUnsupported if Options.Require, an acquire option or a call needs a
// capability that the driver lacks.
//
//	_, err := fencelock.Open(ctx, "redis://10.0.0.1", fencelock.Correctness, nil)
//	lacking := (*fencelock.CapabilityError)(nil)
//	if errors.As(err, &lacking) {
//		log.Fatal(lacking.Driver, " is unfit: ", lacking.Lacks)
//	}
type CapabilityError struct {
	// Driver is Description.Name.
	Driver string
	// Tier is the tier that the driver cannot serve; 0 if the error is about capabilities.
	Tier Tier
	// Missing are the missing capabilities; 0 if the error is about a tier.
	Missing backend.Capabilities
	// Lacks is the property that the tier needs and the driver lacks, in words for an operator.
	Lacks string
}

// Error names the missing property in words for a tier, and the missing capabilities otherwise.
func (e *CapabilityError) Error() string {
	if e.Tier != 0 {
		return fmt.Sprintf("driver %s cannot serve the %s tier: %s", e.Driver, e.Tier, e.Lacks)
	}
	return fmt.Sprintf("driver %s does not support: %s", e.Driver, e.Missing)
}

// Is reports true for ErrTier where a tier is named, and for ErrUnsupported elsewhere.
func (e *CapabilityError) Is(target error) bool {
	if e.Tier != 0 {
		return target == ErrTier
	}
	return target == ErrUnsupported
}

// ContractError says how a driver broke the contract of package backend. The core ignores the claim: it releases a
// grant and fails the acquire, and counts a renewal as a fault; a reported loss still counts as a loss.
type ContractError struct {
	// Driver is Description.Name.
	Driver string
	// What describes the driver's answer.
	What string
}

// Error names the driver and describes its answer.
func (e *ContractError) Error() string {
	return fmt.Sprintf("driver %s broke the contract: %s", e.Driver, e.What)
}

// callError wraps err with the call and the name, unless a driver has done so for this very call already: one prefix is
// enough to read.
func callError(call, name string, err error) error {
	if already, ok := err.(*CallError); ok && already.Call == call {
		return err
	}
	return &CallError{Driver: "fencelock", Call: call, Name: name, Err: err}
}
