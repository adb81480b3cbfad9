package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
)

// Enter is engine.Service's: one statement and one commit for a free name, or a place in the queue. The place names
// its session. The release before grants to the head of the queue; its waiter then only reads its hold.
func (s *service) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	own := r.Session.(*session)
	if err := s.admit(ctx, r); err != nil {
		return engine.Position{}, err
	}
	if r.Wait && r.Place != own.id {
		own.note(r.HoldID, entry{name: r.Name, requestID: r.RequestID}) // the notification may overtake the answer
	}
	p, err := s.enter(ctx, own, r)
	s.flush(ctx)
	own.noteAnswer(r, p, err)
	return s.answered(r, p, err)
}

// admit checks what the statements need beyond the engine's checks: PostgreSQL stores no NUL in text. It starts
// the listener if a request needs notifications.
func (s *service) admit(ctx context.Context, rs ...engine.Entering) error {
	for _, r := range rs {
		for k, v := range r.Metadata {
			if strings.ContainsRune(k+v, 0) {
				return kit.InvalidOption("metadata", k, "key or value contains NUL, which PostgreSQL does not store")
			}
		}
		if r.Wait || r.Lost != nil {
			s.listen()
		}
	}
	return s.attend(ctx)
}

// answered makes some errors the end of the attempt: a notice during the commit, which a repetition could not undo.
func (s *service) answered(r engine.Entering, p engine.Position, err error) (engine.Position, error) {
	switch {
	case errors.Is(err, errNotice), sqlState(err) == "FL002":
		if !errors.Is(err, backend.ErrUnknown) {
			err = fmt.Errorf("%w: %w", backend.ErrUnknown, err)
		}
		return engine.Position{Placed: true, Place: r.Session.(*session).id}, &engine.Refusal{Err: err}
	case errors.Is(err, engine.ErrNoSession):
		return p, err
	}
	return p, named(r.Name, err)
}

func (s *service) enter(ctx context.Context, own *session, r engine.Entering) (engine.Position, error) {
	if r.Place == own.id {
		states, err := s.poll(ctx, []engine.Entering{r})
		if err != nil || len(states) == 0 {
			return engine.Position{}, err
		}
		switch st := states[0]; {
		case st.state == "waiting":
			return engine.Position{Placed: true, Place: own.id}, nil
		case st.state == "granted" && st.session == own.id:
			return s.holding(r.Request, answer{token: st.token, minLeft: st.minLeft, nonce: st.nonce, queued: true}), nil
		}
		// The place is gone, or another attempt has moved the hold.
	}
	if err := s.dropLapsed(ctx, r); err != nil {
		return engine.Position{}, err
	}
	args := append(arguments(own, r.Request), r.Wait, r.MinHold.Milliseconds(), s.clockKnown())
	var a answer
	var err error
	switch {
	case r.Again:
		a, err = s.ask(ctx, s.sql.acquireAgain, append(args, append([]string{}, r.Under...))...)
	case r.Wait && len(r.Under) > 0:
		a, err = s.ask(ctx, s.sql.acquireUnder, append(args, r.Under)...)
	case r.MinHold > 0:
		a, err = s.ask(ctx, s.sql.acquire, args...)
	default:
		a, err = s.together(ctx, s.acquires, s.sql.acquire, r.Name, args)
	}
	if err != nil {
		return engine.Position{}, err
	}
	return s.positionOf(ctx, own, r, a)
}

// dropLapsed drops the minimum of a hold that this attempt was granted on a session that is over: no caller has it, and
// it would refuse the repetition.
func (s *service) dropLapsed(ctx context.Context, r engine.Entering) error {
	if !r.Again || r.MinHold == 0 {
		return nil
	}
	return s.exec(ctx, s.sql.lapsed, r.Name, r.RequestID, s.clockKnown())
}

// positionOf returns the position of a request, or an error, for the server's answer.
func (s *service) positionOf(
	ctx context.Context, own *session, r engine.Entering, a answer,
) (engine.Position, error) {
	switch a.state {
	case "granted":
		return s.holding(r.Request, a), nil
	case "waiting":
		return engine.Position{Placed: true, Place: own.id}, nil
	case "no-session":
		return engine.Position{}, engine.ErrNoSession
	case "mismatch":
		return engine.Position{}, s.mismatch(ctx, r.Name)
	case "held":
		return engine.Position{Holder: &backend.HeldError{
			Name: r.Name, Holder: a.holder, HoldID: a.holdID, RetryAfter: time.Duration(a.retry) * time.Millisecond,
		}}, nil
	case "deadlock":
		return engine.Position{}, deadlock(r.Request, a)
	}
	return engine.Position{}, fmt.Errorf("%w: the server answered %q", backend.ErrUnknown, a.state)
}

