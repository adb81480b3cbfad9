package fencelock

// Options of a client and of one acquire, their bounds, and how they become one backend.Request. All options are
// checked here, before any request is sent: the error is an *InvalidError that names the option and the value, or a
// *CapabilityError that names the missing capability. No value is rounded or clipped silently.

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"maps"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// DefaultTTL is the lease length when neither Options nor an acquire option gives one. A lock outlives a holder that
// died by up to that long.
const DefaultTTL = 30 * time.Second

// Options configure a Client. Nil and the zero value mean the defaults. The client copies them: later changes have no
// effect.
//
//	locks, err := fencelock.ForCorrectness(driver, &fencelock.Options{
//		TTL:       15 * time.Second,
//		Namespace: "billing",
//		Require:   fencelock.CapFair | fencelock.CapShared,
//		Observer:  fencelock.ObserverFunc(logEvent),
//	})
type Options struct {
	// TTL of leases: how long a lock outlives a holder that died. Renewed in the background at a third of it. A short
	// TTL frees names sooner, and leaves less time to survive an outage of the service: a lease survives outages
	// shorter than about two thirds of its TTL. Default DefaultTTL, or the driver's maximum if that is less. Outside
	// the driver's range or granularity: ErrInvalidTTL.
	TTL time.Duration

	// StopEarly ends leases that much before their deadline, for work that needs time to stop. The deadline already
	// lies 1 % of the TTL + 50 ms + the driver's own term before the service can grant the lock to another client. It
	// has to leave a tenth of the time before that: ErrInvalidTTL. Negative: ErrInvalidOption. Default 0.
	//
	//	sent ──────────────► lost here ─── StopEarly ──► deadline without it ── margin ──► free for others
	StopEarly time.Duration

	// LockDelay keeps a name closed for that much longer after its holder died, hung or was cut off: the service is
	// asked for the TTL and the delay together, and the lease still ends at the end of the TTL. It gives writes in
	// flight time to arrive or to fail, where the store cannot check fencing tokens. A released lock is free
	// immediately; so is a lock that is force-released or evicted, since the service itself forgets it then. TTL and
	// LockDelay together have to be in the driver's range. Default 0.
	//
	//	sent ──────── TTL − margin ────────► lost here ── margin ──► ──── LockDelay ────► free for others
	LockDelay time.Duration

	// Order, if set, checks the order in which one line of work takes its locks: a call that waits for a name, with a
	// context that comes from a lease, must want a greater name than all that are held along that context, or it fails
	// with ErrDeadlock before anything is sent. Order compares two names like strings.Compare, which will often do.
	// Locks that are taken in one order everywhere never deadlock, with any driver. Default: no check.
	Order func(a, b string) int

	// Owner names the holder to clients that find the lock held. At most 256 bytes of UTF-8 without control
	// characters. Default host/pid/random. It is for display only: each acquire has its own random key.
	Owner string

	// Namespace is put before every name, with ":" between, so it has neither ":" nor "/", and names of two namespaces
	// never meet. Lease.Name is without it. At most 256 bytes.
	Namespace string

	// Observer gets an event for each wait, acquire, renewal, loss and release; Observers combines several. The
	// module observe has observers for slog, Prometheus and OpenTelemetry. Default: no observer.
	Observer Observer

	// Require names capabilities that the driver must declare; the constructor fails with ErrUnsupported otherwise.
	Require backend.Capabilities

	// AcceptAsyncReplica lets the correctness tier use a driver that excludes by an asynchronous replica
	// (backend.ExclusionAsyncReplica): a failover may forget the latest holds, and only guards that check fencing
	// tokens then keep the writes of two holders apart. Default: refused with ErrTier.
	AcceptAsyncReplica bool
}

// settings are Options with the defaults filled in. They never change.
type settings struct {
	Options
	// prefix is Namespace + ":", or empty.
	prefix string
	// Clock is the driver's, so that core and driver cannot disagree about the time.
	Clock backend.Clock
}

