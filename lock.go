package fencelock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Locker is what code that needs a lock should accept. *Client implements it.
type Locker interface {
	// Acquire waits until it holds the lock. The context bounds the wait, not the hold: the lease outlives it and is
	// renewed until Release, loss or Close. When the context ends first, its error is in the chain and nothing of the
	// wait is left behind; Acquire returns within milliseconds of that, whatever the network does.
	Acquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error)

	// TryAcquire makes one attempt. If somebody else holds the lock, or waits for it on a fair driver, the error is
	// ErrHeld.
	TryAcquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error)

	// Do acquires the lock, runs fn and releases. The context bounds the wait and the run: fn gets a context that ends
	// when ctx ends or, with a *LostError as its cause, before somebody else can hold the lock. fn should stop then;
	// Do waits for it. The result is fn's error, joined with ErrLost if the lock was lost meanwhile, or with the
	// release's error. The lock is also released when fn panics.
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

// ForCorrectness returns a client of the correctness tier. A driver that does not promise fencing does not compile here;
// one whose present configuration cannot keep the promise is refused with ErrTier. It does no I/O.
func ForCorrectness(driver backend.FencingDriver, o *Options) (*Client, error) {
	if driver == nil {
		return Open(nil, Correctness, o)
	}
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

// Open returns a client of a tier that is known only at run time. It does no I/O. A driver that cannot serve the tier is
// refused with ErrTier, options that the driver does not support with ErrUnsupported.
func Open(driver backend.Driver, tier Tier, o *Options) (*Client, error) {
	if driver == nil {
		return nil, fmt.Errorf("fencelock: open: %w", invalidOption("driver", "nil", "it is nil"))
	}
	if tier != Efficiency && tier != Correctness {
		return nil, fmt.Errorf("fencelock: open: %w",
			invalidOption("tier", tier.String(), "want fencelock.Efficiency or fencelock.Correctness"))
	}
	if err := checkTier(driver, tier); err != nil {
		return nil, fmt.Errorf("fencelock: open: %w", err)
	}
	set, err := o.resolve(driver.Describe())
	if err != nil {
		return nil, fmt.Errorf("fencelock: open: %w", err)
	}
	c := &Client{driver: driver, tier: tier, set: set, closed: make(chan struct{})}
	c.heart.init(c)
	c.cleaner.init(driver)
	return c, nil
}

// checkTier looks for the promise on the driver itself and never through Unwrap: a wrapper must promise again.
func checkTier(driver backend.Driver, tier Tier) error {
	if tier != Correctness {
		return nil
	}
	d := driver.Describe()
	if _, promises := driver.(backend.FencingDriver); promises && d.Capabilities.Has(backend.CapFencing) {
		return nil
	}
	lacks := "it issues no fencing tokens"
	if d.NoFencing != "" {
		lacks += ": " + d.NoFencing
	}
	return &TierError{Driver: d.Name, Tier: tier, Lacks: lacks}
}

// Client takes locks through one driver, for one tier. It is safe for concurrent use. One client per process and service
// is enough: all its leases are renewed together.
type Client struct {
	driver  backend.Driver
	tier    Tier
	set     settings
	heart   heart   // renews leases and declares them lost
	cleaner cleaner // resolves ambiguous outcomes in the background

	closed chan struct{} // closed when Close is done

	mu      sync.Mutex // protects the following fields
	calls   calls
	closing bool
	idle    chan struct{} // made by Close if calls are in flight; closed when none is left
}

// call is an acquire in flight, in the list of all of its client, so that Close can end it.
type call struct {
	cancel     context.CancelCauseFunc
	prev, next *call
}

// calls is the head of that list.
type calls struct{ first *call }

func (l *calls) push(e *call) {
	if e.next = l.first; e.next != nil {
		e.next.prev = e
	}
	l.first = e
}

func (l *calls) remove(e *call) {
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		l.first = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	}
}

var _ Locker = (*Client)(nil)

// Describe returns what the driver says about itself in its present configuration: its bounds of TTLs, its capabilities,
// its token space.
func (c *Client) Describe() backend.Description { return c.driver.Describe() }

// Acquire implements Locker.
func (c *Client) Acquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error) {
	return c.acquire(ctx, name, true, opts)
}

// TryAcquire implements Locker.
func (c *Client) TryAcquire(ctx context.Context, name string, opts ...AcquireOption) (*Lease, error) {
	return c.acquire(ctx, name, false, opts)
}

// errWaitedEnough is the cause of a context that WaitAtMost ended.
var errWaitedEnough = errors.New("waited as long as WaitAtMost allows")

