package binding

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// keeps says that the hold that a request has stays as it is, through whichever client: the repetition is answered with
// it.
const keeps = "2"

// Enter is engine.Service's.
func (s *Service) Enter(ctx context.Context, e engine.Entering) (engine.Position, error) {
	if err := s.fit(ctx); err != nil {
		return engine.Position{}, err
	}
	p, err := s.enter(ctx, &e)
	if err != nil || !p.Held || s.o.Replicas == 0 {
		return p, err
	}
	all := []engine.Position{p}
	err = s.confirmed(ctx, []engine.Entering{e}, all)
	return all[0], err
}

// enter asks for one name. A free name that nobody is known to want is taken by SET NX and EXISTS of the queue, and a
// name that was handed over is accepted; the script does all else. Without a subscription a request takes no place in
// the queue: a release passes over a client that nobody hears.
func (s *Service) enter(ctx context.Context, e *engine.Entering) (engine.Position, error) {
	r := &e.Request
	keys := s.keys(r.Name)
	if e.Handed != "" {
		if p, held, err := s.accept(ctx, e, keys); held || err != nil {
			return p, err
		}
	}
	h := s.hold(r)
	value, px := h.Value(), redisscript.Millis(h.PX)
	fresh := r.Fresh && !e.Again
	if fresh && r.Kind == backend.KindExclusive && !s.wanted.Has(keys.Lock) {
		answer, err := s.do(ctx, redisscript.Take, keys, value, px)
		switch {
		case err != nil:
			return engine.Position{}, err
		case answer == redisscript.TakeGranted:
			return s.granted(r, h.Incarnation(), h.Metadata), nil
		}
		s.wanted.Note(keys.Lock)
		if answer == redisscript.TakeAhead {
			return s.giveWay(ctx, r, &h, keys, value, px)
		}
	}
	wait := r.Wait && s.push.stands(s)
	code, args := codeOf(r, fresh, wait), []string{value, px}
	if !fresh {
		args = append(args, r.RequestID, keeps)
	}
	answer, err := s.do(ctx, code, keys, args...)
	if err != nil {
		return engine.Position{}, err
	}
	return s.position(ctx, r, &h, answer)
}

// giveWay puts a grant of SET NX behind the waiters. Whatever fails, the name may be held.
func (s *Service) giveWay(
	ctx context.Context, r *backend.Request, h *redisscript.Hold, keys redisscript.Keys, value, px string,
) (engine.Position, error) {
	wait := "0"
	if r.Wait && s.push.stands(s) {
		wait = "1"
	}
	answer, err := s.do(ctx, redisscript.GiveWay, keys, value, px, wait)
	var late *engine.Unanswered
	switch {
	case errors.As(err, &late):
		return engine.Position{}, err
	case err != nil:
		return engine.Position{}, &engine.Unanswered{Err: err}
	}
	return s.position(ctx, r, h, answer)
}

// codeOf returns the step by which a request enters. Those of requests that were never here do not look for them.
func codeOf(r *backend.Request, fresh, wait bool) string {
	code := redisscript.TryAgain
	switch {
	case fresh && wait:
		code = redisscript.Wait
	case fresh:
		code = redisscript.Try
	case wait:
		code = redisscript.WaitAgain
	}
	if r.Kind != backend.KindExclusive {
		code = "g" + code
	}
	return code
}

// accept turns an offer into a hold of the whole TTL. held is false if the offer is over.
func (s *Service) accept(ctx context.Context, e *engine.Entering, keys redisscript.Keys) (
	p engine.Position, held bool, err error,
) {
	r := &e.Request
	h := redisconn.HoldOf(*r, s.identity, 0)
	h.Nonce = e.Handed
	code := redisscript.Accept
	if r.Kind != backend.KindExclusive {
		code = redisscript.GroupAccept
	}
	answer, err := s.do(ctx, code, keys, h.Start(), redisscript.Millis(h.PX))
	if err != nil || answer != int64(1) {
		return p, false, err
	}
	p = s.granted(r, h.Incarnation(), h.Metadata)
	p.Queued = true
	return p, true, nil
}

// Handed is engine.Handover's: the nonce says when the Enter was sent that the script has read in the queue.
func (s *Service) Handed(e engine.Entering, nonce string) (
	p engine.Position, sent backend.Instant, ttl time.Duration, ok bool,
) {
	at, err := strconv.ParseInt(nonce[:instantDigits], 36, 64)
	if err != nil || s.o.Replicas > 0 {
		return p, 0, 0, false
	}
	h := redisconn.HoldOf(e.Request, s.identity, 0)
	h.Nonce = nonce
	return s.granted(&e.Request, h.Incarnation(), h.Metadata), backend.Instant(at), min(h.PX, redisscript.OfferTime), true
}