// resolve fills in the defaults and checks everything against the driver. o may be nil.
func (o *Options) resolve(d backend.Description) (settings, error) {
	var s settings
	if o != nil {
		s.Options = *o
	}
	if missing := d.Capabilities.Missing(s.Require); missing != 0 {
		return s, &CapabilityError{Driver: d.Name, Missing: missing}
	}
	if s.Clock = d.Clock; s.Clock == nil {
		s.Clock = backend.SystemClock()
	}
	// Only the default adapts to the driver; a TTL that the caller gave is taken as it is or refused.
	if s.TTL == 0 {
		s.TTL = DefaultTTL
		if d.MaxTTL > 0 {
			s.TTL = min(s.TTL, max(d.MaxTTL-s.LockDelay, 0))
		}
	}
	if s.StopEarly < 0 {
		return s, invalidOption("StopEarly", s.StopEarly.String(), "it is negative")
	}
	if s.LockDelay < 0 {
		return s, invalidOption("LockDelay", s.LockDelay.String(), "it is negative")
	}
	if err := s.validateTTL(d, s.TTL); err != nil {
		return s, err
	}
	if s.Namespace != "" {
		if err := backend.ValidateName(s.Namespace); err != nil {
			return s, fmt.Errorf("namespace: %w", err)
		}
		switch {
		// "a" with the name "b:c" and "a:b" with the name "c" would be one lock; with a slash, paths of two namespaces
		// could meet.
		case strings.ContainsAny(s.Namespace, ":/"):
			return s, invalidOption("Namespace", strconv.Quote(s.Namespace),
				"it has a colon or a slash: names of two namespaces could meet")
		case len(s.Namespace) > backend.MaxNameBytes/2:
			return s, invalidOption("Namespace", fmt.Sprintf("of %d bytes", len(s.Namespace)),
				fmt.Sprintf("it has more than %d, which leaves too little for names", backend.MaxNameBytes/2))
		}
		s.prefix = s.Namespace + ":"
	}
	if s.Owner == "" {
		s.Owner = defaultOwner()
	}
	return s, backend.ValidateOwner(s.Owner)
}

// StopEarly has to leave at least one part in leastLeft of a lease's validity: renewals follow each other after a
// third of the rest.
const leastLeft = 10

// validateTTL checks ttl against the driver's range, and that StopEarly leaves enough of it. The driver is asked for
// the TTL and the lock delay together, so their sum has to be in its range.
func (s *settings) validateTTL(d backend.Description, ttl time.Duration) error {
	if ttl <= 0 {
		return &InvalidError{Kind: ErrInvalidTTL, What: "TTL", Value: ttl.String(), Why: "it is not positive"}
	}
	if err := d.ValidateTTL(ttl + s.LockDelay); err != nil {
		if s.LockDelay > 0 {
			return fmt.Errorf("TTL of %v and LockDelay of %v: %w", ttl, s.LockDelay, err)
		}
		return err
	}
	left := s.validity(d, ttl+s.LockDelay)
	if least := (left + s.StopEarly) / leastLeft; left <= 0 || left < least {
		return &InvalidError{
			Kind: ErrInvalidTTL, What: "TTL", Value: ttl.String(),
			Why: fmt.Sprintf("Options.StopEarly of %v leaves %v to hold the lock, less than a tenth", s.StopEarly, max(left, 0)),
		}
	}
	return nil
}

// validity returns for how long a grant of the length granted, lock delay included, is valid after its request was
// sent. During the lock delay the name stays closed and the lease has ended.
func (s *settings) validity(d backend.Description, granted time.Duration) time.Duration {
	return d.Validity(granted) - s.StopEarly - s.LockDelay
}

// invalidOption makes the error of a bad value.
func invalidOption(what, value, why string) error {
	return &InvalidError{Kind: ErrInvalidOption, What: what, Value: value, Why: why}
}

// defaultOwner returns host/pid/random: whom to look for, and which of two processes with one pid in two containers. A
// host name that could not be shown is left out.
func defaultOwner() string {
	host, err := os.Hostname()
	if err != nil || backend.ValidateOwner(host) != nil || len(host) > 128 {
		host = "unknown-host"
	}
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), backend.NewRequestID()[:8])
}

