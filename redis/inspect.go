package redis

import (
	"context"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// Look is engine.Inspector's.
func (s *service) Look(ctx context.Context, name string) (backend.State, error) {
	if err := backend.ValidateName(name); err != nil {
		return backend.State{}, err
	}
	answer, err := s.do(ctx, redisscript.Inform, s.keys(name))
	if err != nil {
		return backend.State{}, err
	}
	state, err := stateOf(name, answer)
	if err == nil && state.Waiters > 0 {
		state.Queue, err = lines.Question(ctx, func(ctx context.Context) ([]backend.Waiter, error) {
			return redisconn.Queue(ctx, s.client, s.keys(name))
		})
	}
	return state, err
}

func stateOf(name string, answer any) (backend.State, error) {
	state, ok := redisscript.ParseState(answer)
	if !ok {
		return backend.State{}, errAnswer
	}
	out := backend.State{Name: name, Waiters: state.Waiters}
	holds := state.Shares
	if state.Held {
		holds = []redisscript.State{state}
	}
	for _, held := range holds {
		holder, err := redisconn.HolderOf(held)
		if err != nil {
			return backend.State{}, err
		}
		out.Holders = append(out.Holders, holder)
	}
	out.Held = len(out.Holders) > 0
	return out, nil
}

// pageKeys is the number of keys per SCAN, which blocks the server.
const pageKeys = 1000

// Names is engine.Inspector's: one SCAN of one master, and the values of its keys. after is the number of the master
// and its cursor. SCAN goes by the client and not by a line: it may take long, and would delay the steps of all
// callers.
func (s *service) Names(ctx context.Context, prefix, after string) (page []backend.State, next string, err error) {
	n, text, _ := strings.Cut(after, " ")
	number, _ := strconv.Atoi(n)
	cursor, _ := strconv.ParseUint(text, 10, 64)
	type found struct {
		keys []string
		next uint64
		more bool
	}
	scanned, err := lines.Question(ctx, func(ctx context.Context) (f found, err error) {
		masters, err := lines.Masters(ctx, s.client)
		if err != nil || number >= len(masters) {
			return f, err
		}
		f.more = number+1 < len(masters)
		f.keys, f.next, err = masters[number].Scan(
			ctx, cursor, redisscript.Pattern(s.o.KeyPrefix, prefix), pageKeys).Result()
		return f, err
	})
	if err != nil {
		return nil, "", err
	}
	var names []string
	var steps []*lines.Step
	for _, key := range scanned.keys {
		// A pattern may match queues, marks, and keys of others.
		if name, ok := redisscript.NameOf(s.o.KeyPrefix, key); ok && strings.HasPrefix(name, prefix) {
			names = append(names, name)
			steps = append(steps, lines.NewStep(redisscript.Inform, redisscript.KeysOfLock(key)))
		}
	}
	answers, errs := s.doAll(ctx, steps)
	for i, answer := range answers {
		if errs[i] != nil {
			return nil, "", errs[i]
		}
		state, err := stateOf(names[i], answer)
		if err != nil {
			return nil, "", err
		}
		page = append(page, state)
	}
	switch {
	case scanned.next != 0:
		next = strconv.Itoa(number) + " " + strconv.FormatUint(scanned.next, 10)
	case scanned.more:
		next = strconv.Itoa(number+1) + " 0"
	}
	return page, next, nil
}

// Force is engine.Forcer's. A condition names a value, which the step that ends the hold compares.
func (s *service) Force(ctx context.Context, r backend.ForceRequest) (int, error) {
	keys, start := s.keys(r.Name), ""
	if r.Conditional() {
		answer, err := s.do(ctx, redisscript.Inform, keys)
		if err != nil {
			return 0, err
		}
		state, ok := redisscript.ParseState(answer)
		if !ok {
			return 0, errAnswer
		}
		for _, held := range append(state.Shares, state) {
			if of := held.Hold.Start(); held.Held && r.Matches(redisscript.NonceOf(of), 0) {
				start = of
			}
		}
		if start == "" {
			return 0, nil
		}
	}
	step := lines.NewStep(redisscript.Force, keys, start, redisscript.MarkOf(r.Reason, r.By, r.Principal))
	step.Others = append(step.Others, keys.Marks())
	answer, err := s.send(ctx, step)
	n, ok := answer.(int64)
	if err == nil && !ok {
		err = errAnswer
	}
	return int(n), err
}
