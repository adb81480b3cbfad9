package binding

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// Leave is engine.Service's. An exclusive hold of a name that nobody is known to want ends by a short script.
func (s *Service) Leave(ctx context.Context, l engine.Leaving) (left engine.Left, err error) {
	g := l.Grant
	if g.Kind > backend.KindPermits {
		return left, backend.ErrUnsupported
	}
	keys, start := s.keys(g.Name), redisconn.StartOf(g)
	closed := redisconn.ClosedFor(g.MinHoldUntil, s.clock.Now())
	code, args := redisscript.Release, []string{start, closed}
	switch {
	case start == "":
		code, args = redisscript.Remove, []string{g.RequestID}
	case g.Kind != backend.KindExclusive:
		code = redisscript.GroupRelease
	case closed == "0" && !s.wanted.Has(keys.Lock):
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

// end is a step that ends a hold. If somebody was offered the name, that has to be settled.
func (s *Service) end(ctx context.Context, code string, keys redisscript.Keys, args ...string) (
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
func (s *Service) Expire(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	start := redisconn.StartOf(l.Grant)
	if start == "" {
		return engine.Left{}, nil
	}
	closed := redisconn.ClosedFor(l.MinHoldUntil, s.clock.Now())
	return s.end(ctx, redisscript.Expire, s.keys(l.Name), start, closed)
}

// Settle is engine.Settles's. The server answers with the time that the present hold has left: more than an offer's says
// that it was accepted.
func (s *Service) Settle(ctx context.Context, name string) (again time.Duration, err error) {
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

// losses says why holds are gone. The mark of a forced release is removed by reading it.
func (s *Service) losses(ctx context.Context, gone []*backend.Grant) []backend.Loss {
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
// call for each hold.
func (s *Service) Extend(ctx context.Context, _ engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	now := s.clock.Now()
	steps := make([]*lines.Step, len(holds))
	for i := range holds {
		g := &holds[i].Grant
		code := redisscript.Renew
		switch {
		case g.Kind != backend.KindExclusive:
			code = redisscript.GroupAccept
		case g.Queued:
			code = redisscript.Accept // a hand-over may have been the last that the service heard of
		}
		steps[i] = lines.NewStep(code, s.keys(g.Name), redisconn.StartOf(*g), redisscript.Millis(redisconn.PXOf(*g, now)))
	}
	answers, errs := s.doAll(ctx, steps)
	out := make([]engine.Outcome, len(holds))
	var gone []*backend.Grant
	var members []int
	for i := range holds {
		g := &holds[i].Grant
		switch {
		case errs[i] != nil:
			out[i].Err = errs[i]
		case answers[i] != int64(1) || g.Incarnation == "":
			out[i].Gone = true
			gone, members = append(gone, g), append(members, i)
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
