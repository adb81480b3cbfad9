package fencelock

// The client: tiers, the four doors through which a client is made, and what Acquire, TryAcquire and Do promise. Read
// it first; how an acquire is carried out is in acquire.go, and what a lease is in lease.go.

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/chance"
	"github.com/fencelock/fencelock/internal/history"
)

// Locker is what code that needs a lock should accept, so that its tests can pass a fake. *Client implements it, and
// says there what the methods promise. It is small on purpose: elections, sets of names and looking are asked of the
// *Client.
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

// Tier is what a caller needs from a lock. It decides which drivers will do, and there is no default: the question what
// a double run would cost has to be answered once, by the programmer.
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

// ForEfficiency returns a client of the efficiency tier. Any driver will do. It does no I/O, so it succeeds also while
// the service is down; a wrong address shows in the first acquire, or in the driver's Ping.
//
//	client := goredis.NewClient(&goredis.Options{Addr: "10.0.0.1:6379"})
//	locks, err := fencelock.ForEfficiency(redis.New(client, nil), nil)
//
// Errors: ErrInvalidOption for a nil driver or an option that makes no sense, ErrInvalidTTL, and ErrUnsupported for
// what Options.Require asks for and the driver lacks. The client owns the driver from then on, and closes it.
func ForEfficiency(driver backend.Driver, o *Options) (*Client, error) {
	return Open(driver, Efficiency, o)
}

// ForCorrectness returns a client of the correctness tier. A driver that does not promise fencing does not compile
// here; one whose present configuration cannot keep the promise is refused with ErrTier, and the error says what is
// missing. It does no I/O; what only a probe can tell about the service is looked at again with every grant.
//
//	locks, err := fencelock.ForCorrectness(etcd.New(client, nil), &fencelock.Options{TTL: 15 * time.Second})
//
// The other errors are those of ForEfficiency. The resource has to check the tokens: see package fencing.
func ForCorrectness(driver backend.FencingDriver, o *Options) (*Client, error) {
	return Open(driver, Correctness, o)
}

// OpenURL finds the driver by the URL's scheme among those that the program imports, connects, and returns a client of
// the tier. It is for programs whose driver comes from configuration; the check that ForCorrectness leaves to the
// compiler is made here at startup.
//
//	import _ "github.com/fencelock/fencelock/etcd" // registers etcd:// and etcds://
//
//	locks, err := fencelock.OpenURL(ctx, os.Getenv("LOCKS"), fencelock.Correctness, nil)
//
// ctx bounds the connecting, and not the client. A driver that cannot serve the tier is refused with ErrTier; a URL
// that cannot be read, or whose driver is not imported, is ErrInvalidOption; a service that cannot be reached
// ErrUnavailable, and an unfit one ErrMisconfigured. No error shows the URL's password. After an error nothing stays
// open. Close disconnects.
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

// Open returns a client of a tier that is known only at run time, over a driver that the program has made. It does no
// I/O. A driver that cannot serve the tier is refused with ErrTier, options that the driver does not support with
// ErrUnsupported, a nil driver and an unknown tier with ErrInvalidOption.
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

// checkTier looks for the promise on the driver itself and never through Unwrap: a wrapper must promise again. Go
// promotes the method of an embedded driver, so the type alone proves nothing; the driver that the method returns is
// compared with the one that was handed in.
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

