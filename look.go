package fencelock

// Looking at locks: who holds a name, which names are held, what happens to one, and taking a lock away from outside.
// Nothing here is needed to take locks, and nothing that it shows lets anybody renew, release or move a hold. Each
// method needs a capability, which is checked before anything is sent; names lose and regain the client's namespace on
// the way.
//
// The names of package backend that a caller meets here are repeated, so that a program that watches locks imports this
// package alone.

import (
	"context"
	"fmt"
	"iter"
	"strings"

	"github.com/fencelock/fencelock/backend"
)

// What Client.Look, List and Watch yield; the types are those of package backend.
type (
	// State is what is known of a name at one moment: its holders and how many wait.
	State = backend.State
	// Holder is one hold among those of a name.
	Holder = backend.Holder
	// Change is one thing that happened to a name: Client.Watch yields it.
	Change = backend.Change
	// ChangeType says what happened.
	ChangeType = backend.ChangeType
	// Kind says what a hold excludes.
	Kind = backend.Kind
	// Capabilities is a set of things that a driver can do.
	Capabilities = backend.Capabilities
)

// The types of a Change.
const (
	// ChangeAcquired: a hold began.
	ChangeAcquired = backend.ChangeAcquired
	// ChangeReleased: its holder gave it back.
	ChangeReleased = backend.ChangeReleased
	// ChangeExpired: the service ended it, because nobody renewed it.
	ChangeExpired = backend.ChangeExpired
	// ChangeForceReleased: an administrator ended it; Change.Reason says why.
	ChangeForceReleased = backend.ChangeForceReleased
)

// The kinds of a hold.
const (
	// KindExclusive: one holder. An acquire without an option for another kind.
	KindExclusive = backend.KindExclusive
	// KindShared: any number of holders, none beside an exclusive one. Option Shared.
	KindShared = backend.KindShared
	// KindPermits: holders who share a number of permits. Option Permits.
	KindPermits = backend.KindPermits
)

// What a driver can do: Options.Require and Description.Capabilities.
const (
	// CapFencing: leases of the correctness tier carry fencing tokens.
	CapFencing = backend.CapFencing
	// CapFair: waiters are served in the order of their arrival, and nobody overtakes.
	CapFair = backend.CapFair
	// CapShared: option Shared.
	CapShared = backend.CapShared
	// CapPermits: option Permits.
	CapPermits = backend.CapPermits
	// CapMinHold: option HoldAtLeast.
	CapMinHold = backend.CapMinHold
	// CapMetadata: option Metadata.
	CapMetadata = backend.CapMetadata
	// CapPushLoss: a loss that the service can see is told within a second, and not only by the next renewal.
	CapPushLoss = backend.CapPushLoss
	// CapInspect: Client.Look, Client.Leader, Client.Leaders, and the holder's name in a *HeldError after a wait.
	CapInspect = backend.CapInspect
	// CapList: Client.List.
	CapList = backend.CapList
	// CapWatch: Client.Watch.
	CapWatch = backend.CapWatch
	// CapWatchReplay: option Since.
	CapWatchReplay = backend.CapWatchReplay
	// CapForceRelease: Client.ForceRelease.
	CapForceRelease = backend.CapForceRelease
	// CapMultiAcquire: Client.AcquireAll in one step of the service, where it can; without it, one name after the
	// other.
	CapMultiAcquire = backend.CapMultiAcquire
	// CapHierarchy: option Hierarchical.
	CapHierarchy = backend.CapHierarchy
	// CapDeadlock: cycles of several holders are refused with ErrDeadlock; without it only a wait for oneself, and what
	// goes against Options.Order.
	CapDeadlock = backend.CapDeadlock
)

// Look tells who holds name at one moment, and how many wait for it. A name that nobody holds is no error: State.Held
// is false. Fields that the service does not know are zero. There is nothing here to act on: the answer may be out of
// date when it arrives, and a token in it belongs to its holder.
//
//	state, err := locks.Look(ctx, "accounts/42")
//	if err == nil && state.Held {
//		fmt.Println(state.Holders[0].Owner, "for another", state.Holders[0].ExpiresIn)
//	}
//
// Needs a driver with CapInspect, ErrUnsupported otherwise. ErrUnavailable if the service cannot be asked.
func (c *Client) Look(ctx context.Context, name string) (State, error) {
	var info State
	full, err := c.lookAt(name, backend.CapInspect)
	if err == nil {
		info, err = as[backend.Inspector](c).Look(ctx, full)
	}
	if err != nil {
		return State{}, callError("look", name, err)
	}
	return c.shown(info), nil
}