// position reads the answer to one Enter.
func (s *Service) position(ctx context.Context, r *backend.Request, h *redisscript.Hold, answer any) (
	p engine.Position, err error,
) {
	switch answer {
	case int64(1):
		return s.granted(r, h.Incarnation(), h.Metadata), nil
	case int64(0):
		return engine.Position{Placed: true, Queued: true, Place: h.Nonce}, nil
	case int64(redisscript.Mismatch):
		return p, s.mismatch(ctx, r.Name)
	}
	if incarnation, ok := redisscript.ParseKept(answer, r.RequestID); ok {
		return s.granted(r, incarnation, h.Metadata), nil
	}
	state, ok := redisscript.ParseState(answer)
	if !ok {
		return p, errAnswer
	}
	p.Holder, p.Poll = redisconn.HeldError(r.Name, state), true
	return p, nil
}

// granted is the position of a hold. The incarnation carries the metadata along, which only Redlock reads.
func (s *Service) granted(r *backend.Request, incarnation, _ string) engine.Position {
	p := engine.Position{
		Held: true, Incarnation: incarnation,
		Nonce: redisscript.NonceOf(redisscript.StartOf(incarnation, r.RequestID)),
	}
	if r.MinHold > 0 {
		p.MinHoldUntil = s.clock.Now().Add(r.MinHold) // not before the server's grant
	}
	return p
}

// mismatch asks for the present use of a name. If its user has gone meanwhile, the error names nobody.
func (s *Service) mismatch(ctx context.Context, name string) error {
	e := &backend.LimitError{Name: name}
	answer, err := s.do(ctx, redisscript.Inform, s.keys(name))
	if err != nil {
		return e
	}
	state, _ := redisscript.ParseState(answer)
	for _, held := range append(state.Shares, state) {
		if !held.Held {
			continue
		}
		e.Holder, e.Limit = held.Hold.Owner, held.Hold.Limit
		switch {
		case held.Hold.Permits > 0:
			e.Kind = backend.KindPermits
		case held.Hold.Shared:
			e.Kind = backend.KindShared
		}
		break
	}
	return e
}

// EnterSet is engine.Sets's. A set that has to wait is backend.ErrUnsupported without effects, and the core acquires
// the names one after the other.
func (s *Service) EnterSet(ctx context.Context, rs []engine.Entering) ([]engine.Position, error) {
	if len(rs) > lines.MaxSteps || s.lines.Sharded.Load() {
		return nil, backend.ErrUnsupported
	}
	if err := s.fit(ctx); err != nil {
		return nil, err
	}
	if s.lines.Sharded.Load() { // as the first look has found
		return nil, backend.ErrUnsupported
	}
	step := lines.NewStep(redisscript.TryAll, s.keys(rs[0].Name))
	again := "0"
	holds, requests := make([]redisscript.Hold, len(rs)), make([]string, len(rs))
	args := []string{again}
	for i := range rs {
		if !rs[i].Fresh || rs[i].Again {
			args[0] = keeps
		}
		if i > 0 {
			step.Others = append(step.Others, s.keys(rs[i].Name))
		}
		holds[i], requests[i] = s.hold(&rs[i].Request), rs[i].RequestID
		args = append(args, holds[i].Value(), rs[i].RequestID)
	}
	step.Args = args
	answer, err := s.send(ctx, step)
	if err != nil {
		return nil, err
	}
	kept, ok := redisscript.ParseAllKept(answer, requests)
	if !ok && answer != int64(1) {
		return nil, s.setRefused(ctx, rs, answer)
	}
	all := make([]engine.Position, len(rs))
	for i := range rs {
		incarnation := holds[i].Incarnation()
		if kept != nil && kept[i] != "" {
			incarnation = kept[i]
		}
		all[i] = s.granted(&rs[i].Request, incarnation, holds[i].Metadata)
	}
	if s.o.Replicas > 0 {
		err = s.confirmed(ctx, rs, all)
	}
	return all, err
}

func (s *Service) setRefused(ctx context.Context, rs []engine.Entering, answer any) error {
	refused, ok := redisscript.ParseRefused(answer, len(rs))
	switch {
	case !ok:
		return errAnswer
	case refused.Mismatch:
		return s.mismatch(ctx, rs[refused.Index].Name)
	case rs[0].Wait:
		return backend.ErrUnsupported
	}
	return redisconn.HeldError(rs[refused.Index].Name, refused.State)
}
