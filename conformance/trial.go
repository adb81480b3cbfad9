package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
)

// trial is the context of a running clause. Its methods may be called from any goroutine, except for methods that end
// the clause (Fatal, and others so documented), which belong to the clause's goroutine.
type trial struct {
	*recorder

	h       *Harness
	desc    backend.Description
	clause  Clause
	ttl     time.Duration // short: clauses wait for its end
	links   []fault.Link
	named   atomic.Int32
	fencing bool // core makes clients of the correctness tier
	calls   calls
	ledger  ledger
	moves   *atomic.Int64 // of the suite
}

// calls are the calls of a clause in flight, so that a report can name a stuck call.
type calls struct {
	mu   sync.Mutex // protects the following field
	open map[*call]struct{}
}

type call struct {
	what  string
	began time.Time // on the clock of the clause
	ctx   context.Context
}

// during records a call until done is called.
func (t *trial) during(ctx context.Context, what, name string) (done func()) {
	t.moves.Add(1)
	c := &call{what: fmt.Sprintf("%s %q", what, name), began: time.Now(), ctx: ctx}
	t.calls.mu.Lock()
	defer t.calls.mu.Unlock()
	if t.calls.open == nil {
		t.calls.open = map[*call]struct{}{}
	}
	t.calls.open[c] = struct{}{}
	return func() {
		t.moves.Add(1)
		t.calls.mu.Lock()
		defer t.calls.mu.Unlock()
		delete(t.calls.open, c)
	}
}

// underWay describes the calls that have not ended. It omits their ages outside the bubble of a simulated clause.
func (t *trial) underWay() string {
	t.calls.mu.Lock()
	defer t.calls.mu.Unlock()
	var all []string
	for c := range t.calls.open {
		s := c.what + " is under way"
		if age := time.Since(c.began).Round(time.Millisecond); age < 24*time.Hour {
			s = fmt.Sprintf("%s has gone on for %v", c.what, age)
		}
		if err := c.ctx.Err(); err != nil {
			s += " and its context has ended"
		}
		all = append(all, s)
	}
	if len(all) == 0 {
		return "no call to a driver is under way"
	}
	slices.Sort(all)
	return strings.Join(all, "; ")
}

// slack bounds an immediate step on a busy machine.
const slack = 3 * time.Second

// ample bounds a call whose duration the clause does not test: the first call of a client connects, on a machine that
// runs many clauses at once.
const ample = 6 * slack

// promptly bounds immediate steps. It is far above a healthy driver's time and far below long.
const promptly = 2 * time.Second

// long returns a TTL that does not end while a clause runs.
func (t *trial) long() time.Duration {
	d := max(60*time.Second, 20*t.ttl)
	if step := t.desc.TTLGranularity; step > 0 {
		d -= d % step
	}
	if t.desc.MaxTTL > 0 {
		d = min(d, t.desc.MaxTTL)
	}
	return d
}

// times returns n short TTLs, or MaxTTL if that is shorter.
func (t *trial) times(n int) time.Duration {
	d := time.Duration(n) * t.ttl
	if t.desc.MaxTTL > 0 {
		d = min(d, t.desc.MaxTTL)
	}
	return d
}

// client returns a new driver.
func (t *trial) client() backend.Driver {
	d := t.note(t.h.New(t), nil)
	t.Cleanup(func() { t.close(d) })
	return d
}

// linked returns a new driver behind a link that the clause can break.
func (t *trial) linked() (backend.Driver, fault.Link) {
	inner, of := t.h.Linked(t)
	link := &notedLink{Link: of}
	d := t.note(inner, link)
	t.links = append(t.links, link)
	t.Cleanup(func() {
		t.heal()
		t.close(d)
	})
	return d, link
}

// noting returns a copy of h whose functions record in the ledger that they may end holds.
func (t *trial) noting(h Harness) *Harness {
	all := func(do func(testing.TB)) func(testing.TB) {
		if do == nil {
			return nil
		}
		return func(tb testing.TB) {
			defer t.ending("", "")()
			do(tb)
		}
	}
	s := &h.Server
	s.Restart, s.Stop, s.Start, s.Pause, s.Resume = all(s.Restart), all(s.Stop), all(s.Start), all(s.Pause), all(s.Resume)
	if wipe := all(s.Wipe); wipe != nil {
		s.Wipe = func(tb testing.TB) {
			wipe(tb)
			t.ledger.forget()
		}
	}
	if ahead := h.Ahead; ahead != nil {
		h.Ahead = func(tb testing.TB, token fencing.Token) {
			defer t.ending("", "")()
			ahead(tb, token)
		}
	}
	if evict := s.Evict; evict != nil {
		s.Evict = func(tb testing.TB, name string) {
			defer t.ending(name, "")()
			evict(tb, name)
		}
	}
	return &h
}

