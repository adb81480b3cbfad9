package postgres

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// Leave is engine.Service's: name, request id and token must match, so that a late release ends no later hold. In the
// same transaction the lock goes to the head of the queue, which is notified in the background. A Leave that was not
// answered is repeated: "not held" is a right answer to the repetition too.
func (s *service) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	a, err := s.leave(ctx, l)
	if err != nil && again(err) && ctx.Err() == nil {
		a, err = s.leave(ctx, l)
	}
	if err != nil {
		return engine.Left{}, named(l.Name, err)
	}
	if own, ok := l.Session.(*session); ok {
		own.forget(l.HoldID, l.RequestID)
	}
	left := engine.Left{Was: a.state == "ended", Loss: backend.Loss{
		Reason: backend.Reason(a.reason), Text: a.why, By: a.by, Principal: a.principal,
	}}
	if s.pending() {
		left.Rest = func(ctx context.Context) bool {
			s.flush(ctx)
			return true
		}
	}
	return left, nil
}

func (s *service) leave(ctx context.Context, l engine.Leaving) (answer, error) {
	// The minimum binds by the holder's clock; the server decides by its own clock when it is over.
	keep := l.MinHoldUntil > s.clock.Now()
	args := []any{l.Name, l.RequestID, tokenIn(l.Grant), keep, s.clockKnown()}
	switch {
	case l.Incarnation == "" && l.Place != "":
		return s.ask(ctx, s.sql.leave, l.Name, l.RequestID, s.id+"-", s.clockKnown())
	case l.Incarnation == "":
		return s.ask(ctx, s.sql.release, args...)
	case len(l.Late) > 0: // with a decision, after which they have no effect
		return s.ask(ctx, s.sql.releaseLate, args...)
	}
	return s.together(ctx, s.releases, s.sql.release, l.Name, args)
}

// releaseAll sends releases of different names.
func (s *service) releaseAll(calls [][]any) []shared {
	return s.send(calls, s.sql.release, s.sql.releaseFree, "ended", []any{
		column[string](calls, 0), column[string](calls, 1), column[int64](calls, 2),
	})
}

// tokenIn returns the number of a grant's token in SQL. 0 is any hold of the request, and -1 is no hold: a grant's
// incarnation is its token.
func tokenIn(g backend.Grant) int64 {
	switch {
	case g.Incarnation == "":
		return 0
	case g.Token.Order() == 0, g.Token.String() != g.Incarnation:
		return -1
	}
	return int64(g.Token.Order())
}

// Extend is engine.Service's: one statement compares the holds with the session, and for each other session with some of
// the holds another statement moves these. A known hold that another client has moved to its session stays there, since
// that client has repeated the request.
func (s *service) Extend(ctx context.Context, es engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	own, out := es.(*session), make([]engine.Outcome, len(holds))
	all, grants := make([]int, len(holds)), make([]backend.Grant, len(holds))
	for i, h := range holds {
		all[i], grants[i] = i, h.Grant
	}
	elsewhere, err := s.elsewhere(ctx, own, grants, all, out)
	if err != nil {
		return nil, err
	}
	from := map[string][]int{}
	for i, session := range elsewhere {
		out[i].Err = fmt.Errorf("%w: the hold is on another session", backend.ErrUnavailable)
		if !holds[i].Known || strings.HasPrefix(session, s.id+"-") {
			from[session] = append(from[session], i)
		}
	}
	var moved []int
	for session, some := range from {
		if err := engine.Abandoned(ctx); err != nil {
			return nil, err
		}
		names, ids, tokens := columns(grants, some)
		if _, err := s.write(ctx, s.sql.move, own.id, session, names, ids, tokens, s.clockKnown()); err != nil {
			return nil, err
		}
		moved = append(moved, some...)
	}
	if len(moved) > 0 {
		for _, i := range moved {
			out[i].Err = nil
		}
		elsewhere, err := s.elsewhere(ctx, own, grants, moved, out)
		if err != nil {
			return nil, err
		}
		for i := range elsewhere {
			out[i].Err = fmt.Errorf("%w: the hold moves", backend.ErrUnavailable)
		}
	}
	for i, h := range holds {
		if out[i].Gone {
			own.forget(h.HoldID, h.RequestID)
		} else if !h.Known && out[i].Err == nil {
			own.note(h.HoldID, entry{h.Name, h.RequestID, h.Token})
		}
	}
	return out, nil
}

// elsewhere notes which of some grants are gone, and returns the sessions of the grants that are not on own.
func (s *service) elsewhere(
	ctx context.Context, own *session, grants []backend.Grant, some []int, out []engine.Outcome,
) (sessions map[int]string, err error) {
	seen, err := s.compare(ctx, own, grants, some)
	if err != nil {
		return nil, err
	}
	sessions = map[int]string{}
	for j, place := range seen.places {
		if i := some[place-1]; seen.sessions[j] == "" {
			out[i] = engine.Outcome{Gone: true, Loss: seen.loss(j)}
		} else {
			sessions[i] = seen.sessions[j]
		}
	}
	return sessions, nil
}

// columns returns the columns of some grants for the SQL functions: arrays of names, request ids and tokens.
func columns(grants []backend.Grant, some []int) (names, ids []string, tokens []int64) {
	names, ids, tokens = make([]string, len(some)), make([]string, len(some)), make([]int64, len(some))
	for j, i := range some {
		names[j], ids[j], tokens[j] = grants[i].Name, grants[i].RequestID, tokenIn(grants[i])
	}
	return names, ids, tokens
}

// sorted returns the places of names in the order of their bytes.
func sorted(names []string) []int {
	order := make([]int, len(names))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(names[a], names[b]) })
	return order
}