func (c *Client) acquire(ctx context.Context, name string, wait bool, opts []AcquireOption) (*Lease, error) {
	r, o, err := c.request(name, wait, opts)
	if err != nil {
		return nil, callError("acquire", name, err)
	}
	if err := endOf(ctx); err != nil {
		return nil, callError("acquire", name, err) // nothing was sent, so nothing is left behind
	}
	switch inner, err := c.under(ctx, name, &r, &o); {
	case err != nil:
		return nil, callError("acquire", name, err)
	case inner != nil:
		return inner, nil
	}
	lease := newLease(ctx, c, name, !o.noRenew)
	bounded, done, err := c.begin(ctx, &lease.call, o.waitAtMost)
	if err != nil {
		return nil, callError("acquire", name, err)
	}
	defer done()

	began := c.observedNow()
	lease, err = c.acquireLease(bounded, lease, r)
	if err != nil {
		err = c.explain(bounded, name, r.Name, o.waitAtMost, err)
	}
	c.observeAcquire(name, began, lease, err)
	if err != nil {
		return nil, callError("acquire", name, err)
	}
	return lease, nil
}

// endOf is ctx.Err() with its cause, such as the loss of the lease under which a call is made.
func endOf(ctx context.Context) error {
	err := ctx.Err()
	if cause := context.Cause(ctx); err != nil && !errors.Is(cause, err) {
		return fmt.Errorf("%w: %w", err, cause)
	}
	return err
}

// begin counts a call in, or refuses it after Close. The context that it returns ends with the call's own, with Close and
// after waitAtMost, if that is not zero. done follows.
func (c *Client) begin(ctx context.Context, this *call, waitAtMost time.Duration) (
	bounded context.Context, done func(), err error,
) {
	bounded, cancel := context.WithCancelCause(ctx)
	this.cancel = cancel
	if err := c.beginCall(this); err != nil {
		cancel(nil)
		return nil, nil, err
	}
	stop := context.CancelFunc(func() {})
	if waitAtMost > 0 {
		bounded, stop = context.WithTimeoutCause(bounded, waitAtMost, errWaitedEnough)
	}
	return bounded, func() {
		stop()
		c.endCall(this)
		cancel(nil)
	}, nil
}

// acquireLease asks the driver until it has a grant that is still of use, and returns lease or, after a grant that was
// of no use, another like it.
func (c *Client) acquireLease(bounded context.Context, lease *Lease, r backend.Request) (*Lease, error) {
	if !r.Fresh {
		if err := c.cleaner.claim(bounded, r.Name, r.RequestID); err != nil {
			return nil, err
		}
	}
	for ; ; lease = newLease(lease.values, c, lease.name, lease.renew) {
		c.bind(lease, &r)
		g, err := c.driver.Acquire(bounded, r)
		if err != nil {
			if ambiguous(err) {
				c.cleaner.add(r.Grant(), maybeInFlight)
			}
			return nil, err
		}
		if err := c.fenced(&r, &g); err != nil {
			c.cleaner.add(r.Grant(), granted) // by request: a grant without a token may lack its mark too
			return nil, err
		}
		err = c.heart.add(lease, g)
		if err == nil {
			return lease, nil
		}
		// The process was paused for so long that the grant has ended, or the client was closed meanwhile.
		if again := errors.Is(err, ErrLost) && r.Wait && bounded.Err() == nil; !again {
			c.cleaner.add(g, granted)
			if ended := endOf(bounded); ended != nil {
				err = fmt.Errorf("%w: %w", ended, err)
			}
			return nil, err
		}
		if r.Fresh {
			c.undo(bounded, g)
			r.RequestID = backend.NewRequestID()
		}
	}
}

// undo gives back what a call was granted in vain, and waits for that as long as ctx allows: the next request of the
// same line of work must not meet it, and be told that it waits for itself.
func (c *Client) undo(ctx context.Context, grants ...backend.Grant) {
	jobs := make([]*cleanJob, len(grants))
	for i, g := range grants {
		jobs[i] = c.cleaner.add(g, granted)
	}
	for _, job := range jobs {
		select {
		case <-job.done:
		case <-ctx.Done():
			return
		}
	}
}

// bind makes the request one for lease.
func (c *Client) bind(lease *Lease, r *backend.Request) {
	lease.agent = r.Agent
	caps := c.driver.Describe().Capabilities
	if caps.Has(backend.CapPushLoss) {
		r.Lost = lease.pushedLoss
	}
	if !caps.Has(backend.CapDeadlock) {
		r.Agent = ""
	}
}

// fenced refuses a grant of the correctness tier whose token does not say what the hold is.
func (c *Client) fenced(r *backend.Request, g *backend.Grant) error {
	if c.tier != Correctness || g.Token.Valid() && g.Token.Exclusive() == (r.Kind == backend.KindExclusive) {
		return nil
	}
	d := c.driver.Describe()
	lacks := "it granted without a fencing token " + d.NoFencing
	if g.Token.Valid() {
		lacks = fmt.Sprintf("it granted a hold of kind %v with the token %v", r.Kind, g.Token)
	}
	return &TierError{Driver: d.Name, Tier: c.tier, Lacks: lacks}
}

