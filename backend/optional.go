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

// Unwrapper is implemented by wrappers around a Driver, for example to count calls:
//
//	type counted struct {
//		backend.Driver // the five methods
//		calls atomic.Int64
//	}
//
//	func (c *counted) Unwrap() backend.Driver { return c.Driver }
//
// With Unwrap the core still finds the Inspector of the driver inside; without it, it finds only the interfaces of
// the wrapper itself. Embedding the interface backend.Driver promotes only the five methods.
type Unwrapper interface {
	// Unwrap returns the driver inside. Nil ends the search of As.
	Unwrap() Driver
}

// As finds the first driver in d's chain of Unwrap that implements T, one of the optional interfaces in this file.
// The outermost wins, so a wrapper can replace a method of the driver inside.
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

// Pinger probes the service: reachable, of a known version, with settings that a lock service may have. The same
// probe runs before a driver's first grant, so Ping is not needed for safety; it lets programs find problems at
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
	// Ping returns nil, or an error that wraps ErrUnavailable or ErrMisconfigured. It makes no change in the service.
	// If the result differs from an earlier probe, the result of Describe may change.
	Ping(ctx context.Context) error
}

// State is the state of a name at one moment. Optional fields are zero unless Description.Shows declares them. It is
// for people and for logs: it may be out of date when it arrives, and gives no power to renew, release or move a
// hold.
type State struct {
	// Name as it was asked for, with the namespace; the core takes that out.
	Name string
	// Held: the name has a holder.
	Held bool
	// Holders, several of them for shared holds and permits. Empty if the name is free.
	Holders []Holder
	// Waiters is the number of requests in the queue. StateFields.Waiters.
	Waiters int
	// Queue has the first MaxQueue waiters in their order. StateFields.Queue.
	Queue []Waiter
	// Revision is the point from which Watch follows without a gap; 0 if the service has no revisions.
	Revision uint64
}

// MaxQueue bounds State.Queue. State.Waiters counts all.
const MaxQueue = 100

// Remaining returns how many permits of the name are free, and the limit. ok is false unless the name is held as permits
// and the driver declares StateFields.Limit.
func (s *State) Remaining() (free, limit int, ok bool) {
	for i := range s.Holders {
		h := &s.Holders[i]
		if h.Kind != KindPermits || h.Limit == 0 {
			return 0, 0, false
		}
		limit = h.Limit
		free += h.Permits
	}
	return max(0, limit-free), limit, limit != 0
}

// Waiter is one place in the queue of a name.
type Waiter struct {
	// Owner and HoldID are those of the request.
	Owner  string
	HoldID string
	// Kind, Permits and Limit are from the request. Permits and Limit are zero except for KindPermits.
	Kind           Kind
	Permits, Limit int
	// Since is when the wait began, by a clock of the service or of the waiter. StateFields.QueueSince.
	Since time.Time
}

// Holder is one hold of a name.
type Holder struct {
	// Owner and HoldID are those of the request. HoldID names the hold and gives no power over it.
	Owner  string
	HoldID string
	// Kind and Permits are from the request. Limit is the total of permits that all users of the name share; it is
	// zero except for KindPermits. StateFields.Limit.
	Kind           Kind
	Permits, Limit int
	// Token is the holder's fencing token. It belongs to that holder: another process that sends it impersonates a hold
	// that it does not have. Zero if the driver does not fence.
	Token fencing.Token
	// Nonce is Grant.Nonce of the hold. Zero if a driver version without nonces made the hold.
	Nonce fencing.Nonce
	// Since is when the hold was granted, by a clock that may differ from the reader's. Services that keep one entry for
	// the wait and the hold (etcd, ZooKeeper) return when the request entered the queue. StateFields.Since.
	Since time.Time
	// ExpiresIn is the time until the hold expires unless it is renewed. StateFields.ExpiresIn.
	ExpiresIn time.Duration
	// Metadata of the request.
	Metadata map[string]string
}

