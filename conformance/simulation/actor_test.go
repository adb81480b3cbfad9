package simulation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// actor is one caller that takes locks through a node's client.
type actor struct {
	dice
	w     *world
	node  *node
	names []name // the names that it uses: two actors of one node share no name
}

// run takes locks until the end of the world.
func (a *actor) run() {
	for a.w.rest(a.about(a.w.think)) {
		a.node.awake()
		a.turn()
	}
}

// turn is one piece of work.
func (a *actor) turn() {
	n := a.names[a.IntN(len(a.names))]
	var opts []fencelock.AcquireOption
	if a.one(3) {
		opts = append(opts, fencelock.TTL(a.between(a.w.ttl*3/4, a.w.ttl*5/4)))
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.scale(50*time.Millisecond, 6*a.w.ttl))
	defer cancel()
	do := a.IntN(14)
	if a.w.checked {
		do = 6 + a.IntN(8)
	}
	switch do {
	case 0:
		a.several(ctx, opts)
	case 1:
		a.byHand(ctx, n, opts)
	case 2:
		a.repeated(ctx, n, opts)
	case 3:
		a.nested(ctx, n, opts)
	case 4:
		a.campaign(n, opts)
	case 5:
		minimum := a.scale(time.Millisecond, a.w.ttl)
		a.plain(ctx, n, append(opts, fencelock.HoldAtLeast(minimum)), true)
	case 6, 7:
		a.plain(ctx, n, append(opts, fencelock.WaitAtMost(a.scale(10*time.Millisecond, 2*a.w.ttl))), true)
	case 8, 9:
		a.plain(ctx, n, opts, false)
	default:
		a.plain(ctx, n, opts, true)
	}
}

// plain takes a lock, keeps it for a while and releases it.
func (a *actor) plain(ctx context.Context, n name, opts []fencelock.AcquireOption, wait bool) {
	if h := a.take(ctx, n, opts, wait); h != nil {
		a.keep(h, a.work())
		a.release(h)
	}
}

// work draws the time for which a lock is kept.
func (a *actor) work() time.Duration { return a.scale(10*time.Millisecond, 4*a.w.ttl) }

// take acquires n, or returns nil.
func (a *actor) take(ctx context.Context, n name, opts []fencelock.AcquireOption, wait bool) *hold {
	kind, limit, permits := n.draw(a.dice)
	opts = kindOption(opts, kind, permits, limit)
	h := a.hold(n)
	h.kind, h.limit, h.permits = kind, limit, permits
	lease, err := a.acquire(ctx, h, opts, wait)
	a.bounded(ctx, h.call, "acquire", n.text)
	if err != nil {
		a.failed("acquire", n.text, err, acquireMay)
		return nil
	}
	a.begin(h, lease)
	return h
}

// acquire calls the client, through the recorder if there is one.
func (a *actor) acquire(
	ctx context.Context, h *hold, opts []fencelock.AcquireOption, wait bool,
) (*fencelock.Lease, error) {
	c := a.node.current()
	if a.w.history == nil {
		if wait {
			return c.Acquire(ctx, h.name, opts...)
		}
		return c.TryAcquire(ctx, h.name, opts...)
	}
	locks := a.w.history.Wrap(fmt.Sprint("client-", a.node.id), c)
	acquire := locks.Acquire
	if !wait {
		acquire = locks.TryAcquire
	}
	held, err := acquire(ctx, h.name, opts...)
	if err != nil {
		return nil, err
	}
	h.checked = held
	return held.Lease(), nil
}

func kindOption(opts []fencelock.AcquireOption, kind backend.Kind, permits, limit int) []fencelock.AcquireOption {
	switch kind {
	case backend.KindShared:
		return append(opts, fencelock.Shared())
	case backend.KindPermits:
		return append(opts, fencelock.Permits(permits, limit))
	}
	return opts
}

