package fencelock

// Inspection: the holders of a name, the held names, the changes of a name, and force-releases. Acquiring locks does
// not depend on it, and its results give no power to renew, release or move a hold. Each method needs a capability,
// which is checked before any request is sent. The client adds its namespace to names in requests, and removes it
// from results.
//
// The names of package backend that a caller meets here are repeated, so that a program that watches locks imports this
// package alone.

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/poll"
)

// The results of Client.Look, List and Watch, from package backend.
type (
	// State is the state of a name at one moment: its holders and the number of waiters.
	State = backend.State
	// Holder is one hold of a name.
	Holder = backend.Holder
	// Change is one change of a name: Client.Watch yields it.
	Change = backend.Change
	// ChangeType is the type of a Change.
	ChangeType = backend.ChangeType
	// Kind is the kind of a hold: exclusive, shared or permits.
	Kind = backend.Kind
	// Capabilities is a set of optional features of a driver.
	Capabilities = backend.Capabilities
)

// The types of a Change.
const (
	// ChangeAcquired: a hold began.
	ChangeAcquired = backend.ChangeAcquired
	// ChangeReleased: its holder released it.
	ChangeReleased = backend.ChangeReleased
	// ChangeExpired: the service ended it, because it was not renewed.
	ChangeExpired = backend.ChangeExpired
	// ChangeForceReleased: an administrator ended it; Change.Reason says why.
	ChangeForceReleased = backend.ChangeForceReleased
)

// The kinds of a hold.
const (
	// KindExclusive: one holder. The default.
	KindExclusive = backend.KindExclusive
	// KindShared: any number of holders, but never beside an exclusive one. Option Shared.
	KindShared = backend.KindShared
	// KindPermits: holders who share a number of permits. Option Permits.
	KindPermits = backend.KindPermits
)

