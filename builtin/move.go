package builtin

// Moving: holds and waits of one request from one session to another, when its TTL changes or it is requested again.

import (
	"context"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// takeOver moves the holds and waits of the requests from other sessions to this one, so that a repeated acquire finds
// them here.
//
// A set of which only some names are held cannot be completed. takeOver ends its remaining holds, even those of
// another client, since a later acquire with the same ids replaces the earlier one.
//
// A hold that moves here is recorded as a leftover, in case that no acquire follows; an acquire that follows overtakes
// it. The server notifies the other session that its hold has moved.
//
//	no name is held           nil: the acquire that follows begins anew
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
			return fmt.Errorf("%w: %w", backend.ErrUnknown, ctx.Err()) // some of the earlier ones may be here by now
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

// endRest ends a hold of this session whose set is incomplete, and notifies the holder, if there is one.
//
// A hold that has ended already is no error. If the session has ended, so have its holds, and the caller retries in
// another session.
func (s *session) endRest(ctx context.Context, g *lockpb.Grant) error {
	d, k := s.d, key{g.Name, g.RequestId}
	if err := s.carryOut(ctx, releaseOf(k, g.Token, 0), k, nil); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		return err
	}
	d.mu.Lock()
	defer d.unlockAndTell()
	if h := d.holds[k]; h != nil && h.token == g.Token {
		d.lose(k, h, backend.Loss{Reason: backend.ReasonEvicted})
	}
	return nil
}

// move moves the hold with the token to the session, or with token zero any hold or wait of the request, and returns
// the instant from which the hold is valid. It calls granted with d.mu held when the answer comes, so that a loss that
// is pushed right behind the answer finds the hold.
//
// A move needs no sequence: a repetition finds the hold in its new place, and gets the same answer.
//
//	moved, or here already     the instant, and granted was called
//	ErrNotHeld                 the request has no such hold
//	the session ended          errSessionEnded; its holders are notified
//	no answer                  ErrUnknown: the hold is on one session or the other
//
// If a wait moves, the server answers with a place in the queue and no grant, and move does not call granted; the
// acquire that follows finds the place.
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