// List yields the held names that start with prefix, in no promised order, and ends with the first error. The empty
// prefix stands for all names of the client's namespace. It is no snapshot: names that change hands meanwhile may be
// there or not. Needs a driver with CapList, ErrUnsupported otherwise.
//
//	for state, err := range locks.List(ctx, "accounts/") {
//		…
//	}
func (c *Client) List(ctx context.Context, prefix string) iter.Seq2[State, error] {
	return func(yield func(State, error) bool) {
		if err := c.need(backend.CapList); err != nil {
			yield(State{}, callError("list", prefix, err))
			return
		}
		for info, err := range as[backend.Lister](c).List(ctx, c.set.prefix+prefix) {
			if err != nil {
				yield(State{}, callError("list", prefix, err))
				return
			}
			if !yield(c.shown(info), nil) {
				return
			}
		}
	}
}

// WatchOption changes one Watch. Nil is no option.
type WatchOption func(*watchOptions)

type watchOptions struct{ since uint64 }

// Since makes Watch begin after a revision that a State or a Change told, so that nothing in between is missed. If the
// service no longer keeps what happened since, Watch ends with ErrCompacted: look with Look, and watch since the
// revision that it tells. Needs a driver with CapWatchReplay, ErrUnsupported otherwise. 0: from now on.
func Since(revision uint64) WatchOption {
	return func(o *watchOptions) { o.since = revision }
}

// Watch yields what happens to name, in order, until ctx ends, the driver is closed or the service fails; the error
// comes last. A loop that is left ends it. Needs a driver with CapWatch, ErrUnsupported otherwise.
//
//	state, err := locks.Look(ctx, name)
//	…
//	for change, err := range locks.Watch(ctx, name, fencelock.Since(state.Revision)) {
//		if err != nil {
//			return err
//		}
//		fmt.Println(change.Type, change.Owner)
//	}
func (c *Client) Watch(ctx context.Context, name string, opts ...WatchOption) iter.Seq2[Change, error] {
	return func(yield func(Change, error) bool) {
		var o watchOptions
		for _, opt := range opts {
			if opt != nil {
				opt(&o)
			}
		}
		need := backend.CapWatch
		if o.since != 0 {
			need |= backend.CapWatchReplay
		}
		full, err := c.lookAt(name, need)
		if err != nil {
			yield(Change{}, callError("watch", name, err))
			return
		}
		for change, err := range as[backend.Watcher](c).Watch(ctx, full, o.since) {
			if err != nil {
				yield(Change{}, callError("watch", name, err))
				return
			}
			change.Name = strings.TrimPrefix(change.Name, c.set.prefix)
			if !yield(change, nil) {
				return
			}
		}
	}
}

// MaxReasonBytes bounds the reason of ForceRelease, in bytes of UTF-8.
const MaxReasonBytes = 256

// ForceRelease takes name away from all of its holders, for people who know that they are gone. Victims that live learn
// it with ReasonForceReleased, at once where the driver pushes losses and at their next renewal elsewhere; until then
// they believe in their lease, and only a guard that compares tokens stops their writes. The reason, 1 to
// MaxReasonBytes of UTF-8 without control characters, is kept where the service keeps a history, and told to those who
// watch. A name that nobody holds is ErrNotHeld. Needs a driver with CapForceRelease, ErrUnsupported otherwise.
//
//	err := locks.ForceRelease(ctx, "deploy", "build-3 was switched off; Ann")
func (c *Client) ForceRelease(ctx context.Context, name, reason string) error {
	full, err := c.lookAt(name, backend.CapForceRelease)
	if err == nil && reason == "" {
		err = invalidOption("reason", `""`, "it is empty, and others will ask")
	}
	if err == nil && backend.ValidateOwner(reason) != nil {
		err = invalidOption("reason", fmt.Sprintf("of %d bytes", len(reason)),
			fmt.Sprintf("want at most %d bytes of UTF-8 without control characters", MaxReasonBytes))
	}
	if err == nil {
		err = as[backend.ForceReleaser](c).ForceRelease(ctx, full, reason)
	}
	if err != nil {
		return callError("force-release", name, err)
	}
	return nil
}

// need fails if the driver does not declare caps, or the client is the zero one.
func (c *Client) need(caps backend.Capabilities) error {
	if c.zero() {
		return errZeroClient
	}
	d := c.driver.Describe()
	if missing := d.Capabilities.Missing(caps); missing != 0 {
		return &CapabilityError{Driver: d.Name, Missing: missing}
	}
	return nil
}

// lookAt returns the whole name, if the driver can do what is asked about it, and the name is valid.
func (c *Client) lookAt(name string, caps backend.Capabilities) (string, error) {
	if err := c.need(caps); err != nil {
		return "", err
	}
	full := c.set.prefix + name
	if name == "" {
		full = "" // a namespace does not make an empty name valid
	}
	return full, backend.ValidateName(full)
}

// as returns the driver's side of a capability, which it declares: a driver that declares it has it, as the conformance
// suite makes sure.
func as[T any](c *Client) T {
	t, _ := backend.As[T](c.driver)
	return t
}

// shown takes the namespace out of what the driver tells.
func (c *Client) shown(info State) State {
	info.Name = strings.TrimPrefix(info.Name, c.set.prefix)
	return info
}
