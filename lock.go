package fencelock

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/chance"
	"github.com/fencelock/fencelock/internal/history"
)

// Locker is what code that needs a lock should accept. *Client implements it, and says there what the methods promise.
type Locker interface {
	// Acquire waits until it holds the lock or ctx ends.
	Acquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error)
	// TryAcquire makes one attempt.
	TryAcquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error)
	// Do acquires the lock, runs fn and releases.
	Do(ctx context.Context, name string, fn func(ctx context.Context, lease *Lease) error, opts ...AcquireOption) error
}

// Tier is what a caller needs from a lock. It decides which drivers will do.
type Tier uint8

const (
	// Efficiency: a rare double run only wastes work. Any driver serves it; its leases carry no fencing token, even
	// where the driver could issue one, so that a guard in front of data refuses them on the first test run.
	Efficiency Tier = iota + 1
	// Correctness: a double run corrupts data. Only a driver that issues fencing tokens serves it, and the resource
	// must check them: see package fencing.
	Correctness
)

// String returns "efficiency" or "correctness".
func (t Tier) String() string {
	switch t {
	case Efficiency:
		return "efficiency"
	case Correctness:
		return "correctness"
	}
	return fmt.Sprintf("Tier(%d)", uint8(t))
}

// ForEfficiency returns a client of the efficiency tier. Any driver will do. It does no I/O.
func ForEfficiency(driver backend.Driver, o *Options) (*Client, error) {
	return Open(driver, Efficiency, o)
}

// ForCorrectness returns a client of the correctness tier. A driver that does not promise fencing does not compile
// here; one whose present configuration cannot keep the promise is refused with ErrTier. It does no I/O.
func ForCorrectness(driver backend.FencingDriver, o *Options) (*Client, error) {
	return Open(driver, Correctness, o)
}

// OpenURL finds the driver by the URL's scheme among those that the program imports, connects, and returns a client of
// the tier. A driver that cannot serve the tier is refused with ErrTier. Close disconnects.
func OpenURL(ctx context.Context, url string, tier Tier, o *Options) (*Client, error) {
	driver, err := backend.Open(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("fencelock: open %s: %w", backend.RedactURL(url), err)
	}
	c, err := Open(driver, tier, o)
	if err != nil {
		return nil, errors.Join(err, driver.Close(context.WithoutCancel(ctx)))
	}
	return c, nil
}

// Open returns a client of a tier that is known only at run time. It does no I/O. A driver that cannot serve the tier
// is refused with ErrTier, options that the driver does not support with ErrUnsupported.
func Open(driver backend.Driver, tier Tier, o *Options) (*Client, error) {
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
	c.chance = chance.Of(driver)
	c.heart.init(c)
	c.cleaner.init(c)
	c.telling.to = set.Observer
	drivers.use(driver)
	return c, nil
}

// checkTier looks for the promise on the driver itself and never through Unwrap: a wrapper must promise again.
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
		return refuse("the promise to issue fencing tokens is that of a driver inside it; a wrapper that keeps the promise " +
			"declares IssuesFencingTokens itself")
	}
	return checkExclusion(d, acceptAsyncReplica)
}

// checkExclusion fails if what excludes in the service may forget a hold that it acknowledged. A driver may learn that
// only when it talks to the service, so every grant is looked at, too.
func checkExclusion(d backend.Description, acceptAsyncReplica bool) error {
	lacks := ""
	switch d.Exclusion {
	case backend.ExclusionUndeclared, backend.ExclusionVolatileServer:
		lacks = "its exclusion is " + d.Exclusion.String() + ": nothing says that it keeps what it acknowledged"
	case backend.ExclusionAsyncReplica:
		if acceptAsyncReplica {
			return nil
		}
		lacks = "a failover to its asynchronous replica forgets the latest holds; Options.AcceptAsyncReplica takes that risk"
	default:
		return nil
	}
	return &CapabilityError{Driver: d.Name, Tier: Correctness, Lacks: lacks}
}

// isNil finds an interface that is nil and one that holds a nil pointer.
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

// sameDriver compares without a panic where the type of a driver does not compare.
func sameDriver(a, b backend.Driver) bool {
	return a != nil && b != nil && reflect.TypeOf(a) == reflect.TypeOf(b) && reflect.TypeOf(a).Comparable() && a == b
}

// Client takes locks through one driver, for one tier. It is safe for concurrent use. One client per process and
// service is enough: all its leases are renewed together. Several clients may share a driver, one for each tier or
// namespace for example; the last Close closes it. The zero Client answers ErrInvalidOption.
type Client struct {
	driver backend.Driver
	tier   Tier
	set    settings

	heart   heart          // renews holds and declares them lost
	cleaner cleaner        // gives back in the background
	telling telling        // events to the observer
	repeats repeats        // holds by the request ids of callers
	history history.Tokens // what the service has acknowledged
	work    work           // what is under way
	chance  func() float64

	closed   chan struct{} // closed when Close is done
	closeErr error         // what it answered; valid then
}

var _ Locker = (*Client)(nil)

// zero reports whether the client was not made by a constructor.
func (c *Client) zero() bool { return c == nil || c.driver == nil }

var errZeroClient = invalidOption("client", "the zero Client",
	"make it with ForEfficiency, ForCorrectness, Open or OpenURL")

// Describe returns what the driver says about itself in its present configuration: its bounds of TTLs, its
// capabilities, its token space.
func (c *Client) Describe() backend.Description {
	if c.zero() {
		return backend.Description{}
	}
	return c.driver.Describe()
}

// Acquire waits until it holds the lock. ctx bounds the wait, not the hold: the lease outlives it and is renewed until
// Release, loss or Close.
//
// When ctx ends first, its error is in the chain, and ErrHeld too if somebody holds the lock, with a *HeldError that
// names the holder where the driver can tell. Nothing of the wait is left behind. Acquire returns within milliseconds
// of the end of ctx, whatever the network does; if the service may have granted meanwhile, ErrUnknown is in the chain,
// and the grant is given back in the background.
//
// Acquire may be called from any goroutine. What it can answer else: ErrUnavailable, ErrMisconfigured, ErrDeadlock,
// ErrLimitMismatch, ErrHistoryLost, ErrClosed, and ErrInvalidName, ErrInvalidTTL, ErrInvalidOption or ErrUnsupported
// before anything is sent.
func (c *Client) Acquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error) {
	return c.acquire(ctx, name, true, opts)
}

// TryAcquire makes one attempt. If somebody else holds the lock, or waits for it on a fair driver, the error is
// ErrHeld, with a *HeldError that names the holder where the driver can tell. The other errors are those of Acquire.
func (c *Client) TryAcquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error) {
	return c.acquire(ctx, name, false, opts)
}

// Do acquires the lock, runs fn and releases. ctx bounds the wait and the run: fn gets a context that ends when ctx
// ends or, with a *LostError as its cause, before somebody else can hold the lock. fn should stop then; Do waits for
// it. The result is fn's error, joined with ErrLost if the lock was lost meanwhile, or with the release's error. The
// lock is also released when fn panics. When fn has returned, Do returns at most a second after the end of ctx,
// whatever the network does.
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

// run runs fn until it returns, with a context that ends when ctx or one of the leases does, and releases.
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
	under := leases.Context()
	running, cancel := context.WithCancelCause(lineOf(under).within(ctx))
	defer cancel(nil)
	defer context.AfterFunc(under, func() { cancel(context.Cause(under)) })()
	return fn(running)
}