// hold returns the record of a hold that is about to be acquired.
func (a *actor) hold(n name) *hold { return &hold{node: a.node.id, name: n.text, call: a.w.now()} }

func (a *actor) begin(h *hold, lease *fencelock.Lease) {
	h.lease, h.token = lease, lease.Token()
	a.w.rec.granted(h)
	a.w.rec.note(event{who: a.node.id, what: "acquired", name: h.name, token: h.token, answer: h.kind.String()})
	under := lease.Context()
	context.AfterFunc(under, func() {
		if lost := (*fencelock.LostError)(nil); errors.As(context.Cause(under), &lost) {
			a.w.rec.toldOf(h, lost.Reason)
		}
	})
}

// keep works under a lock until it is done or the lock is lost, and writes what the lock protects.
func (a *actor) keep(h *hold, d time.Duration) {
	end := time.NewTimer(d)
	defer end.Stop()
	a.write(h)
	select {
	case <-end.C:
	case <-h.lease.Context().Done():
		a.settle(h)
	}
	a.node.awake()
	a.write(h)
}

// settle delays the handling of an expired lease to an instant that does not depend on random numbers of the core.
func (a *actor) settle(h *hold) {
	if lost := (*fencelock.LostError)(nil); errors.As(h.lease.Err(), &lost) && lost.Reason == fencelock.ReasonExpired {
		time.Sleep(a.w.expired(h) - a.w.now())
	}
}

// write writes what the lock protects. It must be refused only if the hold is lost and a later holder has written.
func (a *actor) write(h *hold) {
	if h.kind != backend.KindExclusive {
		return
	}
	err := a.w.register.Check(context.Background(), fencing.Claim{Resource: h.name, Token: h.token})
	switch own := h.lease.Err(); {
	case err == nil:
	case !errors.Is(err, fencing.ErrStale):
		a.w.rec.violation("a write under %v: %v", h, err)
	case own == nil && !a.w.rec.wasTaken(h.token):
		a.w.rec.violation("%v holds, and its write was refused: %v", h, err)
	default:
		a.w.rec.stale()
	}
}

// releaseGrace is the maximum time for which a release may continue after its context, besides the slack of all calls.
const releaseGrace = 600 * time.Millisecond

// release releases a lock, with a context that may have ended.
func (a *actor) release(h *hold) {
	ctx, cancel := context.WithTimeout(context.Background(), a.scale(20*time.Millisecond, 2*a.w.ttl))
	defer cancel()
	end := a.w.at(deadlineOf(ctx))
	if a.one(10) {
		cancel()
		end = a.w.now()
	}
	a.w.rec.ended(h)
	a.w.rec.note(event{who: a.node.id, what: "releases", name: h.name, token: h.token})
	release := h.lease.Release
	if h.checked != nil {
		release = h.checked.Release
	}
	err := release(ctx)
	a.by(end+releaseGrace, "release", h.name)
	if err != nil {
		a.failed("release", h.name, err, releaseMay)
	}
}

// byHand prolongs a lease that is not renewed automatically.
func (a *actor) byHand(ctx context.Context, n name, opts []fencelock.AcquireOption) {
	h := a.take(ctx, n, append(opts, fencelock.NoRenew()), true)
	if h == nil {
		return
	}
	a.node.byHand(h.token)
	for range a.IntN(6) {
		a.keep(h, a.scale(a.w.ttl/10, a.w.ttl))
		ctx, cancel := context.WithTimeout(context.Background(), a.scale(20*time.Millisecond, a.w.ttl))
		called := a.w.now()
		err := h.lease.Extend(ctx, a.between(a.w.ttl/2, a.w.ttl*2))
		a.bounded(ctx, called, "extend", n.text)
		cancel()
		if err != nil {
			a.failed("extend", n.text, err, extendMay)
		} else {
			a.w.rec.note(event{who: a.node.id, what: "extended", name: n.text, token: h.token})
		}
	}
	a.release(h)
}

