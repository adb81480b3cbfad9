package builtin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
)

func keyOf(r *engine.Entering) key { return key{r.Name, r.RequestID} }

// Enter is engine.Service's.
func (s *service) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	all, err := s.EnterSet(ctx, []engine.Entering{r})
	if err != nil {
		return engine.Position{}, err
	}
	return all[0], nil
}

// maxConflicts bounds the times that an Enter takes over its request ids from other sessions. More conflicts mean that
// another client takes them back each time.
const maxConflicts = 3

// EnterSet is engine.Sets's: one log entry grants all names, and a waiter has one place in all of their queues. A waiter
// whose grant was pushed needs no exchange.
//
// A conflict means that another session has requests with some of the ids, of another TTL or of another process that
// acts for the same client, or that only part of a set is held. A lasting one means that another client waits with the
// request id for another set of names, or keeps taking the ids back.
func (s *service) EnterSet(ctx context.Context, rs []engine.Entering) ([]engine.Position, error) {
	own := rs[0].Session.(*session)
	if all, err := s.pushed(own, rs); all != nil || err != nil {
		return all, err
	}
	for conflicts := 0; ; conflicts++ {
		var all []engine.Position
		_, err := s.ask(ctx, &call{
			request: onBehalf(ctx, s.acquireOf(rs)), own: own, once: true,
			note: func(x *call, r *lockpb.Reply) { all = s.entered(x, rs, r.GetAcquired()) },
		})
		switch {
		case err == nil && all != nil:
			return all, nil
		case err == nil:
			return nil, fmt.Errorf("%w: an acquire was answered as something else", backend.ErrUnknown)
		case errors.Is(err, errConflict) && conflicts == maxConflicts:
			return nil, kit.InvalidOption("request id", strconv.Quote(rs[0].RequestID),
				"it is in use, together with other names or by another client")
		case errors.Is(err, errConflict):
			if err = s.takeOver(ctx, own, rs); err != nil {
				return nil, err
			}
		default:
			if held := (*backend.HeldError)(nil); errors.As(err, &held) {
				return []engine.Position{{Holder: held}}, nil
			}
			return nil, err
		}
	}
}

// pushed returns the positions of a waiter that a push has granted, and nil for another waiter.
func (s *service) pushed(own *session, rs []engine.Entering) ([]engine.Position, error) {
	if rs[0].Place != own.place {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]engine.Position, len(rs))
	for i := range rs {
		e := s.entries[keyOf(&rs[i])]
		switch {
		case e != nil && e.own == own && e.taken:
			delete(s.entries, keyOf(&rs[i]))
			return nil, fmt.Errorf("%w: another client has taken over this request id", backend.ErrHeld)
		case e == nil || e.own != own || e.grant == nil:
			return nil, nil
		}
		all[i] = s.position(e, &rs[i])
	}
	return all, nil
}

// entered notes the answer to an acquire, and returns the positions. A request that waits already may have taken its
// place with its names in another order. The caller holds s.mu.
func (s *service) entered(x *call, rs []engine.Entering, a *lockpb.Acquired) []engine.Position {
	own := x.own
	switch {
	case a.GetQueued():
		for i := range rs {
			s.entries[keyOf(&rs[i])] = &entry{own: own, on: x.on, of: len(rs), before: x.sent}
		}
		if rs[0].Wait {
			return []engine.Position{{Placed: true, Place: own.place}}
		}
		return []engine.Position{{Holder: &backend.HeldError{}}} // the request waits already, and this attempt does not
	case len(a.GetGrants()) != len(rs):
		return nil
	}
	all := make([]engine.Position, len(rs))
	for i := range rs {
		k := keyOf(&rs[i])
		at := slices.IndexFunc(a.Grants, func(g *lockpb.Grant) bool { return g.Name == k.name && g.RequestId == k.requestID })
		if at < 0 {
			return nil
		}
		all[i] = s.position(s.hold(own, x.on, a.Grants[at], x.sent), &rs[i])
	}
	return all
}

// acquireOf returns the request on the wire for rs.
func (s *service) acquireOf(rs []engine.Entering) *lockpb.Request {
	under := rs[0].Under
	hidden := s.under[:min(len(s.under), max(0, backend.MaxUnder-len(under)))]
	if len(rs) == 1 {
		one := oneOf(&rs[0].Request)
		one.Under, one.UnderHidden = slices.Clone(under), hidden
		return &lockpb.Request{Call: &lockpb.Request_Acquire{Acquire: one}}
	}
	all := &lockpb.AcquireAll{Requests: make([]*lockpb.Acquire, len(rs)), Under: slices.Clone(under), UnderHidden: hidden}
	for i := range rs {
		all.Requests[i] = oneOf(&rs[i].Request)
	}
	return &lockpb.Request{Call: &lockpb.Request_AcquireAll{AcquireAll: all}}
}

