package builtin

// Acquire and AcquireAll. Both are one way: a set of names is acquired as one name is, by one attempt of one session.
//
// 	acquire ─► sessionFor ─► session.acquire ─► begin ─► attempt ─► a grant, or an error
// 	   ▲                        │ conflict: takeOver, and begin again
// 	   └── the session ended ◄──┘
//
// An attempt has its own file, attempt.go; what happens when its caller goes, is in leave.go.

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
)

// Acquire takes a lock, with a token that is higher than all that the service ever issued. With Wait the request stands
// in the name's queue until it is granted or ctx ends, and survives changes of leader. The same RequestID again gets
// the same hold. Errors wrap backend.ErrHeld, ErrUnavailable (no leader, nothing done; a LimitError says which limit is
// reached), ErrUnknown (what the request may have taken could not be given back), DeadlockError, or ctx's error.
//
// The validity of the grant counts from Grant.SentAt. A TTL outside the bounds that Describe tells is
// backend.ErrInvalidTTL before anything is sent. ErrLimitMismatch says that the name is in use with another kind, limit
// or hierarchy; ErrHistoryLost, that the cluster has forgotten what it acknowledged, and that this driver is of no use
// any more; ErrClosed, that Close was called.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	grants, err := d.AcquireAll(ctx, []backend.Request{r})
	if err != nil {
		return backend.Grant{}, err
	}
	return grants[0], nil
}

// AcquireAll takes all names in one step or none, for any set of distinct names that the server takes in one step: 64,
// unless it is told otherwise. One log entry grants them all. A waiter has one place in all of their queues: it holds
// none of them before it can have all, and later requests wait behind it. More names, or more than 256 KiB of names and
// metadata, are backend.ErrUnsupported.
//
// An error is about the set; the *backend.CallError names its first name, and a *backend.HeldError the one that is
// held.
//
// Requests agree in TTL, Wait and Under. A set that is sent again is known by its request ids:
//
//	both := []backend.Request{from, to} // of one transfer
//	grants, err := d.AcquireAll(ctx, both)
//	if errors.Is(err, backend.ErrUnknown) {
//		grants, err = d.AcquireAll(ctx, both) // the same holds, if they were granted
//	}
func (d *Driver) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	name := ""
	if len(rs) > 0 {
		name = rs[0].Name
	}
	grants, err := d.acquire(ctx, rs)
	return grants, d.callError("acquire", name, err)
}

// acquire takes all of rs in one step, in one session after the other: a session may end while its waiters wait, and
// they take a place at the end of the queue in the next one. A request that had a place does not give up because the
// service is away.
//
//	granted                            returned
//	the session ended                  again in another session, at the end of the queue
//	errAgain                           again in the same session, with another sequence
//	no session could be opened         again if it had a place in a queue, else returned
//	anything else                      returned
//
// It begins again without a bound of its own: each round needs something that ended what the one before had.
func (d *Driver) acquire(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	if err := d.begin(ctx); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	if err := kit.ValidateSet(d.Describe(), rs); err != nil {
		return nil, err
	}
	queued := false // it had a place in a queue: from then on a service that is away is no reason to give up
	for {
		s, err := d.sessionFor(ctx, rs[0].TTL)
		if err != nil {
			if !queued || !errors.Is(err, backend.ErrUnavailable) {
				return nil, err
			}
			if end := d.pause(ctx, firstRetry); end != nil {
				return nil, fmt.Errorf("%w: %w", end, err)
			}
			continue
		}
		grants, err := s.acquire(ctx, rs, &queued)
		s.Leave(1)
		if !errors.Is(err, errSessionEnded) && !errors.Is(err, errAgain) {
			return grants, err
		}
		// A new session, or a new sequence; without a rush, in case that ends at once too.
		if err := d.pause(ctx, time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// mostConflicts is how often an acquire takes over what others have of its request ids. If it is taken back more often,
// another client is doing the same.
const mostConflicts = 3

// acquire makes one attempt, and another one if it has to take over what others have of the requests.
//
// A conflict means that another session has something of the requests, by their ids: one with another TTL of this
// driver, or one of another process that acts for the same client; or that only part of a set is held. Nothing of the
// acquire was done then. If it stays one, somebody waits with the request id for another set of names, or insists on
// the same: that is backend.ErrInvalidOption.
func (s *session) acquire(ctx context.Context, rs []backend.Request, queued *bool) ([]backend.Grant, error) {
	for conflicts := 0; ; conflicts++ {
		grants, err := s.attempt(ctx, s.begin(rs, *queued, conflicts > 0), rs, queued)
		if !errors.Is(err, errConflict) {
			return grants, err
		}
		if conflicts == mostConflicts {
			return nil, kit.InvalidOption("request id", strconv.Quote(rs[0].RequestID),
				"it is in use, together with other names or by another client")
		}
		if err := s.takeOver(ctx, rs); err != nil {
			return nil, err
		}
	}
}

// attempt waits until a is decided, or gives it up, and makes grants of what it got.
//
// A grant of which half the TTL is over when it arrives is proved once more first: its holder could do little with the
// rest, and the core would give it back.
//
// *queued is set if the attempt had a place in a queue, and never reset. It waits for nothing but a, the end of ctx and
// Close; that the server answers at all is the connection's concern.
func (s *session) attempt(
	ctx context.Context, a *attempt, rs []backend.Request, queued *bool,
) ([]backend.Grant, error) {
	d := s.d
	var err error
	select {
	case <-a.done:
		*queued = *queued || a.queued
	case <-ctx.Done():
		err = s.giveUp(a, ctx.Err())
	case <-d.ctx.Done():
		err = s.giveUp(a, backend.ErrClosed)
	}
	if err == nil {
		err = a.err
	}
	if err != nil {
		return nil, err
	}
	sent := a.sentAt
	if d.clock.Now().Sub(sent) > s.ttl/2 {
		// Much of what was proved has passed: half of it is to be ahead.
		if err := s.prove(ctx); err != nil {
			return nil, s.giveBackUnproved(a, err)
		}
		sent = s.provedAt()
	}
	grants := make([]backend.Grant, len(rs))
	for i := range rs {
		g := d.grantOf(&rs[i], a.grants[i])
		g.TTL, g.Queued, g.SentAt = s.ttl, a.queued, sent
		if rs[i].MinHold > 0 {
			g.MinHoldUntil = a.before.Add(rs[i].MinHold)
		}
		grants[i] = g
	}
	return grants, nil
}

// grantOf is the grant for r, without its time. A server that is not durable has no tokens that fence.
func (d *Driver) grantOf(r *backend.Request, granted *lockpb.Grant) backend.Grant {
	g := r.Grant()
	g.Incarnation = strconv.FormatUint(granted.Token, 10)
	if d.fences() {
		g.Token = fencing.Token(granted.Token)
	}
	return g
}

// giveBackUnproved gives back holds of which it could not be shown in time that they live. The error is
// errSessionEnded, which has the caller begin again, or backend.ErrUnknown, since the release may fail.
func (s *session) giveBackUnproved(a *attempt, err error) error {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range a.wishes {
		if h := d.holds[w.key]; h != nil && h.session == s {
			d.drop(w.key, h)
			s.giveBack(w.key, h.token, 0)
		}
	}
	if errors.Is(err, errSessionEnded) {
		return err
	}
	return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
}

// provedAt is when the last request was sent that renewed the session.
func (s *session) provedAt() backend.Instant {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	return s.proved
}