// repeated acquires again with the same request id, as after a lost answer: it gets the same hold, or a new hold if
// that has ended.
func (a *actor) repeated(ctx context.Context, n name, opts []fencelock.AcquireOption) {
	id := fencelock.RequestID(fmt.Sprintf("simulated-request-%d-%d-%d", a.node.id, a.names[0].index, a.w.now()))
	kind, limit, permits := n.draw(a.dice)
	opts = append(opts, id)
	opts = kindOption(opts, kind, permits, limit)
	h := a.hold(n)
	var lease *fencelock.Lease
	for range 3 {
		var err error
		called := a.w.now()
		lease, err = a.node.current().Acquire(ctx, n.text, opts...)
		a.bounded(ctx, called, "acquire", n.text)
		if err == nil {
			break
		}
		a.failed("acquire", n.text, err, acquireMay)
		if !a.w.rest(a.scale(time.Millisecond, a.w.ttl/4)) {
			return
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.Background(), a.scale(50*time.Millisecond, 3*a.w.ttl))
		defer cancel()
	}
	if lease == nil {
		return
	}
	h.kind, h.limit, h.permits = kind, limit, permits
	a.begin(h, lease)
	a.keep(h, a.work())
	a.release(h)
}

// nested takes a lock again under its own lease, and another one beside it.
func (a *actor) nested(ctx context.Context, n name, opts []fencelock.AcquireOption) {
	h := a.take(ctx, n, opts, true)
	if h == nil {
		return
	}
	under, cancel := context.WithTimeout(h.lease.Context(), a.scale(50*time.Millisecond, 2*a.w.ttl))
	defer cancel()
	if h.kind == backend.KindExclusive {
		inner, err := a.node.current().Acquire(under, n.text, fencelock.Reentrant())
		switch {
		case err != nil && h.lease.Err() == nil && !errors.Is(err, fencelock.ErrClosed) &&
			a.w.now() < a.w.at(deadlineOf(under)):
			// A client that was replaced meanwhile does not know the lease, and waits.
			a.failed("reenter", n.text, err, acquireMay)
		case err == nil && inner.Token() == h.token:
			a.keep(h, a.work()/4)
			if err := inner.Release(context.Background()); err != nil {
				a.failed("release", n.text, err, releaseMay)
			}
		case err == nil:
			// The client had been replaced, and this is its own hold.
			again := a.hold(n)
			again.call = h.begin
			a.begin(again, inner)
			a.release(again)
		}
	}
	if other := a.names[a.IntN(len(a.names))]; other.text != n.text && under.Err() == nil {
		if second := a.take(under, other, nil, true); second != nil {
			a.keep(second, a.work()/4)
			a.release(second)
		}
	}
	a.keep(h, a.work()/4)
	a.release(h)
}

// several takes two locks in one step.
func (a *actor) several(ctx context.Context, opts []fencelock.AcquireOption) {
	var names []string
	var holds []*hold
	for _, n := range a.names {
		if n.limit == 0 && len(names) < 2 {
			names = append(names, n.text)
			holds = append(holds, a.hold(n))
		}
	}
	if len(names) == 0 {
		return
	}
	called := a.w.now()
	leases, err := a.node.current().AcquireAll(ctx, names, opts...)
	a.bounded(ctx, called, "acquire-all", names[0])
	if err != nil {
		a.failed("acquire-all", names[0], err, acquireMay)
		return
	}
	for i, h := range holds {
		a.begin(h, leases[i])
	}
	a.keep(holds[0], a.work())
	for _, h := range holds {
		a.release(h)
	}
}

