package builtin

// Renewal: one keepalive per session for all of its holds, and a move for each hold that needs another session.

import (
	"cmp"
	"context"
	"errors"
	"sync"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// Renew prolongs grants, and returns a result for each of them, in order. One keepalive proves all grants of one
// session: if a grant ended before the keepalive was sent, the push of its loss comes before the answer, on the same
// connection.
//
// A grant with a TTL other than its session's, or that this driver does not know, moves to the session of its TTL by a
// separate request; Renew makes all of these concurrently. A renewal never shortens a hold: a grant with a shorter TTL
// moves only once its earlier validity ends before the requested one.
//
// It returns when all requests are answered, or when ctx ends. Each result has an instant and a TTL, or an error:
//
//	NotHeldError       the hold is lost, with the reason if it is known; Renew never acquires it again
//	ErrUnavailable     the hold was not renewed
//	ErrUnknown         the hold may have been renewed or not
//	ErrHistoryLost     the cluster has forgotten acknowledged changes; the hold is lost with that reason
//
// Goroutines: one for each session and one for each move, all of which have ended when it returns.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	if err := d.begin(ctx); err != nil {
		for i, g := range grants {
			out[i].Err = d.callError("renew", g.Name, err)
		}
		return out
	}
	defer d.gate.Leave()
	bySession := map[*session][]int{}
	var moves []int
	d.mu.Lock()
	for i := range grants {
		if h := d.holdOf(&grants[i]); h != nil && h.stays(grants[i].TTL, d.clock.Now()) {
			bySession[h.session] = append(bySession[h.session], i)
		} else {
			moves = append(moves, i)
		}
	}
	d.mu.Unlock()
	var work sync.WaitGroup
	move := func(members []int) {
		for _, i := range members {
			work.Go(func() {
				out[i] = d.moveTo(ctx, &grants[i])
			})
		}
	}
	move(moves)
	for s, members := range bySession {
		if len(bySession) == 1 {
			move(s.renew(ctx, grants, members, out)) // the usual case, without a goroutine
			break
		}
		work.Go(func() { move(s.renew(ctx, grants, members, out)) })
	}
	work.Wait()
	for i, g := range grants {
		out[i].Err = d.callError("renew", g.Name, out[i].Err)
	}
	return out
}

// holdOf returns this driver's hold of g, or nil. The token has to be the same: an earlier grant does not renew a
// later one. The caller holds d.mu.
func (d *Driver) holdOf(g *backend.Grant) *hold {
	if h := d.holds[key{g.Name, g.RequestID}]; h != nil && h.token == incarnation(g) {
		return h
	}
	return nil
}

// renew proves the session, and writes the results of the grants at the indexes in members into out. It returns the
// indexes of the grants that were no longer on this session when the server answered, for the caller to move: another
// process may have taken them over for the same request, and they are still the grants of that request.
//
// The caller does not hold d.mu; renew takes it after the answer, when all losses that were pushed before the answer
// have been handled. So a hold that is still there existed when the keepalive was sent.
//
// Only a grant with this session's TTL advances hold.until. A grant with a shorter TTL is here because of hold.stays,
// and gets the requested TTL: the hold may live longer.
func (s *session) renew(
	ctx context.Context, grants []backend.Grant, members []int, out []backend.Renewal,
) (moved []int) {
	err := s.prove(ctx)
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	for _, i := range members {
		switch h := s.d.holdOf(&grants[i]); {
		case errors.Is(err, errSessionEnded):
			out[i].Err = s.lostHold()
		case err != nil:
			out[i].Err = err
		case h == nil || h.session != s:
			moved = append(moved, i)
		default:
			if h.session.ttl == grants[i].TTL {
				h.until = max(h.until, s.proved.Add(s.ttl))
			}
			out[i] = h.renewal(s.proved, grants[i].TTL)
		}
	}
	return moved
}

// moveTo moves a hold to the session of the grant's TTL. Its token stays. During the move, a push that the hold has
// left its old session is no loss (busy). If no answer comes, the hold may be on either session (unsure), until the
// next renewal repeats the move.
//
// A hold that this driver does not know is moved too: it may be the grant of another process that acts for the same
// client. The service identifies the hold by name, request id and token. Such a hold has no function to call at its
// loss.
func (d *Driver) moveTo(ctx context.Context, g *backend.Grant) backend.Renewal {
	token := incarnation(g)
	if token == 0 {
		return backend.Renewal{Err: &backend.NotHeldError{}}
	}
	if err := cmp.Or(backend.ValidateName(g.Name), backend.ValidateRequestID(g.RequestID)); err != nil {
		return backend.Renewal{Err: err}
	}
	s, err := d.sessionFor(ctx, g.TTL)
	if err != nil {
		return backend.Renewal{Err: err}
	}
	defer s.Leave(1)
	d.mu.Lock()
	h := d.holdOf(g)
	var lost func(backend.Loss)
	if h != nil {
		h.busy++
		lost = h.lost
	}
	d.mu.Unlock()
	k := key{g.Name, g.RequestID}
	out := backend.Renewal{TTL: g.TTL}
	from := d.clock.Now()
	out.SentAt, out.Err = s.move(ctx, k, token, func(granted *lockpb.Grant) { d.hold(s, granted, lost, from) })
	d.mu.Lock()
	defer d.mu.Unlock()
	if moved := d.holdOf(g); out.Err == nil && moved != nil {
		out = moved.renewal(out.SentAt, g.TTL)
	}
	if h == nil {
		return out
	}
	err = out.Err
	h.busy--
	h.unsure = err != nil
	if errors.Is(err, backend.ErrNotHeld) {
		d.drop(k, h)
	}
	return out // errSessionEnded refers to the target session, not to the hold's
}