// oneOf returns one request on the wire, without the holds that Under names: acquireOf adds these to the set, or to
// the request for one name. The metadata is copied, because the message may be encoded after the caller has changed
// its map.
func oneOf(r *backend.Request) *lockpb.Acquire {
	nonce := fencing.NewNonce()
	return &lockpb.Acquire{
		Name: r.Name, RequestId: r.RequestID, HoldId: r.HoldID, Owner: r.Owner, Wait: r.Wait,
		Kind: kindsOut[r.Kind], Permits: uint32(r.Permits), Limit: uint32(r.Limit), Hierarchical: r.Hierarchical,
		Metadata: maps.Clone(r.Metadata), MinHoldNanos: int64(r.MinHold), Nonce: nonce[:], HeedsMaxHold: true,
	}
}

// takeOver moves the holds and waits of the requests from other sessions to own. A set of which only some names are held
// cannot be completed: takeOver ends these holds, even those of another client, since a later acquire with the same ids
// replaces the earlier one.
func (s *service) takeOver(ctx context.Context, own *session, rs []engine.Entering) error {
	asked := make([]backend.Grant, len(rs))
	for i, r := range rs {
		asked[i] = r.Grant()
	}
	var held []*lockpb.Grant
	for i, m := range s.moves(ctx, own, asked) {
		switch {
		case m.err == nil && m.grant != nil:
			held = append(held, m.grant)
		case m.err != nil && !errors.Is(m.err, backend.ErrNotHeld) && i > 0:
			return fmt.Errorf("%w: %v", backend.ErrUnknown, m.err) // earlier ones may be here by now
		case m.err != nil && !errors.Is(m.err, backend.ErrNotHeld):
			return m.err
		}
	}
	if len(held) == len(rs) {
		return nil
	}
	for _, g := range held {
		_, err := s.ask(ctx, &call{request: releaseOf(key{g.Name, g.RequestId}, g.Token, false), own: own})
		if err != nil && !errors.Is(err, backend.ErrNotHeld) {
			return err
		}
		s.mu.Lock()
		if e := s.entries[key{g.Name, g.RequestId}]; e != nil && e.token() == g.Token {
			s.lose(key{g.Name, g.RequestId}, e, backend.Loss{Reason: backend.ReasonEvicted})
		}
		s.unlock()
	}
	return nil
}

// moved is the outcome of a move: grant is nil for a wait.
type moved struct {
	grant *lockpb.Grant
	err   error
}

// moves moves holds, or with grants of Request.Grant any hold or wait of the request, to own, in one exchange. A move can
// be repeated.
func (s *service) moves(ctx context.Context, own *session, grants []backend.Grant) []moved {
	out, calls, began := make([]moved, len(grants)), make([]*call, len(grants)), s.clock.Now()
	noted := make([]*lockpb.Grant, len(grants)) // by the connection's goroutine
	s.count(grants, 1)
	defer s.count(grants, -1)
	for i, g := range grants {
		move := &lockpb.Move{Name: g.Name, RequestId: g.RequestID, Token: incarnation(g)}
		x := &call{
			request: &lockpb.Request{Call: &lockpb.Request_Move{Move: move}}, own: own, answer: make(chan *lockpb.Reply, 1),
			note: func(x *call, r *lockpb.Reply) {
				for _, g := range r.GetAcquired().GetGrants() {
					noted[i] = g
					s.hold(own, x.on, g, x.sent)
				}
			},
		}
		if out[i].err = s.start(ctx, x, began); out[i].err == nil {
			calls[i] = x
		}
	}
	for i, x := range calls {
		if x == nil {
			continue
		}
		r, err := s.await(ctx, x)
		if e := r.GetError(); err == nil && e != nil {
			err = replyError(e)
		}
		if out[i].err = err; err == nil {
			out[i].grant = noted[i]
		}
	}
	return out
}

// count counts moves in progress: a push that a hold has left its session is no loss meanwhile.
func (s *service) count(grants []backend.Grant, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range grants {
		k := key{g.Name, g.RequestID}
		if s.moving[k] += n; s.moving[k] == 0 {
			delete(s.moving, k)
		}
	}
}

// incarnation is the server's token in a grant, even if it does not fence; zero for Request.Grant.
func incarnation(g backend.Grant) uint64 {
	token, err := strconv.ParseUint(g.Incarnation, 10, 64)
	if err != nil {
		return 0
	}
	return token
}

// checkEvery is the time between two checks of a queue: the connection tells waiters of their turns.
const checkEvery = time.Second

// Check is engine.Checks's. It asks nobody: each waiter whose state the server has changed has an entry that says so.
func (s *service) Check(_ context.Context, all []engine.Waiters, _ int) ([]engine.Found, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]engine.Found, len(all))
	for i, q := range all {
		out[i].Again = checkEvery
		for n := range q.All {
			if e := s.entries[keyOf(&q.All[n])]; e == nil || e.grant != nil || e.taken {
				out[i].Turns = append(out[i].Turns, n)
			}
		}
	}
	return out, nil
}
