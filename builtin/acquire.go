package builtin

// Acquire and AcquireAll. Both take the same path: one attempt of one session acquires a set of names, or a single
// name.
//
// 	acquire ─► sessionFor ─► session.acquire ─► begin ─► attempt ─► a grant, or an error
// 	   ▲                        │ conflict: takeOver, and begin again
// 	   └── the session ended ◄──┘
//
// attempt.go has the attempt; leave.go handles a caller that leaves.

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

// Acquire acquires a lock. Its token is higher than all tokens that the service has issued. With Wait the request
// stays in the name's queue until it is granted or ctx ends, and survives changes of leader. A repeated RequestID gets
// the same hold. Errors wrap backend.ErrHeld, ErrUnavailable (no leader, no change; a LimitError names a limit that is
// reached), ErrUnknown (the request may have left a hold that could not be released), DeadlockError, or ctx's error.
//
// The validity of the grant counts from Grant.SentAt. A TTL outside the bounds of Describe is backend.ErrInvalidTTL
// before anything is sent. ErrLimitMismatch means that the name is in use with another kind, limit or hierarchy;
// ErrHistoryLost, that the cluster has lost acknowledged changes, and that this driver fails all further calls;
// ErrClosed, that Close was called.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	grants, err := d.AcquireAll(ctx, []backend.Request{r})
	if err != nil {
		return backend.Grant{}, err
	}
	return grants[0], nil
}

// AcquireAll acquires all names atomically, for any set of distinct names that the server allows in one step: 64 by
// default. One log entry grants them all. A waiter has one place in all of their queues: it holds no name before it
// can hold all, and later requests wait behind it. More names, or more than 256 KiB of names and metadata, are
// backend.ErrUnsupported.
//
// An error is about the set; the *backend.CallError names its first name, and a *backend.HeldError the held name.
//
// Requests agree in TTL, Wait and Under. A repeated set is recognized by its request ids:
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

// acquire acquires all of rs in one step. If the session ends during the wait, acquire continues in another session,
// with a place at the end of the queue. A request that had a place in a queue also waits while the service is
// unavailable.
//
//	granted                            returned
//	the session ended                  again in another session, at the end of the queue
//	errAgain                           again in the same session, with another sequence
//	no session could be opened         again if it had a place in a queue, else returned
//	anything else                      returned
//
// The loop has no bound: each round needs an event that ended the round before.
func (d *Driver) acquire(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	if err := d.begin(ctx); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	if err := kit.ValidateSet(d.Describe(), rs); err != nil {
		return nil, err
	}
	queued := false // the request had a place in a queue, and so waits while the service is unavailable
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
		// Retry with a new session or a new sequence. The pause is for the case that it ends immediately, too.
		if err := d.pause(ctx, time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// mostConflicts is the maximum number of times that an acquire takes over its request ids from other sessions. More
// conflicts mean that another client takes them back each time.
const mostConflicts = 3

// acquire makes one attempt, and another one if it has to take over the requests from another session.
//
// A conflict means that another session has requests with some of the ids, or that only part of a set is held. The
// other session has another TTL, or belongs to another process that acts for the same client. The acquire had no
// effect then. A lasting conflict means that another client waits with the request id for another set of names, or
// keeps taking the ids back: that is backend.ErrInvalidOption.
func (s *session) acquire(ctx context.Context, rs []backend.Request, queued *bool) ([]backend.Grant, error) {
	for conflicts := 0; ; conflicts++ {
		grants, err := s.attempt(ctx, s.begin(ctx, rs, *queued, conflicts > 0), rs, queued)
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

// attempt waits until a is decided, or abandons it, and returns its grants.
//
// If more than half of a grant's TTL has elapsed when it arrives, attempt proves the session first: the remaining time
// would be of little use to the holder, and the core would release the hold.
//
// *queued is set if the attempt had a place in a queue, and never reset. attempt waits only for a, the end of ctx and
// Close; the connection checks that the server answers.
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
		if err := s.prove(ctx); err != nil {
			return nil, s.giveBackUnproved(a, err)
		}
		sent = s.provedAt()
	}
	grants := make([]backend.Grant, len(rs))
	for i := range rs {
		g := d.grantOf(&rs[i], a.grants[i])
		// A repetition, or a late grant, finds a hold that has less than the TTL left of its maximum.
		g.TTL, g.Queued, g.SentAt = s.ttl, a.queued, max(1, validUntil(sent, s.ttl, a.lasts[i]).Add(-s.ttl))
		if rs[i].MinHold > 0 {
			g.MinHoldUntil = a.before.Add(rs[i].MinHold)
		}
		grants[i] = g
	}
	return grants, nil
}

// grantOf returns the grant for r, without its time. A server without durable storage has no fencing tokens.
func (d *Driver) grantOf(r *backend.Request, granted *lockpb.Grant) backend.Grant {
	g := r.Grant()
	copy(g.Nonce[:], granted.Nonce)
	g.Incarnation = strconv.FormatUint(granted.Token, 10)
	if d.fences() {
		g.Token, g.Generation = fencing.Token(granted.Token), d.generation()
	}
	return g
}

// giveBackUnproved releases the holds of a because their validity was not confirmed in time. The error is
// errSessionEnded, after which the caller repeats the acquire, or backend.ErrUnknown, since the release may fail.
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

// provedAt returns the instant just before the last request that renewed the session was sent.
func (s *session) provedAt() backend.Instant {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	return s.proved
}
