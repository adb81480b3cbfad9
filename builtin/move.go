package builtin

// Moving: holds and waits of one request from one session to another, where its TTL changes or it is asked for again.

import (
	"context"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// takeOver moves to this session what others have of the requests, so that the same acquire finds it here.
//
// A set of which only some are held cannot be completed: what is left of it is ended, also if another client has it, as
// any later acquire by the same ids takes the place of the earlier one.
//
// What moves here and is not asked for again would be nobody's, so it is noted as a leftover, which the acquire that
// follows overtakes. The session that loses something is told by the server, as moved.
//
//	nothing is held           nil: the acquire that follows begins anew
//	all are held              nil: the acquire finds them
//	some are held             these are ended, and the acquire begins anew
//	a move failed             its error for the first name, ErrUnknown for later ones
func (s *session) takeOver(ctx context.Context, rs []backend.Request) error {
	d := s.d
	var held []*lockpb.Grant
	for i := range rs {
		_, err := s.move(ctx, key{rs[i].Name, rs[i].RequestID}, 0, func(g *lockpb.Grant) {
			held = append(held, g)
			if k := (key{g.Name, g.RequestId}); d.holds[k] == nil {
				s.leave(k, g.Token, 0)
			}
		})
		switch {
		case err == nil, errors.Is(err, backend.ErrNotHeld):
		case i > 0 && ctx.Err() != nil:
			return fmt.Errorf("%w: %w", backend.ErrUnknown, ctx.Err()) // of the others, something may be here by now
		case i > 0:
			return fmt.Errorf("%w: %v", backend.ErrUnknown, err)
		default:
			return err
		}
	}
	if len(held) == len(rs) {
		return nil
	}
	for _, g := range held {
		if err := s.endRest(ctx, g); err != nil {
			return err
		}
	}
	return nil
}

// endRest ends a hold of this session of which the set is broken. Its holder, if there is one, is told.
//
// A hold that is gone already is no error. Should the session have ended, everything on it has, and the caller begins
// again in another.
func (s *session) endRest(ctx context.Context, g *lockpb.Grant) error {
	d, k := s.d, key{g.Name, g.RequestId}
	if err := s.carryOut(ctx, releaseOf(k, g.Token, 0), k, nil); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		return err
	}
	d.mu.Lock()
	defer d.unlockAndTell()
	if h := d.holds[k]; h != nil && h.token == g.Token {
		d.lose(k, h, backend.ReasonEvicted)
	}
	return nil
}

// move takes a hold over to the session, with token zero whatever the request has. granted is called with d.mu held, as
// soon as the answer comes: a loss that is pushed right behind it finds the hold in its place. It returns the instant
// from which the hold is valid. A move is never in doubt for long: sent again, it answers the same.
//
// A move has no sequence, and needs none: what it asks for is a state, and a second one finds it reached.
//
//	moved, or here already     the instant, and granted was called
//	ErrNotHeld                 the request has no such hold
//	the session ended          errSessionEnded, after its holders were told
//	no answer                  ErrUnknown: the hold hangs on one session or the other
//
// A wait moves as well, where the token is zero. The server then answers with a place in the queue and no grant, so
// granted is not called; the acquire that follows finds the place.
func (s *session) move(ctx context.Context, k key, token uint64, granted func(*lockpb.Grant)) (backend.Instant, error) {
	var sent backend.Instant
	c := call{
		request: &lockpb.Request{Call: &lockpb.Request_Move{
			Move: &lockpb.Move{Name: k.name, RequestId: k.requestID, Token: token},
		}},
		session: s,
		then: func(r *lockpb.Reply, err error) {
			if grants := r.GetAcquired().GetGrants(); err == nil && len(grants) == 1 {
				sent = s.proved
				granted(grants[0])
			}
		},
	}
	_, err := s.d.ask(ctx, c)
	return sent, err
}
