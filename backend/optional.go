package backend

import (
	"context"
	"iter"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Unwrapper is what a wrapper around a Driver implements.
type Unwrapper interface {
	Unwrap() Driver
}

// As finds the first driver in d's chain of Unwrap that implements T, one of the optional interfaces in this file. It
// is not for FencingDriver: a promise is not inherited by whoever wraps, so that forgetting it fails closed.
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
// runs before a driver's first grant.
type Pinger interface {
	// Ping returns nil, an error that wraps ErrUnavailable, or one that wraps ErrMisconfigured.
	Ping(ctx context.Context) error
}

// State is what a driver can tell about a name. Fields that the service does not know are zero.
type State struct {
	Name     string
	Held     bool
	Holders  []Holder
	Waiters  int
	Revision uint64 // the point from which Watch follows without a gap
}

// Holder is one hold among those of a name.
type Holder struct {
	Owner     string
	HoldID    string // as in Request: names the hold, and moves nothing
	Kind      Kind
	Permits   int
	Token     fencing.Token
	Since     time.Time     // by the service's clock
	ExpiresIn time.Duration // unless renewed
	Metadata  map[string]string
}

// Inspector tells who holds a name. CapInspect.
type Inspector interface {
	// Look returns the state of name at one moment. A name that nobody holds is no error: State.Held is false.
	Look(ctx context.Context, name string) (State, error)
}

// Lister lists names. CapList.
type Lister interface {
	// List yields the held names that start with prefix, in no promised order, and ends after the first error.
	List(ctx context.Context, prefix string) iter.Seq2[State, error]
}

// ChangeType says what happened to a name.
type ChangeType string

// The types of events.
const (
	ChangeAcquired      ChangeType = "acquired"
	ChangeReleased      ChangeType = "released"
	ChangeExpired       ChangeType = "expired"
	ChangeForceReleased ChangeType = "force-released"
)

// Change is one change of a name.
type Change struct {
	Type     ChangeType
	Name     string
	Owner    string
	Token    fencing.Token
	Reason   string
	Revision uint64
}

// Watcher follows the changes of a name. CapWatch, and CapWatchReplay where since is honoured.
type Watcher interface {
	// Watch yields events after revision since (0: from now on) until ctx ends or an error, which it yields last:
	// ErrCompacted if since is no longer kept.
	Watch(ctx context.Context, name string, since uint64) iter.Seq2[Change, error]
}

// ForceReleaser takes a lock away from its holder. CapForceRelease.
type ForceReleaser interface {
	// ForceRelease ends every hold of name. The victims learn ReasonForceReleased. A name that nobody holds is
	// ErrNotHeld.
	ForceRelease(ctx context.Context, name, reason string) error
}

// MultiAcquirer acquires several names in one atomic step. CapMultiAcquire.
type MultiAcquirer interface {
	// AcquireAll grants all of rs, in their order, or none of them. The names are distinct; the requests agree in Wait,
	// TTL and Agent. Everything that Driver.Acquire owes for one request it owes for all together: the context, the
	// errors, idempotence by the request ids (presented in the same set), and that nothing is left behind. After an
	// error that wraps ErrUnknown the core releases each Request.Grant. With Wait it never keeps some of the names
	// closed for others while it waits for the rest, or waits in an order that cannot deadlock.
	//
	// A driver that can do other sets atomically but not this one answers ErrUnsupported and has done nothing; the core
	// then acquires the names one after the other in sorted order.
	AcquireAll(ctx context.Context, rs []Request) ([]Grant, error)
}

// Expirer ends holds that nobody relies on, as far as its caller knows: another driver may have been asked for the same
// request since. Acquire by the same request id makes them that one's, and so does Renew where Description.KeepsHolds is
// set; the driver that had them can no longer end them by mistake, and what it sent before and comes late moves nothing.
type Expirer interface {
	// Expire ends g if no other driver has come for it at the instant at which the service carries that out. Otherwise, and
	// if it is over, that is ErrNotHeld, and it stays as it is.
	Expire(ctx context.Context, g Grant) error
}
