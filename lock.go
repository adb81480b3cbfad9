package fencelock

// The client: tiers, the four constructors, and the promises of Acquire, TryAcquire and Do. Read this file first;
// acquire.go carries out an acquire, and lease.go has the lease.

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/cleanup"
	"github.com/fencelock/fencelock/internal/history"
	"github.com/fencelock/fencelock/internal/randsource"
)

// Locker is the interface for code that needs a lock: accept it, so that tests can pass a fake. *Client implements it
// and documents the methods. It is small on purpose: elections, sets of names and inspection are methods of *Client.
//
//	func NewBilling(locks fencelock.Locker, db *sql.DB) *Billing
type Locker interface {
	// Acquire waits until it holds the lock or ctx ends.
	Acquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error)
	// TryAcquire makes one attempt.
	TryAcquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error)
	// Do acquires the lock, runs fn and releases.
	Do(ctx context.Context, name string, fn func(ctx context.Context, lease *Lease) error, opts ...AcquireOption) error
}

// Tier states how much depends on a lock, and so decides which drivers can serve it. There is no default: the
// programmer has to decide once how much a double run would cost.
type Tier uint8

const (
	// Efficiency: a rare double run only wastes work. Any driver serves it; its leases carry no fencing token, even
	// where the driver could issue one, so that a guard in front of data refuses them on the first test run, and not in
	// the first failover.
	Efficiency Tier = iota + 1
	// Correctness: a double run corrupts data. Only a driver that issues fencing tokens serves it, and the resource
	// must check them: see package fencing.
	Correctness
)

// String returns "efficiency" or "correctness", and "Tier(n)" for any other value.
func (t Tier) String() string {
	switch t {
	case Efficiency:
		return "efficiency"
	case Correctness:
		return "correctness"
	}
	return fmt.Sprintf("Tier(%d)", uint8(t))
}

// ForEfficiency returns a client of the efficiency tier. It accepts any driver. It does no I/O, so it succeeds even
// while the service is down; a wrong address shows in the first acquire, or in the driver's Ping.
//
//	client := goredis.NewClient(&goredis.Options{Addr: "10.0.0.1:6379"})
//	locks, err := fencelock.ForEfficiency(redis.New(client, nil), nil)
//
// Errors: ErrInvalidOption for a nil driver or an invalid option, ErrInvalidTTL, and ErrUnsupported if the driver
// lacks a capability of Options.Require. The client owns the driver from then on, and closes it.
func ForEfficiency(driver backend.Driver, o *Options) (*Client, error) {
	return New(driver, Efficiency, o)
}

// ForCorrectness returns a client of the correctness tier. A driver that does not promise fencing does not compile
// here. If its current configuration cannot keep the promise, the error is ErrTier and names the missing property.
// ForCorrectness does no I/O; properties of the service that only a probe can find are checked with every grant.
//
//	locks, err := fencelock.ForCorrectness(etcd.New(client, nil), &fencelock.Options{TTL: 15 * time.Second})
//
// Other errors are as for ForEfficiency. The resource has to check the tokens: see package fencing.
func ForCorrectness(driver backend.FencingDriver, o *Options) (*Client, error) {
	return New(driver, Correctness, o)
}

// Open finds the driver by the URL's scheme among the imported drivers, connects, and returns a client of the
// tier. Use it when the driver comes from configuration; the check that ForCorrectness leaves to the compiler happens
// here at startup.
//
//	import _ "github.com/fencelock/fencelock/etcd" // registers etcd:// and etcds://
//
//	locks, err := fencelock.Open(ctx, os.Getenv("LOCKS"), fencelock.Correctness, nil)
//
// ctx bounds connecting, not the client. Errors: ErrTier if the driver cannot serve the tier, ErrInvalidOption if the
// URL is invalid or its driver is not imported, ErrUnavailable if the service cannot be reached, and ErrMisconfigured
// if it is unfit. No error shows the URL's password. After an error no connection stays open. Close disconnects.
func Open(ctx context.Context, url string, tier Tier, o *Options) (*Client, error) {
	driver, err := backend.Open(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("fencelock: open %s: %w", backend.RedactURL(url), err)
	}
	c, err := New(driver, tier, o)
	if err != nil {
		return nil, errors.Join(err, driver.Close(context.WithoutCancel(ctx)))
	}
	return c, nil
}