// campaign takes part in an election.
func (a *actor) campaign(n name, opts []fencelock.AcquireOption) {
	if n.limit != 0 || n.shared || len(a.node.w.nodes[a.node.id].actors) > 1 {
		return
	}
	a.node.mu.Lock()
	a.node.stands, a.node.stoodLast = true, a.w.now()
	a.node.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), a.scale(a.w.ttl, 10*a.w.ttl))
	defer cancel()
	called := a.w.now()
	terms := 0
	err := a.node.current().Lead(ctx, n.text, func(ctx context.Context, lease *fencelock.Lease) error {
		h := a.hold(n)
		h.call = called
		a.begin(h, lease)
		called = a.w.now()
		work, done := context.WithTimeout(ctx, a.work())
		defer done()
		a.write(h)
		<-work.Done()
		a.settle(h)
		a.node.awake()
		a.write(h)
		a.w.rec.ended(h) // Lead releases it now
		a.w.rec.note(event{who: a.node.id, what: "term ends", name: h.name, token: h.token})
		a.node.stood()
		if terms++; terms == 3 {
			return nil
		}
		return fencelock.ErrResign
	}, opts...)
	a.node.mu.Lock()
	a.node.stands = false
	a.node.mu.Unlock()
	if errors.Is(err, fencelock.ErrClosed) {
		// The core may have noticed in an election pause, which has a random length.
		a.node.mu.Lock()
		closed := a.node.closed
		a.node.mu.Unlock()
		time.Sleep(max(tick(closed+1600*time.Millisecond)-a.w.now(), 0))
	}
	if err != nil {
		a.failed("lead", n.text, err, append(append(acquireMay, releaseMay...), fencelock.ErrResign))
	}
}

// bounded checks that a call returned when its context ended, or when the wait ended earlier for another reason.
func (a *actor) bounded(ctx context.Context, called time.Duration, call, name string) {
	a.by(max(a.w.at(deadlineOf(ctx)), called), call, name)
}

// by checks that a call which had to return by end has done so.
func (a *actor) by(end time.Duration, call, name string) {
	if now := a.w.now(); now > a.node.runsBy(end) {
		a.w.rec.violation("%s of %s by client %d returned %v after the end of its context",
			call, name, a.node.id, now-end)
	}
}

var (
	acquireMay = []error{
		fencelock.ErrHeld, fencelock.ErrUnavailable, fencelock.ErrUnknown, fencelock.ErrClosed, fencelock.ErrDeadlock,
		fencelock.ErrLost, // the answer came after the end of the grant
		context.DeadlineExceeded, context.Canceled,
	}
	releaseMay = []error{
		fencelock.ErrLost, fencelock.ErrNotHeld, fencelock.ErrUnavailable, fencelock.ErrUnknown, fencelock.ErrClosed,
		context.DeadlineExceeded, context.Canceled,
	}
	extendMay = releaseMay
)

// failed notes an error, and reports a violation if such a call must not return it.
func (a *actor) failed(call, name string, err error, may []error) {
	a.w.rec.note(event{who: a.node.id, what: call, name: name, answer: class(err)})
	for _, m := range may {
		if errors.Is(err, m) {
			return
		}
	}
	a.w.rec.violation("%s of %s by client %d: %v", call, name, a.node.id, err)
}

// class returns the class of an error on which callers branch.
func class(err error) string {
	s := ""
	for _, k := range []struct {
		err  error
		text string
	}{
		{fencelock.ErrHeld, "held"}, {fencelock.ErrLost, "lost"}, {fencelock.ErrNotHeld, "not-held"},
		{fencelock.ErrUnavailable, "unavailable"}, {fencelock.ErrUnknown, "unknown"}, {fencelock.ErrClosed, "closed"},
		{fencelock.ErrDeadlock, "deadlock"}, {context.DeadlineExceeded, "deadline"}, {context.Canceled, "canceled"},
	} {
		if errors.Is(err, k.err) {
			s += " " + k.text
		}
	}
	switch {
	case err == nil:
		return "ok"
	case s == "":
		return " " + err.Error()
	}
	return s
}

func deadlineOf(ctx context.Context) time.Time {
	end, _ := ctx.Deadline()
	return end
}
