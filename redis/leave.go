package redis

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// Leave is engine.Service's. An exclusive hold of a name without known waiters ends by a short script.
func (s *service) Leave(ctx context.Context, l engine.Leaving) (left engine.Left, err error) {
	g := l.Grant
	if g.Kind > backend.KindPermits {
		return left, backend.ErrUnsupported
	}
	keys, start := s.keys(g.Name), redisconn.StartOf(g)
	closed := s.closed(g.MinHoldUntil)
	code, args := redisscript.Release, []string{start, closed}
	switch {
	case l.Place != "":
		code, args = redisscript.Cancel, []string{l.Place}
	case start == "":
		code, args = redisscript.Remove, []string{g.RequestID}
	case g.Kind != backend.KindExclusive:
		code = redisscript.GroupRelease
	}
	if l.Place == "" && start != "" {
		defer func() {
			if err != nil {
				s.unreleased.note(start, release{code, keys, g.MinHoldUntil})
			} else {
				s.unreleased.forget(start)
			}
		}()
	}
	if code == redisscript.Release && closed == "0" && !s.wanted.Has(keys.Lock) {
		answer, err := s.do(ctx, redisscript.Free, keys, start)
		if err != nil || answer == int64(1) {
			return engine.Left{Was: err == nil}, err
		}
		s.wanted.Note(keys.Lock)
	}
	left, err = s.end(ctx, code, keys, args...)
	if err == nil && !left.Was && start != "" {
		left.Loss = s.losses(ctx, []*backend.Grant{&g})[0]
	}
	return left, err
}

// release is the step that ends a hold, with or without waiters.
type release struct {
	code  string
	keys  redisscript.Keys
	until backend.Instant // the end of the minimum hold
}

// maxUnreleased bounds the releases that are remembered. Holds of further ones may stay for their TTL.
const maxUnreleased = 1000

// unreleased are the holds whose last Leave has failed, by the starts of their values. Callers repeat a Leave as long
// as the driver is open; when it closes the releases are sent once more, also since the short script may not have been
// enough. The zero unreleased is ready.
type unreleased struct {
	any atomic.Bool // there are some

	mu  sync.Mutex // protects the following field
	all map[string]release
}

func (u *unreleased) note(start string, r release) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.all == nil {
		u.all = map[string]release{}
	}
	if len(u.all) < maxUnreleased {
		u.all[start] = r
		u.any.Store(true)
	}
}

// forget forgets a hold that has ended, or was granted once more.
func (u *unreleased) forget(start string) {
	if !u.any.Load() {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.all, start)
	u.any.Store(len(u.all) > 0)
}

// releaseAll sends the releases that have failed, and awaits nothing.
func (s *service) releaseAll(ctx context.Context) {
	u := &s.unreleased
	u.mu.Lock()
	defer u.mu.Unlock()
	for start, r := range u.all {
		s.lines.Send(ctx, lines.NewStep(r.code, r.keys, start, s.closed(r.until)))
	}
}

// closed writes for how long a name stays closed.
func (s *service) closed(until backend.Instant) string {
	if until.IsZero() {
		return "0" // without asking the clock
	}
	return redisconn.ClosedFor(until, s.clock.Now())
}

// end is a step that ends a hold. If the name was offered to a waiter, that has to be settled.
func (s *service) end(ctx context.Context, code string, keys redisscript.Keys, args ...string) (
	left engine.Left, err error,
) {
	answer, err := s.do(ctx, code, keys, args...)
	n, ok := answer.(int64)
	switch {
	case err != nil:
		return left, err
	case !ok:
		return left, errAnswer
	case n == redisscript.Offered:
		left.Settle = redisscript.SettleIn(redisscript.OfferTime)
	}
	left.Was = n > 0
	return left, nil
}

// Expire is engine.Expires's.
func (s *service) Expire(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	start := redisconn.StartOf(l.Grant)
	if start == "" {
		return engine.Left{}, nil
	}
	closed := s.closed(l.MinHoldUntil)
	return s.end(ctx, redisscript.Expire, s.keys(l.Name), start, closed)
}

// Settle is engine.Settles's. The server answers with the time that the present hold has left: more than an offer's
// means that it was accepted.
func (s *service) Settle(ctx context.Context, name string) (again time.Duration, err error) {
	answer, err := s.do(ctx, redisscript.Settle, s.keys(name))
	if ms, ok := answer.(int64); ok && ms >= 0 {
		if left := time.Duration(ms) * time.Millisecond; left <= redisscript.OfferTime {
			again = redisscript.SettleIn(left) // an offer, or a hold about to end
		}
	}
	return again, err
}

// lossTimeout is the maximum time for the question why a hold is gone.
const lossTimeout = time.Second

// losses returns why holds have ended. The mark of a forced release is removed by reading it.
func (s *service) losses(ctx context.Context, gone []*backend.Grant) []backend.Loss {
	all := make([]backend.Loss, len(gone))
	var steps []*lines.Step
	var asked []int
	for i, g := range gone {
		all[i].Reason = redisconn.LossReason(*g, s.clock.Now())
		if all[i].Reason == backend.ReasonEvicted && g.Incarnation != "" {
			steps = append(steps, lines.NewStep(redisscript.Marked, s.keys(g.Name).Marks(), redisconn.StartOf(*g)))
			asked = append(asked, i)
		}
	}
	ctx = redisconn.WithDeadline(ctx, time.Now().Add(lossTimeout))
	answers, errs := s.doAll(ctx, steps)
	for n, i := range asked {
		if errs[n] != nil {
			continue
		}
		if text, by, principal, marked := redisscript.ParseMarked(answers[n]); marked {
			all[i] = backend.Loss{Reason: backend.ReasonForceReleased, Text: text, By: by, Principal: principal}
		}
	}
	return all
}

// Extend is engine.Service's: one call of the script for up to 128 holds, all calls in one pipeline; on a cluster one
// call for each hold. There a renewal reads the lock's key only, since a step with several keys is refused while their
// slot moves, and Handed grants nothing. A grant without an incarnation is never one of this driver.
func (s *service) Extend(ctx context.Context, _ engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	now := s.clock.Now()
	steps, asked := make([]*lines.Step, 0, len(holds)), make([]int, 0, len(holds))
	out := make([]engine.Outcome, len(holds))
	for i := range holds {
		g := &holds[i].Grant
		if g.Incarnation == "" {
			out[i].Gone = true
			continue
		}
		code := redisscript.Renew
		switch {
		case g.Kind != backend.KindExclusive:
			code = redisscript.GroupAccept
		case g.Queued && !s.lines.Sharded.Load():
			code = redisscript.Accept // a hand-over may have been the last that the service heard of
		}
		px := redisscript.Millis(redisconn.PXOf(*g, now))
		steps, asked = append(steps, lines.NewStep(code, s.keys(g.Name), redisconn.StartOf(*g), px)), append(asked, i)
	}
	answers, errs := s.doAll(ctx, steps)
	for n, i := range asked {
		out[i].Err, out[i].Gone = errs[n], errs[n] == nil && answers[n] != int64(1)
	}
	var gone []*backend.Grant
	var members []int
	for i := range out {
		if out[i].Gone {
			gone, members = append(gone, &holds[i].Grant), append(members, i)
		}
	}
	if len(gone) > 0 {
		for n, loss := range s.losses(ctx, gone) {
			out[members[n]].Loss = loss
		}
	}
	s.confirmRenewals(ctx, holds, out)
	return out, nil
}
