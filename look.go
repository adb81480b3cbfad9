package fencelock

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
	ChangeAcquired      = backend.ChangeAcquired
	ChangeReleased      = backend.ChangeReleased
	ChangeExpired       = backend.ChangeExpired
	ChangeForceReleased = backend.ChangeForceReleased
)

// The kinds of a hold.
const (
	KindExclusive = backend.KindExclusive
	KindShared    = backend.KindShared
	KindPermits   = backend.KindPermits
)

// What a driver can do: Options.Require and Description.Capabilities.
const (
	CapFencing      = backend.CapFencing
	CapFair         = backend.CapFair
	CapShared       = backend.CapShared
	CapPermits      = backend.CapPermits
	CapMinHold      = backend.CapMinHold
	CapMetadata     = backend.CapMetadata
	CapPushLoss     = backend.CapPushLoss
	CapInspect      = backend.CapInspect
	CapList         = backend.CapList
	CapWatch        = backend.CapWatch
	CapWatchReplay  = backend.CapWatchReplay
	CapForceRelease = backend.CapForceRelease
	CapMultiAcquire = backend.CapMultiAcquire
	CapHierarchy    = backend.CapHierarchy
	CapDeadlock     = backend.CapDeadlock
)

// Look tells who holds name at one moment, and how many wait for it. A name that nobody holds is no error: State.Held
// is false. Fields that the service does not know are zero. There is nothing here to act on: the answer may be out of
// date when it arrives, and the token is that of its holder. Needs a driver with CapInspect, ErrUnsupported otherwise.
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
// prefix stands for all names of the client's namespace. Needs a driver with CapList, ErrUnsupported otherwise.
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

// WatchOption changes one Watch.
type WatchOption func(*watchOptions)

type watchOptions struct{ since uint64 }

// Since makes Watch begin after a revision that a State or a Change told, so that nothing in between is missed. If the
// service no longer keeps what happened since, Watch ends with ErrCompacted: look with Look, and watch since the
// revision that it tells. Needs a driver with CapWatchReplay, ErrUnsupported otherwise. 0: from now on.
func Since(revision uint64) WatchOption {
	return func(o *watchOptions) { o.since = revision }
}

// Watch yields what happens to name, in order, until ctx ends or the service fails, which it yields last. A loop that
// is left ends it. Needs a driver with CapWatch, ErrUnsupported otherwise.
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

// need fails if the driver does not declare caps.
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

// lookAt returns the whole name, if the driver can do what is asked about it.
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

// as returns the driver's side of a capability, which it declares.
func as[T any](c *Client) T {
	t, _ := backend.As[T](c.driver)
	return t
}

// shown takes the namespace out of what the driver tells.
func (c *Client) shown(info State) State {
	info.Name = strings.TrimPrefix(info.Name, c.set.prefix)
	return info
}