// New returns a client over an existing driver, for a tier that is known only at run time. It does no I/O. Errors:
// ErrTier if the driver cannot serve the tier, ErrUnsupported for options that the driver does not support,
// ErrInvalidOption for a nil driver or an unknown tier.
func New(driver backend.Driver, tier Tier, o *Options) (*Client, error) {
	if isNil(driver) {
		return nil, fmt.Errorf("fencelock: open: %w", invalidOption("driver", "nil", "it is nil"))
	}
	if tier != Efficiency && tier != Correctness {
		return nil, fmt.Errorf("fencelock: open: %w",
			invalidOption("tier", tier.String(), "want fencelock.Efficiency or fencelock.Correctness"))
	}
	if err := checkTier(driver, tier, o != nil && o.AcceptAsyncReplica); err != nil {
		return nil, fmt.Errorf("fencelock: open: %w", err)
	}
	set, err := o.resolve(driver.Describe())
	if err != nil {
		return nil, fmt.Errorf("fencelock: open: %w", err)
	}
	c := &Client{driver: driver, tier: tier, set: set, closed: make(chan struct{})}
	c.chance = randsource.Of(driver)
	c.heart.init(c)
	c.cleaner.Init(maxCleanups, set.Clock, driver.Release, c.abandoned)
	c.telling.to = set.Observer
	c.telling.adds, _ = set.Observer.(MetadataObserver)
	drivers.use(driver)
	return c, nil
}

// maxCleanups bounds the releases in the background. The oldest one beyond that is dropped and ends with its TTL: the
// driver does not keep alive a hold after its Release.
const maxCleanups = 1 << 17

// checkTier looks for the promise on the driver itself and never through Unwrap: a wrapper must promise again. Go
// promotes the method of an embedded driver, so the type alone is no proof; the method has to return the driver
// itself.
func checkTier(driver backend.Driver, tier Tier, acceptAsyncReplica bool) error {
	if tier != Correctness {
		return nil
	}
	d := driver.Describe()
	refuse := func(lacks string) error { return &CapabilityError{Driver: d.Name, Tier: tier, Lacks: lacks} }
	promise, promises := driver.(backend.FencingDriver)
	switch {
	case !promises || !d.Capabilities.Has(backend.CapFencing):
		lacks := "it issues no fencing tokens"
		if d.NoFencing != "" {
			lacks += ": " + d.NoFencing
		}
		return refuse(lacks)
	case !sameDriver(promise.IssuesFencingTokens(), driver):
		return refuse(
			"the promise to issue fencing tokens is that of a driver inside it; a wrapper that keeps the promise " +
				"declares IssuesFencingTokens itself")
	}
	return checkExclusion(d, acceptAsyncReplica)
}

// checkExclusion fails if the service may forget an acknowledged hold. A driver may find that out only when it talks
// to the service, so every grant is checked too (TestUnfitExclusionIsRefusedAtTheGrant).
func checkExclusion(d backend.Description, acceptAsyncReplica bool) error {
	lacks := ""
	switch d.Exclusion {
	case backend.ExclusionUndeclared, backend.ExclusionVolatileServer:
		lacks = "its exclusion is " + d.Exclusion.String() + ": it may forget acknowledged holds"
	case backend.ExclusionAsyncReplica:
		if acceptAsyncReplica {
			return nil
		}
		lacks = "a failover to its asynchronous replica forgets the latest holds; " +
			"Options.AcceptAsyncReplica takes that risk"
	default:
		return nil
	}
	return &CapabilityError{Driver: d.Name, Tier: Correctness, Lacks: lacks}
}

// isNil reports whether driver is nil or holds a nil pointer, which would otherwise panic in the first call.
func isNil(driver backend.Driver) bool {
	if driver == nil {
		return true
	}
	switch v := reflect.ValueOf(driver); v.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Func, reflect.Chan, reflect.Slice:
		return v.IsNil()
	}
	return false
}

// sameDriver reports whether a and b are the same driver, without a panic for types that are not comparable.
func sameDriver(a, b backend.Driver) bool {
	return a != nil && b != nil && reflect.TypeOf(a) == reflect.TypeOf(b) && reflect.TypeOf(a).Comparable() && a == b
}

// Client acquires locks through one driver, for one tier. It is safe for concurrent use. One client per process and
// service is enough: it renews all its leases together. Several clients may share a driver, one for each tier or
// namespace for example; the last Close closes it. Methods of a nil or zero Client return ErrInvalidOption.
//
// A client without leases and calls runs no goroutine. Close it all the same: that closes the driver and ends leases
// that were not released, which it would otherwise renew for as long as the process lives.
type Client struct {
	// driver, tier, set and chance never change after New.
	driver backend.Driver
	tier   Tier
	set    settings

	heart   heart           // renews holds and declares them lost
	cleaner cleanup.Cleaner // releases in the background
	telling telling         // events to the observer
	waits   waits           // acquires that may have to be reported as waiting
	repeats repeats         // holds by the request ids of callers
	history history.Tokens  // tokens that the service has acknowledged
	work    work            // calls in progress
	chance  func() float64

	// closed is closed when the first Close is done; closeErr is its result, valid from then on.
	closed   chan struct{}
	closeErr error // see closed
}