// heal opens every link again, so that no call hangs while the clause cleans up.
func (t *trial) heal() {
	for _, link := range t.links {
		link.Pass()
	}
}

func (t *trial) close(d backend.Driver) {
	ctx, cancel := context.WithTimeout(context.Background(), slack)
	defer cancel()
	_ = d.Close(ctx)
}

func closeWithin(d backend.Driver, bound time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	return d.Close(ctx)
}

// name returns a name that no other clause and no other run uses.
func (t *trial) name() string {
	return fmt.Sprintf("conformance/%s/%s-%d", t.clause.Slug, backend.NewRequestID()[:12], t.named.Add(1))
}

// request returns a fresh request for name with a TTL that outlasts the clause.
func (t *trial) request(name string) backend.Request {
	id := backend.NewRequestID()
	return backend.Request{
		Name: name, Owner: "conformance " + t.clause.ID, RequestID: id, HoldID: backend.HoldID(id), TTL: t.long(),
	}
}

// brief is request with the short TTL.
func (t *trial) brief(name string) backend.Request {
	r := t.request(name)
	r.TTL = t.ttl
	return r
}

// within returns a context that ends after d, or with the clause.
func (t *trial) within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// whileMoving returns a context that ends when moved has not been called for d, or with the clause: work of unknown
// duration is stuck when it makes no progress.
func (t *trial) whileMoving(d time.Duration) (ctx context.Context, moved func()) {
	ctx, cancel := context.WithCancelCause(t.Context())
	timer := time.AfterFunc(d, func() { cancel(fmt.Errorf("no progress for %v", d)) })
	t.Cleanup(func() {
		timer.Stop()
		cancel(nil)
	})
	return ctx, func() { timer.Reset(d) }
}

// try makes one attempt.
func (t *trial) try(d backend.Driver, r backend.Request) (backend.Grant, error) {
	r.Wait = false
	ctx := t.within(ample)
	return d.Acquire(ctx, r)
}

// take makes one attempt that must succeed, or ends the clause.
func (t *trial) take(d backend.Driver, r backend.Request, when string) backend.Grant {
	g, err := t.try(d, r)
	if err != nil {
		t.Fatalf("Acquire %s = %v, want a grant", when, err)
	}
	return g
}

// takeShort is take for a TTL that may end before the answer on a busy machine: it retries.
func (t *trial) takeShort(d backend.Driver, r backend.Request, when string) backend.Grant {
	for ctx := t.within(10 * slack); ; {
		g, err := t.try(d, r)
		if err == nil {
			return g
		}
		if !vague(err) || ctx.Err() != nil {
			t.Fatalf("Acquire %s = %v, want a grant", when, err)
		}
		_ = t.releaseSettled(d, r.Grant())
		r.RequestID = backend.NewRequestID()
	}
}

// release releases g, which must succeed.
func (t *trial) release(d backend.Driver, g backend.Grant, when string) {
	ctx := t.within(ample)
	if err := d.Release(ctx, g); err != nil {
		t.Errorf("Release %s = %v, want nil", when, err)
	}
}

// releaseUnknown releases requests if err is an unknown outcome of their acquire, as the core does.
func (t *trial) releaseUnknown(d backend.Driver, err error, rs ...backend.Request) {
	if !errors.Is(err, backend.ErrUnknown) {
		return
	}
	for _, r := range rs {
		if err := d.Release(t.within(slack), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("release by request after an unknown outcome = %v", err)
		}
	}
}

// renew renews one grant.
func (t *trial) renew(d backend.Driver, g backend.Grant) backend.Renewal {
	return t.renewIn(t.within(2*slack), d, g)
}

func (t *trial) renewIn(ctx context.Context, d backend.Driver, g backend.Grant) backend.Renewal {
	renewals := d.Renew(ctx, []backend.Grant{g})
	if len(renewals) != 1 {
		t.Errorf("Renew of one grant answered %d renewals", len(renewals))
		return backend.Renewal{Err: errors.New("no answer")}
	}
	return renewals[0]
}