// Optional features of a driver, for Options.Require and in Description.Capabilities.
const (
	// CapFencing: leases of the correctness tier carry fencing tokens.
	CapFencing = backend.CapFencing
	// CapFair: waiters are served in the order of their arrival, without barging.
	CapFair = backend.CapFair
	// CapShared: option Shared.
	CapShared = backend.CapShared
	// CapPermits: option Permits.
	CapPermits = backend.CapPermits
	// CapMinHold: option HoldAtLeast.
	CapMinHold = backend.CapMinHold
	// CapMetadata: option Metadata.
	CapMetadata = backend.CapMetadata
	// CapPushLoss: the holder is notified within a second of a loss that the service can see, and not only by the
	// next renewal.
	CapPushLoss = backend.CapPushLoss
	// CapInspect: Client.Look, Client.Leader, Client.Leaders, and the holder's name in a *HeldError after a wait.
	CapInspect = backend.CapInspect
	// CapList: Client.List.
	CapList = backend.CapList
	// CapWatch: Client.Watch with every change; without it, Client.Watch compares looks.
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

// Look returns the holders of name at one moment, and the number of waiters. A free name is no error: State.Held is
// false. Fields that the service does not know are zero. Do not base decisions on the result: it may be out of date
// when it arrives, and a token in it belongs to its holder.
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
// prefix means all names of the client's namespace. It is not a snapshot: names that change hands meanwhile may be
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

// Since makes Watch begin after the revision of a State or a Change, so that no change in between is missed. If the
// service no longer keeps the changes since then, Watch ends with ErrCompacted: call Look, and watch since its
// revision. Needs a driver with CapWatchReplay, ErrUnsupported otherwise. 0: from now on.
func Since(revision uint64) WatchOption {
	return func(o *watchOptions) { o.since = revision }
}

// Watch yields the changes of name, in order, until ctx ends, the driver is closed or the service fails; the error
// comes last. Leaving the loop ends the watch.
//
// Without CapWatch the client polls about every second, for which the driver needs CapInspect, ErrUnsupported
// otherwise. There is no replay then: changes have no Revision, a hold that begins and ends between two polls is
// missed, and the end of a hold is always ChangeReleased.
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
		switch {
		case o.since != 0:
			need |= backend.CapWatchReplay
		case c.need(backend.CapWatch) != nil:
			need = backend.CapInspect
		}
		full, err := c.lookAt(name, need)
		if err != nil {
			yield(Change{}, callError("watch", name, err))
			return
		}
		watcher := backend.Watcher(nil)
		if need == backend.CapInspect {
			watcher = poll.Watcher{Inspector: as[backend.Inspector](c)}
		} else {
			watcher = as[backend.Watcher](c)
		}
		for change, err := range watcher.Watch(ctx, full, o.since) {
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

// ForceOption is a setting of one ForceRelease.
type ForceOption func(*backend.ForceRequest)

// OnlyHold makes ForceRelease end only the hold with this nonce, which Look returns as Holder.Nonce. The service
// compares in the step that ends the hold, so a hold that was granted after the look stays. Other holds of the name
// stay as well.
//
//	state, err := locks.Look(ctx, "deploy")
//	…
//	err = locks.ForceRelease(ctx, "deploy", "build-3 was switched off", fencelock.OnlyHold(state.Holders[0].Nonce))
func OnlyHold(nonce fencing.Nonce) ForceOption {
	return func(r *backend.ForceRequest) { r.Nonce = nonce }
}

// OnlyToken makes ForceRelease end only the hold with this fencing token, as OnlyHold does for a nonce. With both,
// the hold must have both. Needs a driver that fences.
func OnlyToken(token fencing.Token) ForceOption {
	return func(r *backend.ForceRequest) { r.Token = token }
}

// ForcedBy names the person or program that asks, for the record. The text is not verified; at most MaxReasonBytes.
func ForcedBy(who string) ForceOption {
	return func(r *backend.ForceRequest) { r.By = who }
}

// ForceRelease ends all holds of name, or with OnlyHold or OnlyToken one of them. It is for operators who know that
// the holder is gone. A holder that still runs loses its lease with ReasonForceReleased, within a second if the
// driver pushes losses and at its next renewal otherwise; until then its lease stays valid, and only a guard that
// compares tokens stops its writes. The reason, 1 to MaxReasonBytes of UTF-8 without control characters, is kept
// where the service keeps a history, and Watch yields it.
//
// If no hold of the name matches, the error is ErrNotHeld. With OnlyHold the call is repeated after a lost answer, at
// most three times while ctx lives; a hold that is gone then counts as ended. Without it ErrUnknown says that the
// holds may have ended; call Look before you call again. Needs a driver with CapForceRelease, ErrUnsupported
// otherwise.
//
//	err := locks.ForceRelease(ctx, "deploy", "build-3 was switched off", fencelock.ForcedBy("Ann"))
func (c *Client) ForceRelease(ctx context.Context, name, reason string, opts ...ForceOption) error {
	r := backend.ForceRequest{Reason: reason}
	for _, opt := range opts {
		if opt != nil {
			opt(&r)
		}
	}
	var err error
	if r.Name, err = c.lookAt(name, backend.CapForceRelease); err == nil && r.Token != 0 {
		err = c.need(backend.CapFencing)
	}
	if err == nil {
		err = validForce(&r)
	}
	if err == nil {
		began := c.observedNow()
		err = c.forceRelease(ctx, r)
		c.tell(ctx, &Event{
			Type: EventForced, Name: name, Token: r.Token, Took: c.observedNow().Sub(began),
			By: r.By, Why: r.Reason, Err: err,
		})
	}
	if err != nil {
		return callError("force-release", name, err)
	}
	return nil
}

// validForce checks the texts of a force-release.
func validForce(r *backend.ForceRequest) error {
	if r.Reason == "" {
		return invalidOption("reason", `""`, "it must not be empty")
	}
	for _, text := range []struct{ what, value string }{{"reason", r.Reason}, {"ForcedBy", r.By}} {
		if text.value != "" && backend.ValidateOwner(text.value) != nil {
			return invalidOption(text.what, fmt.Sprintf("of %d bytes", len(text.value)),
				fmt.Sprintf("want at most %d bytes of UTF-8 without control characters", MaxReasonBytes))
		}
	}
	return nil
}

// forceRelease asks the driver. It retries after a lost answer, if the request names one hold by its nonce: that is
// the same hold then, or it is gone.
func (c *Client) forceRelease(ctx context.Context, r backend.ForceRequest) error {
	force := as[backend.ForceReleaser](c)
	err := force.ForceRelease(ctx, r)
	for range forceRepeats {
		if !errors.Is(err, ErrUnknown) || r.Nonce == (fencing.Nonce{}) || ctx.Err() != nil {
			break
		}
		if err = force.ForceRelease(ctx, r); errors.Is(err, ErrNotHeld) {
			return nil
		}
	}
	return err
}

// forceRepeats bounds the repetitions of a force-release with a nonce after lost answers.
const forceRepeats = 3

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

// lookAt returns the full name if the driver has caps and the name is valid.
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

// shown removes the namespace from a state that the driver returned.
func (c *Client) shown(info State) State {
	info.Name = strings.TrimPrefix(info.Name, c.set.prefix)
	return info
}