// AcquireOption changes one acquire. A bad value is reported by the acquire call, as ErrInvalidTTL or ErrInvalidOption.
// If an option is given twice, the later one counts; Metadata options add up. An option may be kept and used for many
// calls, even concurrently.
//
//	option          needs            for
//	TTL, NoRenew                     how long it lasts
//	WaitAtMost                       how long to wait
//	RequestID                        requests that are repeated
//	Seal correctness resources that have to know the new token first
//	HoldAtLeast     CapMinHold       jobs that must not run twice in a while
//	Shared          CapShared        readers
//	Permits         CapPermits       counting
//	Hierarchical    CapHierarchy     paths
//	Reentrant                        work that may run alone or under the same lock
//	Metadata CapMetadata text for operators
type AcquireOption interface {
	apply(*acquireOptions) error
}

// acquireOptions is the result of the options of one call. The zero value is a plain exclusive lock.
type acquireOptions struct {
	// ttl is Options.TTL unless ttlGiven; waitAtMost and minHold are off if they are 0.
	ttl        time.Duration
	ttlGiven   bool
	waitAtMost time.Duration
	minHold    time.Duration
	// requestID is the caller's; empty: random.
	requestID string
	noRenew   bool
	reentrant bool
	metadata  map[string]string
	seal      func(context.Context, fencing.Claim) error

	// kind is exclusive unless Shared or Permits says otherwise; permits and limit belong to the latter.
	kind           backend.Kind
	permits, limit int
	hierarchical   bool
}

// optionFunc implements every option.
type optionFunc func(*acquireOptions) error

func (f optionFunc) apply(o *acquireOptions) error { return f(o) }

// TTL sets the lease length of this lock, in place of Options.TTL. Outside the driver's range or granularity the
// acquire fails with ErrInvalidTTL; the value is not rounded. Drivers with sessions use one session for each TTL, so
// few different TTLs are cheaper than many. On etcd, similar TTLs share a session beyond the first eight.
//
//	lease, err := locks.Acquire(ctx, "deploy", fencelock.TTL(5*time.Minute))
func TTL(d time.Duration) AcquireOption {
	return optionFunc(func(o *acquireOptions) error {
		if d <= 0 {
			return &InvalidError{Kind: ErrInvalidTTL, What: "TTL", Value: d.String(), Why: "it is not positive"}
		}
		o.ttl, o.ttlGiven = d, true
		return nil
	})
}

// WaitAtMost bounds the wait: if the lock is still held after d, the acquire fails with ErrHeld. Without it only the
// context bounds the wait. Not for TryAcquire, which does not wait: ErrInvalidOption. With Lead it bounds each time of
// standing.
//
// A context with a timeout bounds the wait too, and its error is then in the chain beside ErrHeld. WaitAtMost is for
// callers who want to tell "somebody has it" from "my own time is up".
//
//	lease, err := locks.Acquire(ctx, "deploy", fencelock.WaitAtMost(10*time.Second))
//	if held := (*fencelock.HeldError)(nil); errors.As(err, &held) {
//		return fmt.Errorf("%s deploys, try again in %v", held.Holder, held.RetryAfter)
//	}
func WaitAtMost(d time.Duration) AcquireOption {
	return optionFunc(func(o *acquireOptions) error {
		if d <= 0 {
			return invalidOption("WaitAtMost", d.String(), "it is not positive; use TryAcquire for no wait")
		}
		o.waitAtMost = d
		return nil
	})
}

