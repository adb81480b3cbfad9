package redis

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

// Enter is engine.Service's.
func (s *service) Enter(ctx context.Context, e engine.Entering) (engine.Position, error) {
	if err := s.fit(ctx, e.Sent); err != nil {
		return engine.Position{}, err
	}
	before := s.last.Load()
	p, err := s.enter(ctx, &e)
	if err != nil || !p.Held || s.o.Replicas == 0 {
		return p, err
	}
	if err := s.confirmed(ctx, []engine.Entering{e}, []engine.Position{p}, before); err != nil {
		return engine.Position{}, err
	}
	return p, nil
}

// enter asks for one name. A free name without known waiters is acquired by SET NX and EXISTS of the queue, and a name
// that was handed over is accepted; the script does all else. Without a subscription a request takes no place in the
// queue: a release passes over a client that receives no notifications.
func (s *service) enter(ctx context.Context, e *engine.Entering) (engine.Position, error) {
	r := &e.Request
	keys := s.keys(r.Name)
	if e.Handed != "" && !e.Shared {
		if p, held, err := s.accept(ctx, e, keys); held || err != nil {
			return p, err
		}
	}
	h := s.hold(r, e.Sent)
	value, start, incarnation := h.Texts()
	px := redisscript.Millis(h.PX)
	fresh := r.Fresh && !e.Again
	if fresh && r.Kind == backend.KindExclusive && !s.wanted.Has(keys.Lock) {
		answer, err := s.do(ctx, redisscript.Take, keys, value, px)
		switch {
		case err != nil:
			return engine.Position{}, err
		case answer == redisscript.TakeGranted:
			return s.granted(r, incarnation, start), nil
		}
		s.wanted.Note(keys.Lock)
		if answer == redisscript.TakeAhead {
			return s.giveWay(ctx, r, &h, keys, value, px)
		}
	}
	wait := r.Wait && s.push.stands(s)
	code, args := codeOf(r, fresh, wait), []string{value, px}
	if !fresh {
		args = append(args, r.RequestID, redisscript.KeepsAny)
		if e.Shared {
			args[len(args)-1] = redisscript.KeepsShared
		}
	}
	answer, err := s.do(ctx, code, keys, args...)
	if err != nil {
		return engine.Position{}, err
	}
	return s.position(ctx, r, &h, answer)
}

// giveWay puts a grant of SET NX behind the waiters. Whatever fails, the name may be held.
func (s *service) giveWay(
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
func (s *service) accept(ctx context.Context, e *engine.Entering, keys redisscript.Keys) (
	p engine.Position, held bool, err error,
) {
	r := &e.Request
	h := redisconn.HoldOf(*r, s.identity, e.Handed)
	_, start, incarnation := h.Texts()
	code := redisscript.Accept
	if r.Kind != backend.KindExclusive {
		code = redisscript.GroupAccept
	}
	answer, err := s.do(ctx, code, keys, start, redisscript.Millis(h.PX))
	if err != nil || answer != int64(1) {
		return p, false, err
	}
	p = s.granted(r, incarnation, start)
	p.Queued = true
	return p, true, nil
}

// Handed is engine.Handover's: the nonce has the send time of the Enter that the script has read in the queue.
func (s *service) Handed(e engine.Entering, nonce string) (
	p engine.Position, sent backend.Instant, ttl time.Duration, ok bool,
) {
	at, err := strconv.ParseInt(nonce[:instantDigits], 32, 64)
	if err != nil || s.o.Replicas > 0 || s.lines.Sharded.Load() { // see Extend
		return p, 0, 0, false
	}
	h := redisconn.HoldOf(e.Request, s.identity, nonce)
	_, start, incarnation := h.Texts()
	return s.granted(&e.Request, incarnation, start), backend.Instant(at), min(h.PX, redisscript.OfferTime), true
}

// position reads the answer to one Enter.
func (s *service) position(ctx context.Context, r *backend.Request, h *redisscript.Hold, answer any) (
	p engine.Position, err error,
) {
	switch answer {
	case int64(1):
		_, start, incarnation := h.Texts()
		return s.granted(r, incarnation, start), nil
	case int64(0):
		return engine.Position{Placed: true, Queued: true, Place: h.Value()}, nil
	case int64(redisscript.Mismatch):
		return p, s.mismatch(ctx, r.Name)
	}
	if incarnation, ok := redisscript.ParseKept(answer, r.RequestID); ok {
		return s.granted(r, incarnation, redisscript.StartOf(incarnation, r.RequestID)), nil
	}
	state, ok := redisscript.ParseState(answer)
	if !ok {
		return p, errAnswer
	}
	p.Holder, p.Poll = redisconn.HeldError(r.Name, state), true
	return p, nil
}

// granted is the position of a hold.
func (s *service) granted(r *backend.Request, incarnation, start string) engine.Position {
	s.unreleased.forget(start)
	p := engine.Position{Held: true, Incarnation: incarnation, Nonce: redisscript.NonceOf(start)}
	if r.MinHold > 0 {
		p.MinHoldUntil = s.clock.Now().Add(r.MinHold) // not before the server's grant
	}
	return p
}

// mismatch asks for the present use of a name. If its user has left meanwhile, the error names no user.
func (s *service) mismatch(ctx context.Context, name string) error {
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
func (s *service) EnterSet(ctx context.Context, rs []engine.Entering) ([]engine.Position, error) {
	if len(rs) > lines.MaxSteps || s.lines.Sharded.Load() {
		return nil, backend.ErrUnsupported
	}
	if err := s.fit(ctx, rs[0].Sent); err != nil {
		return nil, err
	}
	if s.lines.Sharded.Load() { // as the first look has found
		return nil, backend.ErrUnsupported
	}
	before := s.last.Load()
	step := lines.NewStep(redisscript.TryAll, s.keys(rs[0].Name))
	holds, requests := make([]redisscript.Hold, len(rs)), make([]string, len(rs))
	args := []string{"0"}
	for i := range rs {
		switch {
		case rs[i].Again: // what an earlier Enter was granted ends with a refusal
			args[0] = redisscript.Keeps
		case !rs[i].Fresh:
			args[0] = redisscript.KeepsAny
		}
		if i > 0 {
			step.Others = append(step.Others, s.keys(rs[i].Name))
		}
		holds[i], requests[i] = s.hold(&rs[i].Request, rs[i].Sent), rs[i].RequestID
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
		_, start, incarnation := holds[i].Texts()
		if kept != nil && kept[i] != "" {
			incarnation = kept[i]
			start = redisscript.StartOf(incarnation, rs[i].RequestID)
		}
		all[i] = s.granted(&rs[i].Request, incarnation, start)
	}
	if s.o.Replicas > 0 {
		if err := s.confirmed(ctx, rs, all, before); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func (s *service) setRefused(ctx context.Context, rs []engine.Entering, answer any) error {
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