// holding is the position of a hold. The end of its minimum counts from the answer: the minimum binds others, and its
// end on our clock is only a hint for the release.
func (s *service) holding(r backend.Request, a answer) engine.Position {
	p := engine.Position{Held: true, Placed: true, Token: tokenOf(r.Kind, a.token), Nonce: nonceOf(a.nonce), Queued: a.queued}
	p.Incarnation = p.Token.String()
	if a.minLeft > 0 && r.MinHold > 0 {
		p.MinHoldUntil = s.clock.Now().Add(time.Duration(a.minLeft) * time.Millisecond)
	}
	return p
}

// shared is the answer to one of the calls that share a statement.
type shared struct {
	answer
	done bool // the statement has completed the call, or its outcome is unknown
	err  error
}

// together is one exchange of a call that may share a statement with others. The statement of several skips the calls
// that are in conflict with another transaction, and does not wait for rows: these are repeated alone, so that a
// refusal or a wait affects its caller only.
func (s *service) together(
	ctx context.Context, batch *engine.Batch[[]any, shared], one, name string, args []any,
) (answer, error) {
	select {
	case a := <-batch.Send(name, args):
		if !a.done {
			return s.ask(ctx, one, args...)
		}
		return a.answer, a.err
	case <-ctx.Done():
		return answer{}, ctx.Err()
	}
}

// acquireAll sends acquires of different names.
func (s *service) acquireAll(calls [][]any) []shared {
	return s.send(calls, s.sql.acquire, s.sql.acquireFree, "granted", requests(calls))
}

// send sends one call with its own statement, and several in another one. An error from the server means that all of it
// was rolled back, and each call gets its own error when it is repeated alone. Any other error, such as a broken
// connection, is the answer to all of them, since the statement may have taken effect.
func (s *service) send(calls [][]any, one, free, done string, columns []any) []shared {
	ctx, cancel := context.WithTimeout(s.life, callTime)
	defer cancel()
	out := make([]shared, len(calls))
	if len(calls) == 1 {
		out[0].answer, out[0].err = s.ask(ctx, one, calls[0]...)
		out[0].done = true
		return out
	}
	var places, tokens []int64
	var nonces []string
	var here int64
	before := s.position()
	err := s.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&places, &tokens, &nonces, &here) }, free, columns...)
	switch {
	case err == nil:
		err = s.saw(before, here)
	case undone(err):
		return out
	}
	if err != nil {
		for i := range out {
			out[i] = shared{done: true, err: err}
		}
		return out
	}
	for i, place := range places { // from 1; the statement of releases returns no tokens
		a := &out[place-1]
		a.done, a.state, a.here = true, done, here
		if i < len(tokens) {
			a.token, a.nonce = tokens[i], nonces[i]
		}
	}
	return out
}

// arguments returns the arguments of the SQL function acquire, in its order: a row of the table holds, as far as the
// client knows it.
func arguments(own *session, r backend.Request) []any {
	return []any{
		r.Name, r.RequestID, r.HoldID, own.id, r.Owner, int(r.Kind), r.Permits, r.Limit, metadataText(r.Metadata),
	}
}

// requests returns the columns of the arguments of several calls, each an array, as acquire_free and acquire_all take
// them.
func requests(calls [][]any) []any {
	return []any{
		column[string](calls, 0), column[string](calls, 1), column[string](calls, 2), column[string](calls, 3),
		column[string](calls, 4), column[int](calls, 5), column[int](calls, 6), column[int](calls, 7),
		column[*string](calls, 8),
	}
}

// column returns one argument of each call.
func column[T any](calls [][]any, i int) []T {
	all := make([]T, len(calls))
	for j, c := range calls {
		all[j] = c[i].(T)
	}
	return all
}

// metadataText returns metadata as JSON, or nil if it is empty, which is stored as null.
func metadataText(m map[string]string) *string {
	if len(m) == 0 {
		return nil
	}
	text, _ := json.Marshal(m) // a map of strings
	s := string(text)
	return &s
}