// RequestID makes the acquire idempotent within its client: if a hold of this client with the same id is alive, the
// acquire returns a lease of that hold, with the same token, instead of waiting for it. Use it for requests that may
// be delivered twice, such as a message that is redelivered after a timeout.
//
//	lease, err := locks.Acquire(ctx, "order/7", fencelock.RequestID(message.ID))
//
// The later lease replaces the earlier one: Err of the earlier lease is then a *LostError with ReasonReplaced, and
// its Release has no effect. Under the earlier lease itself, with a context that comes from it, both are held, as
// with Reentrant. While another call with the id is in progress, this one waits for that, and TryAcquire returns
// ErrHeld.
//
// The options of the later call apply to the hold: Seal is called, a longer TTL option extends the hold, and the hold
// is renewed unless the later call has NoRenew. Options that a hold cannot change are errors: ErrLimitMismatch for
// another kind or Hierarchical, ErrInvalidOption for a longer HoldAtLeast or other Metadata. The earlier lease stays
// held then.
//
// Other clients that use the same id contend like any other caller, and a *HeldError for a hold with the same id has
// SameRequest set, so that a restarted process can recognize the hold of its predecessor. The id itself is never
// sent; others see a hash of it (Holder.HoldID).
//
// The id has 16 to 128 characters of A–Z a–z 0–9 - _ that carry at least 128 random bits, such as a UUID. Default: a
// random id per acquire.
func RequestID(id string) AcquireOption {
	return optionFunc(func(o *acquireOptions) error {
		o.requestID = id
		return backend.ValidateRequestID(id)
	})
}

// Seal shows the claim of the new hold to the resource before Acquire returns, or before the function of Do runs:
// once the resource has seen the new token, it refuses every later write of an earlier holder, even before our own
// first write. Reads after Acquire then see the final state of the last holder.
//
//	seal := fencelock.Seal(func(ctx context.Context, c fencing.Claim) error { return guard.Check(ctx, c) })
//	err := locks.Do(ctx, "accounts/42", fn, seal)
//
// show gets a context that ends with the acquire's and with the lease, and a claim with the lock's name as Resource.
// If show returns an error, the acquire releases the lock and returns that error. With AcquireAll it is called for
// each name. For the correctness tier only: ErrInvalidOption in the efficiency tier, which has no tokens.
func Seal(show func(ctx context.Context, claim fencing.Claim) error) AcquireOption {
	return optionFunc(func(o *acquireOptions) error {
		if show == nil {
			return invalidOption("Seal", "nil", "it is nil")
		}
		o.seal = show
		return nil
	})
}

// HoldAtLeast keeps the name closed until d after the grant, also when the lease is released earlier or the process
// exits: a job that every replica starts at the same minute runs once although it takes a second. The lease itself ends
// as without it. d is at most the driver's greatest TTL. Needs a driver with CapMinHold, ErrUnsupported otherwise.
//
//	lease, err := locks.TryAcquire(ctx, "nightly-report", fencelock.HoldAtLeast(time.Minute))
func HoldAtLeast(d time.Duration) AcquireOption {
	return optionFunc(func(o *acquireOptions) error {
		if d <= 0 {
			return invalidOption("HoldAtLeast", d.String(), "it is not positive")
		}
		o.minHold = d
		return nil
	})
}

// NoRenew turns off background renewal: the lease ends at its deadline unless Lease.Extend prolongs it. Use it when
// the progress of the work, and not its mere existence, should keep the lock: a worker that hangs loses it.
//
//	lease, err := locks.Acquire(ctx, "import", fencelock.NoRenew(), fencelock.TTL(time.Minute))
func NoRenew() AcquireOption {
	return optionFunc(func(o *acquireOptions) error {
		o.noRenew = true
		return nil
	})
}

// Shared asks for a shared hold: any number of shared holds may exist at the same time, but never beside an exclusive
// one. Readers use it; writers acquire the lock without it. A writer that waits stops new readers, so neither side
// starves. The lease's token is marked as not exclusive; guards refuse it. Needs a driver with CapShared,
// ErrUnsupported otherwise.
//
//	lease, err := locks.Acquire(ctx, "config", fencelock.Shared())
func Shared() AcquireOption {
	return optionFunc(func(o *acquireOptions) error {
		if o.kind == backend.KindPermits {
			return invalidOption("Shared", "beside Permits", "a hold is of one kind")
		}
		o.kind = backend.KindShared
		return nil
	})
}

