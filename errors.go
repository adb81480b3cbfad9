package fencelock

// What a call can answer. The sentinels and most types are those of package backend under the same names, so that a
// program that uses locks imports this package alone, and an error that a driver made matches without a translation.
// What belongs to tiers and leases is here: ErrLost, ErrTier, LostError and CapabilityError.
//
//	err := locks.Do(ctx, "accounts/42", fn)
//	switch {
//	case errors.Is(err, fencelock.ErrLost):        // fn was stopped: somebody else may have gone on
//	case errors.Is(err, fencelock.ErrHeld):        // waited in vain
//	case errors.Is(err, fencelock.ErrUnavailable): // try again later; nothing was done
//	case errors.Is(err, fencelock.ErrUnknown):     // the same, and the clean-up is under way
//	}

import (
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// What a call can answer, to branch on with errors.Is. The context's own error stays in the chain beside them.
var (
	// ErrHeld: somebody else holds the lock, or is before us in the queue. A *HeldError is in the chain.
	ErrHeld = backend.ErrHeld
	// ErrLost: the hold ended against its holder's will. A *LostError is in the chain. Work that was done under it may
	// be overtaken; only a guard knows what it refused.
	ErrLost = errors.New("lock was lost")
	// ErrNotHeld: there is nothing to release: it was released before, or its hold is gone. From Leader and
	// ForceRelease: nobody holds the name.
	ErrNotHeld = backend.ErrNotHeld
	// ErrTier: the driver cannot serve the tier, by its type or in its present configuration. A *CapabilityError is in
	// the chain.
	ErrTier = errors.New("driver cannot serve this tier")
	// ErrUnsupported: the driver does not do this; nothing was sent. The same value as errors.ErrUnsupported. A
	// *CapabilityError is in the chain where the core noticed.
	ErrUnsupported = backend.ErrUnsupported
	// ErrUnavailable: the lock service could not be reached, and nothing was done. It usually passes.
	ErrUnavailable = backend.ErrUnavailable
	// ErrUnknown: the service may or may not have done it. The client cleans up in the background until it knows.
	ErrUnknown = backend.ErrUnknown
	// ErrMisconfigured: the service's settings make it unfit for locks. A *ConfigError is in the chain. It stays until
	// an operator changes them.
	ErrMisconfigured = backend.ErrMisconfigured
	// ErrDeadlock: waiting would close a cycle of holders that wait for each other, or goes against Options.Order. A
	// *DeadlockError is in the chain. Release what is held, and begin again.
	ErrDeadlock = backend.ErrDeadlock
	// ErrLimitMismatch: the name is in use with another kind, or another limit of permits, or as a path. Two parts of
	// the program disagree about it.
	ErrLimitMismatch = backend.ErrLimitMismatch
	// ErrInvalidName: see ValidateName in package backend. An *InvalidError is in the chain.
	ErrInvalidName = backend.ErrInvalidName
	// ErrInvalidTTL: outside the driver's range or granularity. An *InvalidError is in the chain.
	ErrInvalidTTL = backend.ErrInvalidTTL
	// ErrInvalidOption: another option has a value that cannot be meant. An *InvalidError is in the chain.
	ErrInvalidOption = backend.ErrInvalidOption
	// ErrHistoryLost: the service has forgotten what it acknowledged: it was wiped, restored from a backup, or
	// replaced. A *HistoryError is in the chain. The client grants nothing any more; see docs/FENCING.md, "A service
	// that forgot".
	ErrHistoryLost = backend.ErrHistoryLost
	// ErrClosed: the client was closed, before the call or while it waited.
	ErrClosed = backend.ErrClosed
	// ErrCompacted: the service no longer keeps what happened since the revision that Since names.
	ErrCompacted = backend.ErrCompacted
)

// Error types to inspect with errors.As; they are those of package backend.
type (
	// HeldError tells who holds the lock, and for how long unless renewed, where the service knows.
	HeldError = backend.HeldError
	// DeadlockError tells the cycle that waiting would have closed.
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
	// ReasonHistoryLost: the service has forgotten what it acknowledged.
	ReasonHistoryLost = backend.ReasonHistoryLost
	// ReasonReplaced: a later acquire of this client with the same RequestID has the hold.
	ReasonReplaced = backend.ReasonReplaced
	// ReasonClosed: the client was closed.
	ReasonClosed = backend.ReasonClosed
)

// LostError is ErrLost: what was lost, and why. It is the cause of a lost lease's context, so that work far below knows
// why it was stopped:
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
	// Err is what the driver answered, if the loss was learnt from an answer; for ReasonExpired the error of the last
	// renewal.
	Err error
}

// Error names the lock, its token if there is one, and the reason.
func (e *LostError) Error() string {
	s := fmt.Sprintf("lock %q was lost: %s", e.Name, e.Reason)
	if e.Token.Valid() {
		s = fmt.Sprintf("lock %q (token %v) was lost: %s", e.Name, e.Token, e.Reason)
	}
	return s
}

// Is reports true for ErrLost.
func (e *LostError) Is(target error) bool { return target == ErrLost }

// Unwrap returns what the driver answered, or nil.
func (e *LostError) Unwrap() error { return e.Err }

// CapabilityError says what a driver lacks in its present configuration. It is ErrTier where the driver cannot serve a
// tier, and ErrUnsupported where it lacks what Options.Require, an acquire option or a call needs.
//
//	_, err := fencelock.OpenURL(ctx, "redis://10.0.0.1", fencelock.Correctness, nil)
//	lacking := (*fencelock.CapabilityError)(nil)
//	if errors.As(err, &lacking) {
//		log.Fatal(lacking.Driver, " will not do: ", lacking.Lacks)
//	}
type CapabilityError struct {
	// Driver is Description.Name.
	Driver string
	// Tier is the one that the driver cannot serve; 0 if tiers are not the matter.
	Tier Tier
	// Missing are the capabilities that are missing, if it is those.
	Missing backend.Capabilities
	// Lacks is what is missing for a tier, in words for an operator.
	Lacks string
}

// Error says what is missing, in words for a tier and as names of capabilities elsewhere.
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

// callError wraps err with the call and the name, unless a driver has done so for this very call already: one prefix is
// enough to read.
func callError(call, name string, err error) error {
	if already, ok := err.(*CallError); ok && already.Call == call {
		return err
	}
	return &CallError{Driver: "fencelock", Call: call, Name: name, Err: err}
}
