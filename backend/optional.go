package backend

// The interfaces that a driver may implement beside Driver. Each belongs to a capability of the same name, except
// Pinger and Expirer, which a caller finds by As alone. A driver that has the method, but cannot serve it in the
// present configuration, leaves the capability out and answers ErrUnsupported.
//
// They are small and separate, and not part of Driver, so that a driver for a service that cannot list its locks need
// not write a List that refuses. The core looks for one when it is needed, through wrappers (As), and answers
// ErrUnsupported for the caller where the capability is not declared.

import (
	"context"
	"iter"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Unwrapper is what a wrapper around a Driver implements, for example one that counts calls:
//
//	type counted struct {
//		backend.Driver // the five methods
//		calls atomic.Int64
//	}
//
//	func (c *counted) Unwrap() backend.Driver { return c.Driver }
//
// With Unwrap the core still finds the Inspector of the driver inside; without it, it finds only what the wrapper
// itself implements. Embedding the interface backend.Driver promotes the five methods and nothing else.
type Unwrapper interface {
	// Unwrap returns the driver inside. Nil ends the search of As.
	Unwrap() Driver
}

// As finds the first driver in d's chain of Unwrap that implements T, one of the optional interfaces in this file. The
// outermost wins, so a wrapper can replace a method of what it wraps.
//
// It is not for FencingDriver: a promise is not inherited through wrappers, so that forgetting to promise fails closed.
//
//	if lister, ok := backend.As[backend.Lister](driver); ok {
//		for state, err := range lister.List(ctx, "orders/") { … }
//	}
func As[T any](d Driver) (T, bool) {
	for d != nil {
		if t, ok := d.(T); ok {
			return t, true
		}
		u, ok := d.(Unwrapper)
		if !ok {
			break
		}
		d = u.Unwrap()
	}
	var none T
	return none, false
}

// Pinger probes the service: reachable, of a known version, with settings that a lock service may have. The same probe
// runs before a driver's first grant, so nobody has to call Ping for safety; it is for programs that want to know at
// startup.
//
//	func (d *Driver) Ping(ctx context.Context) error {
//		policy, err := d.setting(ctx, "maxmemory-policy")
//		if err == nil && policy != "noeviction" {
//			err = &backend.ConfigError{Setting: "maxmemory-policy", Value: policy, Want: "noeviction",
//				Why: "an evicted lock has two holders"}
//		}
//		return kit.CallError("myservice", "ping", "", err, classOf)
//	}
type Pinger interface {
	// Ping returns nil, an error that wraps ErrUnavailable, or one that wraps ErrMisconfigured. It changes nothing in
	// the service. After a probe that found something else than the one before, Describe may answer differently.
	Ping(ctx context.Context) error
}

// State is what a driver can tell about a name at one moment. Fields that the service does not know are zero. It is for
// people and for logs: it may be out of date when it arrives, and nothing in it lets anybody renew, release or move a
// hold.
type State struct {
	// Name as it was asked for, with the namespace; the core takes that out.
	Name string
	// Held: somebody holds the name.
	Held bool
	// Holders, several of them for shared holds and permits. Empty if nobody holds the name.
	Holders []Holder
	// Waiters counts the requests that stand in the queue; 0 also where the service keeps none.
	Waiters int
	// Revision is the point from which Watch follows without a gap; 0 if the service has none.
	Revision uint64
}

// Holder is one hold among those of a name.
type Holder struct {
	// Owner and HoldID are those of the request. HoldID names the hold and moves nothing.
	Owner  string
	HoldID string
	// Kind and Permits say what is held.
	Kind    Kind
	Permits int
	// Token is the holder's fencing token. It belongs to that holder: another process that sends it impersonates a hold
	// that it does not have. Zero if the driver does not fence.
	Token fencing.Token
	// Since is when the hold was granted, by the service's clock, which may differ from the reader's.
	Since time.Time
	// ExpiresIn is how long the hold lives unless it is renewed.
	ExpiresIn time.Duration
	// Metadata of the request.
	Metadata map[string]string
}

// Inspector tells who holds a name. CapInspect. The core asks it for fencelock.Client.Look, and to name the holder in
// the error of an acquire whose wait has ended.
//
//	state, err := inspector.Look(ctx, "orders/7")
//	if err == nil && state.Held {
//		log.Printf("held by %s for another %v", state.Holders[0].Owner, state.Holders[0].ExpiresIn)
//	}
type Inspector interface {
	// Look returns the state of name at one moment. A name that nobody holds is no error: State.Held is false. It takes
	// nothing and waits for nobody, so it may be repeated freely. An error says nothing about the name.
	Look(ctx context.Context, name string) (State, error)
}

// Lister lists names. CapList.
type Lister interface {
	// List yields each held name that starts with prefix once, in no promised order, and ends after the first error,
	// which it yields last. The prefix is compared as bytes of the name; the empty one is every name of the service
	// that is ours. A loop that is left early ends the exchange with the service. Names that are taken or released
	// meanwhile may be missing or present.
	//
	// A driver should read in pages, so that a list of many names neither fills the memory nor keeps the service from
	// its other work:
	//
	//	func (d *Driver) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	//		return func(yield func(backend.State, error) bool) {
	//			for after := ""; ; {
	//				page, err := d.page(ctx, prefix, after)
	//				if err != nil {
	//					yield(backend.State{}, err)
	//					return
	//				}
	//				for _, s := range page {
	//					if !yield(s, nil) {
	//						return
	//					}
	//					after = s.Name
	//				}
	//				if len(page) == 0 {
	//					return
	//				}
	//			}
	//		}
	//	}
	List(ctx context.Context, prefix string) iter.Seq2[State, error]
}

// ChangeType says what happened to a name. Readers ignore types that they do not know.
type ChangeType string

// The types of events.
const (
	// ChangeAcquired: a hold was granted.
	ChangeAcquired ChangeType = "acquired"
	// ChangeReleased: its holder gave it back.
	ChangeReleased ChangeType = "released"
	// ChangeExpired: nobody renewed it, and the service ended it.
	ChangeExpired ChangeType = "expired"
	// ChangeForceReleased: ForceRelease ended it, for Change.Reason.
	ChangeForceReleased ChangeType = "force-released"
)

// Change is one change of a name, as Watch tells it.
type Change struct {
	// Type says what happened, to the hold of Owner on Name.
	Type  ChangeType
	Name  string
	Owner string
	// Token of the hold that began or ended; zero if the driver does not fence.
	Token fencing.Token
	// Reason is what ForceRelease was given; empty for every other type.
	Reason string
	// Revision orders the changes of the service. Watch since it yields what follows.
	Revision uint64
}

// Watcher follows the changes of a name. CapWatch, and CapWatchReplay where since is honoured.
//
// Without a gap means looking first and watching from there:
//
//	state, err := inspector.Look(ctx, name)
//	…
//	for change, err := range watcher.Watch(ctx, name, state.Revision) {
//		if errors.Is(err, backend.ErrCompacted) {
//			// too late: look again, and watch from the new revision
//		}
//	}
type Watcher interface {
	// Watch yields the changes of name after revision since (0: from now on), in order and each once, until ctx ends,
	// the driver is closed or the service fails. The error comes last: ctx.Err, ErrClosed, or ErrCompacted if the
	// service no longer keeps what happened since. It never skips silently: a reader that is too slow for what the
	// service keeps gets ErrCompacted. A loop that is left ends the watch.
	//
	// since other than 0 without CapWatchReplay is refused by the core with ErrUnsupported.
	Watch(ctx context.Context, name string, since uint64) iter.Seq2[Change, error]
}

// ForceReleaser takes a lock away from its holders, for an administrator who knows that they are gone. CapForceRelease.
//
//	err := forcer.ForceRelease(ctx, "orders/7", "host-3 burnt down; Ann, 14:05")
type ForceReleaser interface {
	// ForceRelease ends every hold of name and opens it for those who wait. The victims learn ReasonForceReleased: at
	// once where CapPushLoss is declared, and by their next renewal elsewhere. reason is text of 1 to MaxOwnerBytes
	// bytes; it is stored where the service keeps a history, and shown as Change.Reason. A name that nobody holds is
	// ErrNotHeld. After a lost answer (ErrUnknown) the core does not repeat the call: a repetition could end the hold
	// of a successor.
	ForceRelease(ctx context.Context, name, reason string) error
}

// MultiAcquirer acquires several names in one atomic step. CapMultiAcquire. Where it is missing the core takes the
// names one after the other, in one order for all clients; what the interface adds is that nobody keeps some of the
// names while it waits for the rest.
//
//	grants, err := multi.AcquireAll(ctx, []backend.Request{
//		{Name: "accounts/1", RequestID: id1, TTL: ttl, Wait: true},
//		{Name: "accounts/2", RequestID: id2, TTL: ttl, Wait: true},
//	}) // both, or an error and none
type MultiAcquirer interface {
	// AcquireAll grants all of rs, in their order, or none of them. There is at least one, the names are distinct, and
	// the requests agree in Wait, TTL, MinHold and Under; kit.ValidateSet checks that. Each grant is a hold of its own,
	// which is renewed and released without the others.
	//
	// Everything that Driver.Acquire owes for one request it owes for all together: the context, the errors,
	// idempotence by the request ids (presented in the same set), and that nothing is left behind. After an error that
	// wraps ErrUnknown the core releases each Request.Grant. With Wait it never keeps some of the names closed for
	// others while it waits for the rest, or waits in an order that cannot deadlock.
	//
	// A driver that can do other sets atomically but not this one (a set that has to wait, or whose keys lie on two
	// shards) answers ErrUnsupported and has done nothing; the core then acquires the names one after the other in
	// sorted order. An answer with another number of grants than requests is treated as ErrUnknown.
	AcquireAll(ctx context.Context, rs []Request) ([]Grant, error)
}

// Expirer is for callers that hold locks on behalf of others, as an HTTP gateway does for its clients: it ends a hold
// whose holder has vanished, unless the holder has come back through another driver.
//
// A second driver comes for a hold by acquiring with the same request id or, where Description.KeepsHolds is set, by
// renewing the grant. From then on the hold belongs to the second driver. The first one can no longer end it by
// mistake, and what it sent earlier and is delivered late moves nothing. Release would not do here: it ends the hold of
// the request, through whichever driver.
//
//	// The client has not renewed for one TTL.
//	if err := expirer.Expire(ctx, grant); errors.Is(err, backend.ErrNotHeld) {
//		// over, or another replica's: either way not ours to end
//	}
type Expirer interface {
	// Expire ends g if no other driver has come for it at the instant at which the service carries that out. If one
	// has, or if the hold is over, the answer is ErrNotHeld, and nothing is changed.  When the answer is lost the call
	// may be repeated: ErrNotHeld is success then.
	Expire(ctx context.Context, g Grant) error
}