// Permits takes n of limit permits: a counting semaphore. All who use the name give the same limit; another one, or
// another kind of hold, is ErrLimitMismatch while the name is in use. The permits of a holder that died come back after
// its TTL. The lease's token is marked as not exclusive; guards refuse it. 1 ≤ n ≤ limit < 2^31, ErrInvalidOption
// otherwise. Needs a driver with CapPermits, ErrUnsupported otherwise.
//
//	lease, err := locks.Acquire(ctx, "api.example.com", fencelock.Permits(1, 20)) // twenty calls at a time
func Permits(n, limit int) AcquireOption {
	return optionFunc(func(o *acquireOptions) error {
		switch {
		case n < 1 || limit < n || limit > math.MaxInt32:
			return invalidOption("Permits", fmt.Sprintf("(%d, %d)", n, limit), "want 1 <= n <= limit < 2^31")
		case o.kind == backend.KindShared:
			return invalidOption("Permits", "beside Shared", "a hold is of one kind")
		}
		o.kind, o.permits, o.limit = backend.KindPermits, n, limit
		return nil
	})
}

// Hierarchical treats the name as a path, and locks everything below it: a hold of "a/b" excludes holds of "a" and of
// "a/b/c", but not of "a/c". With Shared it excludes exclusive holds only. Every acquire of the name, or of a path
// above or below it, needs this option; without it the acquire fails with ErrLimitMismatch while the name is in use
// as a path. Not for Permits. Needs a driver with CapHierarchy, ErrUnsupported otherwise.
//
//	lease, err := locks.Acquire(ctx, "tenants/7", fencelock.Hierarchical()) // keeps out "tenants/7/users" too
func Hierarchical() AcquireOption {
	return optionFunc(func(o *acquireOptions) error {
		o.hierarchical = true
		return nil
	})
}

// Reentrant lets a function acquire a lock that its caller may already hold: with a context that comes from a lease
// (the context that Do passes, or Lease.Context) the acquire returns another lease of the same hold, with the same
// token. The lock is released when all leases of the hold have been released.
//
//	func (s *Store) Rename(ctx context.Context, id string) error { // called alone, and from within s.Merge
//		return s.locks.Do(ctx, id, s.rename, fencelock.Reentrant())
//	}
//
// Seal is called once more, a longer TTL option extends the hold, and the hold is renewed while one of its leases has no
// NoRenew. A longer HoldAtLeast or other Metadata than the hold's is ErrInvalidOption, and a hold that is not
// Hierarchical likewise cannot become so: ErrLimitMismatch. If the hold is lost already, the error is ErrLost.
// Without such a context the option has no effect: the context identifies the caller, not the goroutine. A shared
// hold cannot be acquired again exclusively: ErrDeadlock. Not beside RequestID, and not for AcquireAll and Lead:
// ErrInvalidOption.
func Reentrant() AcquireOption {
	return optionFunc(func(o *acquireOptions) error {
		o.reentrant = true
		return nil
	})
}

// MaxMetadataBytes bounds Metadata: keys and values together, in bytes of UTF-8.
const MaxMetadataBytes = backend.MaxMetadataBytes

// Metadata stores key-value text beside the hold, for operators who inspect the lock. At most MaxMetadataBytes of
// valid UTF-8 without NUL, in all options of one acquire together, ErrInvalidOption otherwise. It is for display
// only. Needs a driver with CapMetadata, ErrUnsupported otherwise. The map is copied when the option is made.
//
//	lease, err := locks.Acquire(ctx, "deploy", fencelock.Metadata(map[string]string{"ticket": "OPS-12"}))
func Metadata(kv map[string]string) AcquireOption {
	kv = maps.Clone(kv)
	return optionFunc(func(o *acquireOptions) error {
		all := kv // never changed, so that many acquires may share it
		if len(o.metadata) > 0 {
			all = maps.Clone(o.metadata)
			maps.Copy(all, kv)
		}
		if err := backend.ValidateMetadata(all); err != nil {
			return err
		}
		o.metadata = all
		return nil
	})
}

// kindNeeds are the capabilities that the kinds need.
var kindNeeds = [...]backend.Capabilities{
	backend.KindShared: backend.CapShared, backend.KindPermits: backend.CapPermits,
}

// collect applies opts in order, and stops at the first that is wrong.
func collect(opts []AcquireOption) (acquireOptions, error) {
	if len(opts) == 0 {
		return acquireOptions{}, nil
	}
	var o acquireOptions
	for _, opt := range opts {
		if opt == nil {
			return o, invalidOption("acquire option", "nil", "it is nil")
		}
		if err := opt.apply(&o); err != nil {
			return o, err
		}
	}
	return o, nil
}