// EnterSet is engine.Sets's: all names or no name, in one statement. The rows of the names are locked in the order of
// their bytes, so that two sets never wait for each other in a circle. A set that waits keeps no place in the queues,
// since at the head of one queue it would close that name while it waits for another.
func (s *service) EnterSet(ctx context.Context, rs []engine.Entering) ([]engine.Position, error) {
	all, err := s.enterSet(ctx, rs)
	s.flush(ctx)
	if err == nil && len(all) == len(rs) {
		for i, r := range rs {
			r.Session.(*session).noteAnswer(r, all[i], nil)
		}
		return all, nil
	}
	var p engine.Position
	if len(all) > 0 {
		p = all[0]
	}
	p, err = s.answered(rs[0], p, err)
	return []engine.Position{p}, err
}

// setEvery is about the time between two tries of a set that waits.
const setEvery = 30 * time.Millisecond

func (s *service) enterSet(ctx context.Context, rs []engine.Entering) ([]engine.Position, error) {
	if err := s.admit(ctx, rs...); err != nil {
		return nil, err
	}
	own, calls, at := rs[0].Session.(*session), make([][]any, len(rs)), map[string]int{}
	for i, r := range rs {
		if err := s.dropLapsed(ctx, r); err != nil {
			return nil, err
		}
		calls[i], at[r.Name] = arguments(own, r.Request), i
	}
	// One answer for each name, in the order of the names, or a single answer that refuses all.
	var answers []answer
	before := s.position()
	err := s.query(ctx, func(rows pgx.Rows) error {
		var a answer
		err := a.scan(rows)
		answers = append(answers, a)
		return err
	}, s.sql.acquireAll, append(requests(calls), rs[0].MinHold.Milliseconds(), s.clockKnown())...)
	for _, a := range answers {
		s.wake(a.wake)
		if err == nil {
			err = s.saw(before, a.here)
		}
	}
	if err != nil {
		return nil, err
	}
	if len(answers) == 1 && answers[0].state != "granted" {
		r := rs[0]
		if i, ok := at[answers[0].name]; ok {
			r = rs[i]
		}
		p, err := s.positionOf(ctx, own, r, answers[0])
		if p.Poll = r.Wait && p.Holder != nil; p.Poll {
			p.Holder.RetryAfter = setEvery // no release notifies it
		}
		return []engine.Position{p}, err
	}
	if len(answers) != len(rs) {
		return nil, fmt.Errorf("%w: the server answered %d of %d requests", backend.ErrUnknown, len(answers), len(rs))
	}
	all := make([]engine.Position, len(rs))
	names := column[string](calls, 0)
	for j, i := range sorted(names) {
		if all[i], err = s.positionOf(ctx, own, rs[i], answers[j]); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// mismatch returns the present use of a name. It asks the server once more, to inform people: the other user of the
// name may have left meanwhile, and without an answer the error names no user.
func (s *service) mismatch(ctx context.Context, name string) error {
	e := &backend.LimitError{Name: name}
	var kind int16
	err := s.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&kind, &e.Limit, &e.Holder) }, s.sql.use, name)
	if err != nil {
		return &backend.LimitError{Name: name}
	}
	e.Kind = backend.Kind(kind)
	return e
}

// deadlock returns the cycle that a request would have closed. The answer has a link for each blocker on the way: the
// name that the link before it waits for. The last one is a hold of the request's caller.
func deadlock(r backend.Request, a answer) error {
	last := len(a.cycleNames) - 1
	e := &backend.DeadlockError{Cycle: []backend.DeadlockEdge{
		{Owner: r.Owner, Holds: a.cycleNames[last], Wants: a.cycleNames[0]},
	}}
	for i := range last {
		e.Cycle = append(e.Cycle, backend.DeadlockEdge{
			Owner: a.cycleOwners[i], Holds: a.cycleNames[i], Wants: a.cycleNames[i+1],
		})
	}
	return e
}

// tokenOf returns the token of a hold: the number that the server computed in the UPDATE that grants, marked unless
// the hold is exclusive. The number is a position in the server's history and not a count, because a counter in a row,
// and a sequence, fall back when a lagging standby is promoted, and reissue tokens (TestAsynchronousFailover;
// TestMutants has drivers that do so).
func tokenOf(kind backend.Kind, order int64) fencing.Token {
	token := fencing.Token(order)
	if kind != backend.KindExclusive {
		token = token.NotExclusive()
	}
	return token
}

// nonceOf reads a nonce as the database writes it: a UUID, with or without hyphens. It is zero for a hold without one,
// from an earlier version.
func nonceOf(text string) fencing.Nonce {
	n, _ := fencing.ParseNonce(strings.ReplaceAll(text, "-", ""))
	return n
}