// Inspector returns the holders of a name. CapInspect. The core uses it for fencelock.Client.Look, and to name the
// holder in the error of an acquire after its wait has ended.
//
//	state, err := inspector.Look(ctx, "orders/7")
//	if err == nil && state.Held {
//		log.Printf("held by %s for another %v", state.Holders[0].Owner, state.Holders[0].ExpiresIn)
//	}
type Inspector interface {
	// Look returns the state of name at one moment. A free name is no error: State.Held is false. Look acquires no
	// lock and does not wait, so it may be repeated freely. After an error the state of the name is unknown.
	Look(ctx context.Context, name string) (State, error)
}

// Lister lists names. CapList.
type Lister interface {
	// List yields each held name that starts with prefix once, in no promised order, and ends after the first error,
	// which it yields last. The prefix is compared as bytes of the name; the empty one is every name of the service
	// that belongs to this driver. Leaving the loop early ends the exchange with the service. Names that are taken or
	// released meanwhile may be missing or present.
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

// ChangeType is the type of a change. Readers ignore types that they do not know.
type ChangeType string

// The types of events.
const (
	// ChangeAcquired: a hold was granted.
	ChangeAcquired ChangeType = "acquired"
	// ChangeReleased: its holder gave it back.
	ChangeReleased ChangeType = "released"
	// ChangeExpired: the service ended it, because it was not renewed.
	ChangeExpired ChangeType = "expired"
	// ChangeForceReleased: ForceRelease ended it, for Change.Reason.
	ChangeForceReleased ChangeType = "force-released"
)

// Change is one change of a name, as Watch reports it.
type Change struct {
	// Type is the type of the change to the hold of Owner on Name.
	Type  ChangeType
	Name  string
	Owner string
	// Token of the hold that began or ended; zero if the driver does not fence.
	Token fencing.Token
	// Reason is the reason given to ForceRelease; empty for every other type.
	Reason string
	// By and Principal are the author of a forced release, as in ForceRequest. Shows.ChangeAuthor.
	By, Principal string
	// Time is when it happened, by the service's clock. Shows.ChangeTime.
	Time time.Time
	// Revision orders the changes of the service. Watch since it yields the later changes.
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
	// service no longer keeps the changes since then. Watch never skips changes silently: a reader too slow
	// for the service's history gets ErrCompacted. Leaving the loop ends the watch.
	//
	// since other than 0 without CapWatchReplay is refused by the core with ErrUnsupported.
	Watch(ctx context.Context, name string, since uint64) iter.Seq2[Change, error]
}

// Pager is a Lister with ordered names, so that a page costs the same wherever it begins.
type Pager interface {
	// ListAfter is List for the names greater than after, in ascending order of their bytes.
	ListAfter(ctx context.Context, prefix, after string) iter.Seq2[State, error]
}

// ForceRequest names the holds that ForceRelease ends, and the reason.
//
// Nonce and Token are the condition. Without one, every hold of Name ends. With one, only the hold that has that nonce
// and that token ends, and the service compares in the step that ends it: a hold that was granted after the caller
// looked is never ended. A hold has its nonce for life and no other hold has the same, so a call with a Nonce may be
// repeated after a lost answer.
type ForceRequest struct {
	Name string
	// Nonce of the hold to end, as Holder.Nonce shows it. Zero: any.
	Nonce fencing.Nonce
	// Token of the hold to end, as Holder.Token shows it. Zero: any. Only with CapFencing.
	Token fencing.Token
	// Reason is text for the victims and for watchers of the name, 1 to MaxOwnerBytes bytes.
	Reason string
	// By names the person or program that asks, in the caller's own words, or is empty. It is not verified.
	By string
	// Principal is the identity that the caller has authenticated, such as the subject of a client certificate. It is
	// empty in a program that uses the driver itself. An audit relies on it, and not on By.
	Principal string
}

// Conditional reports whether r names a hold.
func (r *ForceRequest) Conditional() bool { return r.Nonce != fencing.Nonce{} || r.Token != 0 }

// Matches reports whether a hold with that nonce and that token is to end.
func (r *ForceRequest) Matches(nonce fencing.Nonce, token fencing.Token) bool {
	return (r.Nonce == fencing.Nonce{} || r.Nonce == nonce) && (r.Token == 0 || r.Token == token)
}

// ForceReleaser takes a lock away from its holders, for an administrator who knows that they are gone. CapForceRelease.
//
//	err := forcer.ForceRelease(ctx, backend.ForceRequest{
//		Name: "orders/7", Nonce: state.Holders[0].Nonce, Reason: "host-3 burnt down", By: "Ann",
//	})
type ForceReleaser interface {
	// ForceRelease ends the holds that r names and grants the name to the next waiters. The victims get
	// ReasonForceReleased, r.Reason, r.By and r.Principal: within a second if CapPushLoss is declared, and with their
	// next renewal otherwise. The service keeps r.Reason where it keeps a history, and Watch shows it as
	// Change.Reason.
	//
	// If no hold of the name matches, the error is ErrNotHeld, and there was no change. The driver does not look
	// for newer holds. Without a condition the core does not repeat the call after a lost answer (ErrUnknown):
	// a repetition could end the hold of a successor. With r.Nonce it does.
	ForceRelease(ctx context.Context, r ForceRequest) error
}

// MultiAcquirer acquires several names in one atomic step. CapMultiAcquire. Without it the core acquires the names
// one after the other, in one order for all clients; with it no caller keeps some of the names while it waits for the
// rest.
//
//	grants, err := multi.AcquireAll(ctx, []backend.Request{
//		{Name: "accounts/1", RequestID: id1, TTL: ttl, Wait: true},
//		{Name: "accounts/2", RequestID: id2, TTL: ttl, Wait: true},
//	}) // both, or an error and none
type MultiAcquirer interface {
	// AcquireAll grants all of rs, in their order, or no request at all. rs is not empty, the names are distinct, and
	// the requests agree in Wait, TTL, MinHold and Under; kit.ValidateSet checks that. Each grant is a separate hold,
	// which is renewed and released without the others.
	//
	// The obligations of Driver.Acquire for one request apply to all together: the context, the errors, idempotence
	// by the request ids (presented in the same set), and the cleanup. After an error that wraps ErrUnknown the core
	// releases each Request.Grant. With Wait it never keeps some of the names closed for others while it waits for
	// the rest, or waits in an order that cannot deadlock.
	//
	// If the driver can acquire other sets atomically but not this one (a set that has to wait, or with keys on two
	// shards), it returns ErrUnsupported without a change; the core then acquires the names one after the other in
	// sorted order. A result with another number of grants than requests is treated as ErrUnknown.
	AcquireAll(ctx context.Context, rs []Request) ([]Grant, error)
}

// Expirer is for callers that hold locks on behalf of others, as an HTTP gateway does for its clients: it ends a hold
// after its holder has vanished, unless the holder has come back through another driver.
//
// A second driver comes for a hold by acquiring with the same request id or, where Description.KeepsHolds is set, by
// renewing the grant. From then on the hold belongs to the second driver. The first one can no longer end it by
// mistake, and its late requests have no effect. Release is different: it ends the hold of the request, through any
// driver.
//
//	// The client has not renewed for one TTL.
//	if err := expirer.Expire(ctx, grant); errors.Is(err, backend.ErrNotHeld) {
//		// over, or another replica's: either way not ours to end
//	}
type Expirer interface {
	// Expire ends g if no other driver has taken it over when the service carries that out. If one has, or if the
	// hold has ended, Expire returns ErrNotHeld without a change. When the answer is lost the call may be repeated:
	// ErrNotHeld is success then.
	Expire(ctx context.Context, g Grant) error
}