// mustBeHeld makes an attempt with another request, which must find name held.
func (t *trial) mustBeHeld(d backend.Driver, name, when string) bool {
	g, err := t.try(d, t.brief(name))
	if errors.Is(err, backend.ErrHeld) {
		return true
	}
	t.Errorf("%s: an attempt by another request = %v, want ErrHeld", when, err)
	if err == nil {
		_ = d.Release(t.within(slack), g)
	}
	return false
}

// mustBeFree makes an attempt that must succeed, and releases the lock.
func (t *trial) mustBeFree(d backend.Driver, name, when string) bool {
	g, err := t.try(d, t.request(name))
	if err != nil {
		t.Errorf("%s: an attempt = %v, want a grant", when, err)
		return false
	}
	t.release(d, g, when)
	return true
}

// opensWithin waits for name for at most d and releases the lock.
func (t *trial) opensWithin(driver backend.Driver, name string, d time.Duration, when string) bool {
	g, ok := t.takenWithin(driver, name, d, when)
	if ok {
		t.release(driver, g, when)
	}
	return ok
}

// takenWithin waits for name for at most d.
func (t *trial) takenWithin(driver backend.Driver, name string, d time.Duration, when string) (backend.Grant, bool) {
	r := t.request(name)
	r.Wait = true
	began := time.Now()
	ctx := t.within(d)
	g, err := driver.Acquire(ctx, r)
	if err != nil {
		t.Errorf("%s: the name did not open within %v: %v", when, d, err)
		return g, false
	}
	t.Logf("%s: the name opened after %v", when, time.Since(began).Round(time.Millisecond))
	return g, true
}

// settled repeats f until the outcome is known.
func (t *trial) settled(f func(ctx context.Context) error) error {
	ctx := t.within(3 * slack)
	for {
		err := f(ctx)
		if !vague(err) || ctx.Err() != nil {
			return err
		}
		pause(ctx, 20*time.Millisecond)
	}
}

// vague reports whether err leaves the state of the lock open.
func vague(err error) bool {
	return errors.Is(err, backend.ErrUnknown) || errors.Is(err, backend.ErrUnavailable) ||
		errors.Is(err, context.DeadlineExceeded)
}

// pause lets time pass: for clauses that test timing.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// now reads the drivers' clock.
func (t *trial) now() backend.Instant { return t.desc.Clock.Now() }

// waiter is an acquire in another goroutine.
type waiter struct {
	done chan struct{}
	// The following fields are valid after done.
	grant backend.Grant
	err   error
	at    backend.Instant // when Acquire returned
}

// wait starts to wait for r. The end of the clause waits for the acquire.
func (t *trial) wait(ctx context.Context, d backend.Driver, r backend.Request) *waiter {
	r.Wait = true
	w := &waiter{done: make(chan struct{})}
	go func() {
		defer close(w.done)
		w.grant, w.err = d.Acquire(ctx, r)
		w.at = t.now()
	}()
	t.Cleanup(func() { <-w.done })
	return w
}

// ended reports whether the acquire returned within d.
func (w *waiter) ended(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-w.done:
		return true
	case <-timer.C:
		return false
	}
}

// got ends the clause unless the waiter is granted the lock within d.
func (t *trial) got(w *waiter, d time.Duration, when string) backend.Grant {
	if !w.ended(d) {
		t.FatalLatef("%s: a waiter did not get the lock within %v", when, d)
	}
	if w.err != nil {
		t.Fatalf("%s: a waiter = %v, want a grant", when, w.err)
	}
	return w.grant
}

// queued waits until n requests wait for name, if the driver shows waiters; otherwise for the time that queueing
// should take.
func (t *trial) queued(d backend.Driver, name string, n int) {
	inspector, ok := backend.As[backend.Inspector](d)
	bound := 400 * time.Millisecond
	if ok {
		bound = slack
	}
	patience := t.within(bound)
	for patience.Err() == nil {
		if ok {
			if info, err := inspector.Look(t.within(slack), name); err == nil && info.Waiters >= n {
				return
			}
		}
		pause(patience, 10*time.Millisecond)
	}
	if ok {
		t.behind.Store(true)
	}
}
