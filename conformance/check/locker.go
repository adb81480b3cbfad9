package check

import (
	"context"
	"errors"
	"slices"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Locker records the calls of a fencelock.Locker. It is safe for concurrent use.
type Locker struct {
	r      *Recorder
	client string
	locks  fencelock.Locker
}

// Wrap returns a Locker that records all calls under the name of the client. It does not record leases that are
// acquired directly through l.
func (r *Recorder) Wrap(client string, l fencelock.Locker) *Locker {
	return &Locker{r: r, client: client, locks: l}
}

// Acquire is fencelock.Locker.Acquire.
func (l *Locker) Acquire(ctx context.Context, name string, opts ...fencelock.AcquireOption) (*Held, error) {
	return l.acquire(ctx, OpAcquire, name, l.locks.Acquire, opts)
}

// TryAcquire is fencelock.Locker.TryAcquire.
func (l *Locker) TryAcquire(ctx context.Context, name string, opts ...fencelock.AcquireOption) (*Held, error) {
	return l.acquire(ctx, OpTry, name, l.locks.TryAcquire, opts)
}

func (l *Locker) acquire(
	ctx context.Context, op Op, name string,
	acquire func(context.Context, string, ...fencelock.AcquireOption) (*fencelock.Lease, error),
	opts []fencelock.AcquireOption,
) (*Held, error) {
	call := l.r.Begin(ctx, l.client, op, name)
	lease, err := acquire(ctx, name, opts...)
	if err != nil {
		call.Return(outcome(err), err)
		return nil, err
	}
	return l.r.held(call, lease), nil
}

// outcome returns the outcome of a failed acquire.
func outcome(err error) Outcome {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return Unknown // an abandoned wait may have been granted during its cancellation
	}
	for _, sure := range []error{
		fencelock.ErrHeld, fencelock.ErrUnavailable, fencelock.ErrUnsupported, fencelock.ErrMisconfigured,
		fencelock.ErrDeadlock, fencelock.ErrLimitMismatch, fencelock.ErrInvalidName, fencelock.ErrInvalidTTL,
		fencelock.ErrInvalidOption, fencelock.ErrTier, fencelock.ErrLost,
	} {
		if errors.Is(err, sure) && !errors.Is(err, fencelock.ErrUnknown) {
			return Refused
		}
	}
	return Unknown
}

// Held is a recorded lease. It is safe for concurrent use. It must be released with its own Release.
type Held struct {
	r      *Recorder
	lease  *fencelock.Lease
	hold   *Hold
	unhook func() bool
}

// held records the grant, and later its end. It first records the end of earlier holds of the name in this process:
// the lease determines their end, and not the delay of the goroutine that records it.
func (r *Recorder) held(call *Call, lease *fencelock.Lease) *Held {
	at := r.Now()
	r.settle(call.e.Name, at)
	h := &Held{r: r, lease: lease}
	h.hold = call.granted(h.grant(), at)
	r.mu.Lock()
	r.open[call.e.Name] = append(r.open[call.e.Name], h)
	r.mu.Unlock()
	h.unhook = context.AfterFunc(lease.Context(), func() { h.ended(r.Now()) })
	return h
}

// settle records at as the end of holds of name whose leases have ended.
func (r *Recorder) settle(name string, at backend.Instant) {
	r.mu.Lock()
	open := slices.Clone(r.open[name])
	r.mu.Unlock()
	for _, other := range open {
		if other.lease.Err() != nil {
			other.ended(at)
		}
	}
}

// Lease returns the lease.
func (h *Held) Lease() *fencelock.Lease { return h.lease }

// grant returns the current grant of the lease.
func (h *Held) grant() Grant {
	g := h.lease.Grant()
	return Grant{
		Kind: g.Kind, Permits: g.Permits, Limit: g.Limit, Token: g.Token, Request: g.RequestID,
		SentAt: g.SentAt, TTL: g.TTL, Deadline: h.deadline(),
	}
}

// deadline returns the lease's deadline as an instant. The conversion from a time.Time reads two clocks: deadline
// uses the fastest of several conversions.
func (h *Held) deadline() backend.Instant {
	var best backend.Instant
	shortest := backend.Instant(-1)
	for range 3 {
		begin := h.r.Now()
		deadline := h.r.Instant(h.lease.Deadline())
		if took := h.r.Now() - begin; shortest < 0 || took < shortest {
			best, shortest = deadline, took
		}
	}
	return best
}

// Renewed records the current grant of the lease. Otherwise a history has renewals only from the end of the hold; a
// process that may be killed calls Renewed regularly.
func (h *Held) Renewed() {
	if g := h.grant(); h.lease.Err() == nil {
		h.hold.Renewed(g)
	}
}

// ended records that the lease was lost.
func (h *Held) ended(at backend.Instant) {
	why := "unknown"
	if lost := (*fencelock.LostError)(nil); errors.As(h.lease.Err(), &lost) {
		why = string(lost.Reason)
	}
	h.hold.lost(why, h.grant(), at)
	h.forget()
}

func (h *Held) forget() {
	h.r.mu.Lock()
	defer h.r.mu.Unlock()
	name := h.hold.name
	h.r.open[name] = slices.DeleteFunc(h.r.open[name], func(other *Held) bool { return other == h })
	if len(h.r.open[name]) == 0 {
		delete(h.r.open, name)
	}
}

// Release records the end of the hold's validity and releases the lease.
func (h *Held) Release(ctx context.Context) error {
	if !h.unhook() {
		h.ended(h.r.Now()) // no effect if already recorded
	}
	h.forget()
	call := h.hold.Release(ctx, h.grant())
	err := h.lease.Release(ctx)
	switch {
	case err == nil:
		call.Return(OK, nil)
	case errors.Is(err, fencelock.ErrLost), errors.Is(err, fencelock.ErrNotHeld):
		call.Return(Gone, err)
	default:
		call.Return(Unknown, err)
	}
	return err
}

// Ask inspects a name, and records the holders.
func (r *Recorder) Ask(ctx context.Context, client string, service backend.Inspector,
	name string) (backend.State, error) {
	call := r.Begin(ctx, client, OpAsk, name)
	info, err := service.Look(ctx, name)
	if err != nil {
		call.Return(Unknown, err)
		return info, err
	}
	var tokens []fencing.Token
	for _, h := range info.Holders {
		tokens = append(tokens, h.Token)
	}
	call.Saw(tokens)
	return info, nil
}