// checkExclusion fails if what excludes in the service may forget a hold that it acknowledged. A driver may learn that
// only when it talks to the service, so every grant is looked at, too (TestAnExclusionThatIsLearntLateIsRefused).
func checkExclusion(d backend.Description, acceptAsyncReplica bool) error {
	lacks := ""
	switch d.Exclusion {
	case backend.ExclusionUndeclared, backend.ExclusionVolatileServer:
		lacks = "its exclusion is " + d.Exclusion.String() + ": nothing says that it keeps what it acknowledged"
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

// isNil finds an interface that is nil and one that holds a nil pointer, which would otherwise panic in the first call.
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
// namespace for example; the last Close closes it. The zero Client and a nil one answer ErrInvalidOption.
//
// A client without leases and calls runs no goroutine. It has to be closed all the same, for the driver's sake, and
// since leases that nobody releases are renewed for as long as the process lives.
type Client struct {
	// driver, tier, set and chance never change after Open.
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

	// closed is closed by the first Close when it is done; closeErr is what that answered, and is read after it.
	closed   chan struct{}
	closeErr error // what it answered; valid then
}

var _ Locker = (*Client)(nil)

// zero reports whether the client was not made by a constructor.
func (c *Client) zero() bool { return c == nil || c.driver == nil }

// errZeroClient is an error, where a nil dereference would tell the programmer less.
var errZeroClient = invalidOption("client", "the zero Client",
	"make it with ForEfficiency, ForCorrectness, Open or OpenURL")

// Describe returns what the driver says about itself in its present configuration: its bounds of TTLs, its
// capabilities, its token space. It does no I/O. What depends on the service, such as the token space, may be empty
// before the first exchange with it.
func (c *Client) Describe() backend.Description {
	if c.zero() {
		return backend.Description{}
	}
	return c.driver.Describe()
}

// Acquire waits until it holds the lock. ctx bounds the wait, not the hold: the lease outlives it and is renewed until
// Release, loss or Close.
//
//	lease, err := locks.Acquire(ctx, "invoices/2026-11")
//	if err != nil {
//		return err
//	}
//	defer lease.Release(ctx)
//	return send(lease.Context(), lease.Claim("invoices/2026-11"))
//
// When ctx ends first, its error is in the chain, and ErrHeld too if somebody holds the lock, with a *HeldError that
// names the holder where the driver can tell. Nothing of the wait is left behind. Acquire returns within milliseconds
// of the end of ctx, whatever the network does; if the service may have granted meanwhile, ErrUnknown is in the chain,
// and the grant is given back in the background.
//
// Waiters are served in the order of their arrival where the driver declares CapFair, and in no promised order
// elsewhere. A wait survives a connection that breaks.
//
// Acquire may be called from any goroutine. Its other answers are ErrUnavailable (nothing was done), ErrMisconfigured,
// ErrDeadlock, ErrLimitMismatch, ErrHistoryLost, ErrClosed, ErrTier if the service turned out to be unfit for the tier,
// and ErrInvalidName, ErrInvalidTTL, ErrInvalidOption or ErrUnsupported before anything is sent. A *CallError with the
// name is in the chain of each.
func (c *Client) Acquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error) {
	return c.acquire(ctx, name, true, opts)
}

// TryAcquire makes one attempt. If somebody else holds the lock, or waits for it on a fair driver, the error is
// ErrHeld, with a *HeldError that names the holder where the driver can tell. The other errors are those of Acquire.
//
//	lease, err := locks.TryAcquire(ctx, "nightly-report")
//	if errors.Is(err, fencelock.ErrHeld) {
//		return nil // another replica does it
//	}
func (c *Client) TryAcquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error) {
	return c.acquire(ctx, name, false, opts)
}

// Do acquires the lock, runs fn and releases. ctx bounds the wait and the run: fn gets a context that ends when ctx
// ends or, with a *LostError as its cause, before somebody else can hold the lock. fn should stop then; Do waits for
// it.
//
//	err := locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Tx(ctx, lease.Claim("accounts/42"), debit)
//	})
//
// The result is fn's error, joined with ErrLost if the lock was lost meanwhile, or with the release's error. A nil
// result means that fn succeeded and the lock was held until the end. The lock is also released when fn panics. When fn
// has returned, Do returns at most a second after the end of ctx, whatever the network does.
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

// run runs fn until it returns, with a context that ends when ctx or one of the leases does, and releases. It counts as
// a flight: Close ends the leases, and waits for fn. The release's error is joined unless the loss is told already.
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