// request resolves name and options into the request for the driver. It makes the key of the first attempt, and marks
// it as fresh: it was never sent before.
//
//	namespace and name     Name
//	Options.Owner          Owner
//	random                 RequestID, and HoldID unless RequestID gives one
//	TTL and LockDelay      TTL
//	the method             Wait
//	Shared, Permits        Kind, Permits, Limit
//	Hierarchical           Hierarchical
//	HoldAtLeast            MinHold
//	Metadata               Metadata
//	the context's leases   Under, by Client.under
//	driver's capability    Lost, by Client.bind
func (c *Client) request(name string, wait bool, opts []AcquireOption) (backend.Request, acquireOptions, error) {
	if c.zero() {
		return backend.Request{}, acquireOptions{}, errZeroClient
	}
	o, err := collect(opts)
	if err != nil {
		return backend.Request{}, o, err
	}
	full := c.set.prefix + name
	if name == "" {
		full = "" // a namespace does not make an empty name valid
	}
	if err := backend.ValidateName(full); err != nil {
		return backend.Request{}, o, err
	}
	d := c.driver.Describe()
	if o.ttl == 0 {
		o.ttl = c.set.TTL
	} else if err := c.set.validateTTL(d, o.ttl); err != nil {
		return backend.Request{}, o, err
	}
	if err := c.fit(d, wait, &o); err != nil {
		return backend.Request{}, o, err
	}
	r := backend.Request{
		Name: full, Owner: c.set.Owner, Fresh: true,
		TTL: o.ttl + c.set.LockDelay, Wait: wait, MinHold: o.minHold, Metadata: o.metadata,
		Kind: o.kind, Permits: o.permits, Limit: o.limit, Hierarchical: o.hierarchical,
		Renews: !o.noRenew && c.set.LockDelay == 0 && c.set.StopEarly == 0 && c.heart.size.Load() < 1000,
	}
	r.RequestID, r.HoldID = newIDs()
	if o.requestID != "" {
		r.HoldID = backend.HoldID(o.requestID)
	}
	return r, o, nil
}

// newIDs returns a secret key for an attempt and a name for its hold, 128 independent random bits each. One reading
// of the system's randomness serves both.
func newIDs() (requestID, holdID string) {
	var raw [32]byte
	rand.Read(raw[:]) // never fails: it ends the program when the system has no randomness
	var text [64]byte
	hex.Encode(text[:], raw[:])
	both := string(text[:])
	return both[:32], both[32:]
}

// fit checks that the options go together, and that the driver supports them.
func (c *Client) fit(d backend.Description, wait bool, o *acquireOptions) error {
	switch {
	case !wait && o.waitAtMost != 0:
		return invalidOption("WaitAtMost", o.waitAtMost.String(), "TryAcquire does not wait")
	case o.hierarchical && o.kind == backend.KindPermits:
		return invalidOption("Hierarchical", "beside Permits", "permits of a path are not counted")
	case o.reentrant && o.requestID != "":
		return invalidOption("Reentrant", "beside RequestID", "the hold has the id that it was taken with")
	case o.seal != nil && c.tier != Correctness:
		return invalidOption("Seal", "in the "+c.tier.String()+" tier", "there is no token to show")
	}
	need := kindNeeds[o.kind]
	if o.hierarchical {
		need |= backend.CapHierarchy
	}
	if o.minHold > 0 {
		need |= backend.CapMinHold
	}
	if len(o.metadata) > 0 {
		need |= backend.CapMetadata
	}
	if missing := d.Capabilities.Missing(need); missing != 0 {
		return &CapabilityError{Driver: d.Name, Missing: missing}
	}
	if o.minHold > 0 && d.MaxTTL > 0 && o.minHold > d.MaxTTL {
		return invalidOption("HoldAtLeast", o.minHold.String(),
			fmt.Sprintf("driver %s takes no more than %v", d.Name, d.MaxTTL))
	}
	return nil
}