// ambiguous reports whether a failed acquire may have left something in the service: if the driver says so, and if it
// gave an answer that is none of the contract's.
func ambiguous(err error) bool {
	if errors.Is(err, ErrUnknown) {
		return true
	}
	for _, definite := range []error{
		ErrHeld, ErrUnavailable, ErrUnsupported, ErrMisconfigured, ErrDeadlock, ErrLimitMismatch, ErrInvalidName,
		ErrInvalidTTL, ErrInvalidOption, ErrClosed, context.Canceled, context.DeadlineExceeded,
	} {
		if errors.Is(err, definite) {
			return false
		}
	}
	return true
}

// explain puts the reason for which bounded ended in place of its bare error: the caller's context is not what ended.
func (c *Client) explain(bounded context.Context, name, full string, waitAtMost time.Duration, err error) error {
	switch cause := context.Cause(bounded); {
	case errors.Is(cause, ErrClosed) && !errors.Is(err, ErrHeld):
		return ErrClosed
	case errors.Is(cause, errWaitedEnough) && !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrUnknown):
		return fmt.Errorf("%w (%v): %w", cause, waitAtMost, c.heldBy(bounded, name, full))
	}
	return err
}

// heldBy asks for the holder of a name that was waited for in vain, where the driver can tell at once.
func (c *Client) heldBy(ctx context.Context, name, full string) *HeldError {
	held := &HeldError{Name: name}
	inspector, ok := backend.As[backend.Inspector](c.driver)
	if !ok || !c.driver.Describe().Capabilities.Has(backend.CapInspect) {
		return held
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lateGrace)
	defer cancel()
	if info, err := inspector.Holder(ctx, full); err == nil && len(info.Holders) > 0 {
		held.Holder, held.RetryAfter = info.Holders[0].Owner, info.Holders[0].ExpiresIn
	}
	return held
}

// observedNow reads the clock if there is an observer to tell; reading costs as much as the rest of the core.
func (c *Client) observedNow() backend.Instant {
	if c.set.Observer == nil {
		return 0
	}
	return c.set.Clock.Now()
}

func (c *Client) observeAcquire(name string, began backend.Instant, lease *Lease, err error) {
	if c.set.Observer == nil {
		return
	}
	e := Event{Type: EventAcquired, Name: name, Owner: c.set.Owner, Wait: c.observedNow().Sub(began), Err: err}
	switch {
	case err == nil:
		e.Token, e.Contended = lease.Token(), lease.grant.Queued
	case errors.Is(err, ErrHeld):
		e.Type, e.Contended = EventContended, true
	default:
		e.Type = EventFailed
	}
	c.set.Observer.Observe(e)
}

// Do implements Locker.
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
	return run(ctx, lease, func(ctx context.Context) error { return fn(ctx, lease) })
}

// held is a lease, or several.
type held interface {
	Context() context.Context
	Release(ctx context.Context) error
}

// run runs fn until it returns, with a context that ends when ctx or the lease does, and releases.
func run(ctx context.Context, lease held, fn func(context.Context) error) (err error) {
	defer func() { // also on a panic or runtime.Goexit in fn
		released := lease.Release(context.WithoutCancel(ctx))
		if released != nil && !errors.Is(err, ErrLost) {
			err = errors.Join(err, released)
		}
	}()
	under := lease.Context()
	running, cancel := context.WithCancelCause(context.WithValue(ctx, leaseKey{}, under.Value(leaseKey{})))
	defer cancel(nil)
	defer context.AfterFunc(under, func() { cancel(context.Cause(under)) })()
	return fn(running)
}

// beginCall counts a call in, or refuses it after Close.
func (c *Client) beginCall(this *call) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return ErrClosed
	}
	c.calls.push(this)
	return nil
}

func (c *Client) endCall(this *call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls.remove(this)
	if c.idle != nil && c.calls.first == nil {
		close(c.idle)
	}
}

// Close ends waiting acquires with ErrClosed, ends every lease with ReasonClosed and releases it, finishes the clean-up
// of ambiguous outcomes, and closes the driver. ctx bounds all of it; what could not be released by then ends with its
// TTL, and the error says so. Work that still runs under a lease should be stopped before. Calls after Close answer
// ErrClosed. A repeated Close waits for the first.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	if c.closing {
		c.mu.Unlock()
		select {
		case <-c.closed:
			return nil
		case <-ctx.Done():
			return callError("close", "", ctx.Err())
		}
	}
	defer close(c.closed)
	c.closing = true
	idle := make(chan struct{})
	if c.calls.first == nil {
		close(idle)
	} else {
		c.idle = idle
	}
	for call := c.calls.first; call != nil; call = call.next {
		call.cancel(ErrClosed)
	}
	c.mu.Unlock()
	select {
	case <-idle: // soon: drivers return within their context
	case <-ctx.Done():
	}

	for _, lease := range c.heart.close() {
		c.cleaner.add(lease.grant, granted)
	}
	if err := errors.Join(c.cleaner.close(ctx), c.driver.Close(ctx)); err != nil {
		return callError("close", "", err)
	}
	return nil
}
