package fencelock

import (
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// What a call can answer, to branch on with errors.Is. The context's own error stays in the chain beside them.
var (
	// ErrHeld: somebody else holds the lock. A *HeldError is in the chain.
	ErrHeld = backend.ErrHeld
	// ErrLost: the hold ended against its holder's will. A *LostError is in the chain.
	ErrLost = errors.New("lock was lost")
	// ErrNotHeld: there is nothing to release: it was released before, or its hold is gone.
	ErrNotHeld = backend.ErrNotHeld
	// ErrTier: the driver cannot serve the tier. A *TierError is in the chain.
	ErrTier = errors.New("driver cannot serve this tier")
	// ErrUnsupported: the driver does not do this. The same value as errors.ErrUnsupported.
	ErrUnsupported = backend.ErrUnsupported
	// ErrUnavailable: the lock service could not be reached, and nothing was done.
	ErrUnavailable = backend.ErrUnavailable
	// ErrUnknown: the service may or may not have done it. The client cleans up in the background until it knows.
	ErrUnknown = backend.ErrUnknown
	// ErrMisconfigured: the service's settings make it unfit for locks. A *ConfigError is in the chain.
	ErrMisconfigured = backend.ErrMisconfigured
	// ErrDeadlock: waiting would close a cycle of holders that wait for each other, or goes against Options.Order. A
	// *DeadlockError or an *OrderError is in the chain.
	ErrDeadlock = backend.ErrDeadlock
	// ErrLimitMismatch: the name is in use with another kind, or another limit of permits.
	ErrLimitMismatch = backend.ErrLimitMismatch
	// ErrInvalidName: see ValidateName in package backend. An *InvalidError is in the chain.
	ErrInvalidName = backend.ErrInvalidName
	// ErrInvalidTTL: outside the driver's range or granularity. An *InvalidError is in the chain.
	ErrInvalidTTL = backend.ErrInvalidTTL
	// ErrInvalidOption: another option has a value that cannot be meant. An *InvalidError is in the chain.
	ErrInvalidOption = backend.ErrInvalidOption
	// ErrClosed: the client was closed.
	ErrClosed = backend.ErrClosed
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
	// CallError says which call on which name failed.
	CallError = backend.CallError
	// Reason says why a hold was lost.
	Reason = backend.Reason
)

// The reasons in a LostError.
const (
	ReasonExpired        = backend.ReasonExpired
	ReasonSessionExpired = backend.ReasonSessionExpired
	ReasonForceReleased  = backend.ReasonForceReleased
	ReasonEvicted        = backend.ReasonEvicted
	ReasonClosed         = backend.ReasonClosed
)

// LostError is ErrLost: what was lost, and why. It is the cause of a lost lease's context.
type LostError struct {
	Name   string
	Token  fencing.Token // zero in the efficiency tier
	Reason Reason
	Err    error // what the driver answered, if the loss was learnt from an answer
}

func (e *LostError) Error() string {
	s := fmt.Sprintf("lock %q was lost: %s", e.Name, e.Reason)
	if e.Token.Valid() {
		s = fmt.Sprintf("lock %q (token %v) was lost: %s", e.Name, e.Token, e.Reason)
	}
	return s
}

// Is reports true for ErrLost.
func (e *LostError) Is(target error) bool { return target == ErrLost }

func (e *LostError) Unwrap() error { return e.Err }

// TierError is ErrTier: which driver cannot serve which tier, and what it lacks.
type TierError struct {
	Driver string
	Tier   Tier
	Lacks  string // what is missing, in words
}

func (e *TierError) Error() string {
	return fmt.Sprintf("driver %s cannot serve the %s tier: %s", e.Driver, e.Tier, e.Lacks)
}

// Is reports true for ErrTier.
func (e *TierError) Is(target error) bool { return target == ErrTier }

// CapabilityError is ErrUnsupported at construction: the driver lacks something that Options.Require names, or that an
// acquire option needs.
type CapabilityError struct {
	Driver  string
	Missing backend.Capabilities
}

func (e *CapabilityError) Error() string {
	return fmt.Sprintf("driver %s does not support: %s", e.Driver, e.Missing)
}

// Is reports true for ErrUnsupported.
func (e *CapabilityError) Is(target error) bool { return target == ErrUnsupported }

// callError wraps err with the call and the name, unless a driver has done so already.
func callError(call, name string, err error) error {
	if already, ok := err.(*CallError); ok && already.Call == call {
		return err
	}
	return &CallError{Driver: "fencelock", Call: call, Name: name, Err: err}
}