var _ Locker = (*Client)(nil)

// zero reports whether no constructor made the client.
func (c *Client) zero() bool { return c == nil || c.driver == nil }

// errZeroClient replaces the panic of a nil dereference.
var errZeroClient = invalidOption("client", "the zero Client",
	"make it with ForEfficiency, ForCorrectness, New or Open")

// Describe returns the driver's description of its current configuration: TTL bounds, capabilities, token space. It
// does no I/O. Fields that depend on the service, such as the token space, may be empty before the first exchange
// with it.
func (c *Client) Describe() backend.Description {
	if c.zero() {
		return backend.Description{}
	}
	return c.driver.Describe()
}

// Acquire waits until it holds the lock. ctx bounds the wait, not the hold: the client renews the lease until
// Release, loss or Close, even after ctx has ended.
//
//	lease, err := locks.Acquire(ctx, "invoices/2026-11")
//	if err != nil {
//		return err
//	}
//	defer lease.Release(ctx)
//	return send(lease.Context(), lease.Claim("invoices/2026-11"))
//
// When ctx ends first, its error is in the chain, and ErrHeld too if the lock is held, with a *HeldError that names
// the holder where the driver knows it. The wait leaves no trace in the service. Acquire returns within milliseconds
// of the end of ctx, even without a network; if the service may have granted meanwhile, ErrUnknown is in the
// chain, and the client releases the grant in the background.
//
// Waiters are served in the order of their arrival where the driver declares CapFair, and in no promised order
// elsewhere. A wait survives a connection that breaks.
//
// Other errors are ErrUnavailable (the service did not act), ErrMisconfigured, ErrDenied, ErrDeadlock,
// ErrLimitMismatch, ErrQueueFull, ErrHistoryLost, ErrClosed, ErrTier if the service turned out to be unfit for the
// tier, and ErrInvalidName, ErrInvalidTTL, ErrInvalidOption or ErrUnsupported before any request is sent. Each has a
// *CallError with the name in its chain.
func (c *Client) Acquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error) {
	return c.acquire(ctx, name, true, opts)
}

// TryAcquire makes one attempt. If another caller holds the lock, or waits for it on a fair driver, the error is
// ErrHeld, with a *HeldError that names the holder where the driver knows it. Other errors are as for Acquire.
//
//	lease, err := locks.TryAcquire(ctx, "nightly-report")
//	if errors.Is(err, fencelock.ErrHeld) {
//		return nil // another replica does it
//	}
func (c *Client) TryAcquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error) {
	return c.acquire(ctx, name, false, opts)
}

// Do acquires the lock, runs fn and releases. ctx bounds the wait and the run: fn gets a context that ends when ctx
// ends or, with a *LostError as its cause, before another client can hold the lock. fn should stop then; Do waits for
// it.
//
//	err := locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Tx(ctx, lease.Claim("accounts/42"), debit)
//	})
//
// Do returns fn's error, joined with ErrLost if the lock was lost meanwhile, or with the release's error. A nil error
// means that fn succeeded and the lock was held until the end. The lock is released even if fn panics. Once fn has
// returned, Do returns at most a second after the end of ctx, even without a network.
//
// If the lock was not acquired fn has not run, and the error is one of Acquire's.
func (c *Client) Do(
	ctx context.Context, name string, fn func(ctx context.Context, lease *Lease) error, opts ...AcquireOption,
) error {
	if fn == nil {
		return callError("do", name, invalidOption("function", "nil", "it is nil"))
	}
	lease, err := c.Acquire(ctx, name, opts...)
	if err != nil {
		return err
	}
	return c.run(ctx, Leases{lease}, func(ctx context.Context) error { return fn(ctx, lease) })
}

// run calls fn with a context that ends when ctx or one of the leases does, and then releases. It counts as a flight:
// Close ends the leases, and waits for fn. The release's error is joined unless err already reports the loss.
func (c *Client) run(ctx context.Context, leases Leases, fn func(context.Context) error) (err error) {
	f := &flight{kind: running}
	if refused := c.work.begin(f); refused != nil { // closed since the acquire
		_ = leases.Release(ctx)
		return callError("do", leases.names(), refused)
	}
	defer c.work.leave(f)
	for _, l := range leases {
		l.of.enter()
	}
	defer func() { // also on a panic or runtime.Goexit in fn
		for _, l := range leases {
			l.of.exit()
		}
		released := leases.Release(ctx)
		if released != nil && !errors.Is(err, ErrLost) {
			err = errors.Join(err, released)
		}
	}()
	running, cancel := context.WithCancelCause(leases[len(leases)-1].work().within(ctx))
	defer cancel(nil)
	for _, l := range leases {
		l.endsWith(cancel)
	}
	return fn(running)
}
