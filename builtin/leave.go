package builtin

import (
	"context"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// Leave is engine.Service's: the server grants to the first waiter in the same step. A minimum hold continues without
// its holder.
func (s *service) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	token := incarnation(l.Grant)
	if token == 0 && l.Incarnation != "" {
		return engine.Left{}, nil
	}
	own, _ := l.Session.(*session)
	return s.leave(ctx, l.Grant, own, own != nil && token == 0 && l.Place != "")
}

// Expire is engine.Expires's.
func (s *service) Expire(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	s.mu.Lock()
	e := s.entries[key{l.Name, l.RequestID}]
	s.mu.Unlock()
	if e == nil || e.grant == nil || e.token() != incarnation(l.Grant) { // it has moved, or is over
		return engine.Left{}, nil
	}
	return s.leave(ctx, l.Grant, e.own, true)
}

// leave sends a release. only restricts it to what stands on own: another client may have the request id too.
//
// A release that is repeated because its answer was lost, and finds nothing, has ended the hold.
func (s *service) leave(ctx context.Context, g backend.Grant, own *session, only bool) (engine.Left, error) {
	k, token := key{g.Name, g.RequestID}, incarnation(g)
	known := s.drop(k, token)
	x := &call{request: releaseOf(k, token, only), own: own}
	x.note = func(_ *call, r *lockpb.Reply) {
		if !isBusy(r.GetError()) {
			delete(s.entries, k) // an acquire that was answered meanwhile
		}
	}
	_, err := s.ask(ctx, x)
	if err == nil {
		return engine.Left{Was: true}, nil
	}
	var gone *backend.NotHeldError
	switch {
	case errors.Is(err, backend.ErrHistoryLost):
		return engine.Left{}, fmt.Errorf("%w: %w", &backend.NotHeldError{Name: g.Name, Reason: backend.ReasonHistoryLost}, err)
	case errors.Is(err, engine.ErrNoSession):
		return engine.Left{Loss: backend.Loss{Reason: backend.ReasonSessionExpired}}, nil
	case errors.As(err, &gone):
		return engine.Left{Was: x.doubt && known && gone.Reason == "", Loss: backend.Loss{Reason: gone.Reason}}, nil
	}
	return engine.Left{}, err
}

// drop forgets the hold with the token or, if that is zero, whatever the request has: pushes about it have no effect any
// more.
func (s *service) drop(k key, token uint64) (known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[k]
	if known = e != nil && (token == 0 || e.token() == token); known {
		delete(s.entries, k)
	}
	return known
}

// releaseOf returns the request to end the hold with the token or, if that is zero, any hold or wait of the request.
func releaseOf(k key, token uint64, own bool) *lockpb.Request {
	return &lockpb.Request{Call: &lockpb.Request_Release{Release: &lockpb.Release{
		Name: k.name, RequestId: k.requestID, Token: token, Own: own,
	}}}
}

// Extend is engine.Service's: a keepalive, whose answer comes after the pushes of all losses before it, and then the
// moves of the holds that have no entry on the session, together. The answer to a move has the reason why there is no
// such hold.
func (s *service) Extend(ctx context.Context, es engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	own, out := es.(*session), make([]engine.Outcome, len(holds))
	if err := s.Prove(ctx, own); err != nil {
		return nil, err
	}
	var missing []int
	var grants []backend.Grant
	last := func(i int) bool {
		e := s.entries[key{holds[i].Name, holds[i].RequestID}]
		if e == nil || e.own != own || e.grant == nil || e.token() != incarnation(holds[i].Grant) {
			return false
		}
		out[i].Last = e.last
		return true
	}
	s.mu.Lock()
	for i, h := range holds {
		if !last(i) {
			missing, grants = append(missing, i), append(grants, h.Grant)
		}
	}
	s.mu.Unlock()
	if err := engine.Abandoned(ctx); err != nil {
		return nil, err
	}
	for n, m := range s.moves(ctx, own, grants) {
		var gone *backend.NotHeldError
		i := missing[n]
		switch {
		case errors.As(m.err, &gone), incarnation(grants[n]) == 0:
			out[i].Gone = true
			if gone != nil {
				out[i].Loss.Reason = gone.Reason
			}
		case m.err != nil:
			out[i].Err = m.err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range missing {
		last(i)
	}
	return out, nil
}
