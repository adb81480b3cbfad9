package postgres

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
)

// together sends the calls of one verb. One that comes while none is under way is a statement of its own. Those that come
// meanwhile share a statement and its commit, which does what nobody is in the way of and waits for the row of no name.
// What it does not do is sent again, each call alone: so every refusal is the answer to one call, and a name that is kept
// from one caller keeps nobody else waiting.
type together struct {
	d       *Driver
	one     string // the statement of one call
	free    string // of several
	columns func([]*call) []any
	done    string // the state of those that the statement of several did

	mu      sync.Mutex // protects the following fields
	single  int        // calls that are sent alone
	flying  bool       // a loop sends those that wait
	waiting []*call
}

// call is one acquire or release.
type call struct {
	args   []any // of the statement of one
	ended  chan struct{}
	did    bool // of what follows, once ended is closed
	answer answer
	err    error
}

// mostCalls share one statement. A second statement at the same time would do half as much each for nearly the same cost.
const mostCalls = 64

// ask returns the answer to one call, which is sent alone if it does not fit among others. If ctx ends first it may be
// carried out all the same.
func (t *together) ask(ctx context.Context, fits bool, args ...any) (answer, error) {
	t.mu.Lock()
	if !fits || t.single == 0 && !t.flying {
		t.single++
		t.mu.Unlock()
		defer func() {
			t.mu.Lock()
			t.single--
			t.mu.Unlock()
		}()
		return t.d.ask(ctx, t.one, args...)
	}
	t.flying = t.flying || t.d.gate.Go(t.fly)
	if !t.flying {
		t.mu.Unlock()
		return answer{}, backend.ErrClosed
	}
	c := &call{args: args, ended: make(chan struct{})}
	t.waiting = append(t.waiting, c)
	t.mu.Unlock()
	select {
	case <-c.ended:
	case <-ctx.Done():
		if t.withdraw(c) {
			return answer{}, notSent(ctx, ctx.Err())
		}
		return answer{}, fmt.Errorf("%w: %w", backend.ErrUnknown, ctx.Err())
	}
	if c.err == nil && !c.did {
		return t.d.ask(ctx, t.one, args...)
	}
	return c.answer, c.err
}

// withdraw reports whether c had not been sent, and never will be.
func (t *together) withdraw(c *call) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.waiting, c)
	if i >= 0 {
		t.waiting = slices.Delete(t.waiting, i, i+1)
	}
	return i >= 0
}

// fly sends those that wait until there are none.
func (t *together) fly(ctx context.Context) {
	for {
		t.mu.Lock()
		calls := slices.Clone(t.waiting[:min(len(t.waiting), mostCalls)])
		t.waiting = slices.Delete(t.waiting, 0, len(calls))
		if len(calls) == 0 {
			t.flying = false
			t.mu.Unlock()
			return
		}
		t.mu.Unlock()
		t.send(ctx, calls)
		for _, c := range calls {
			close(c.ended)
		}
	}
}

// send asks for all of calls. An error that the server tells took all of it back, and each is told its own.
func (t *together) send(ctx context.Context, calls []*call) {
	var places, tokens []int64
	var here int64
	before := t.d.position()
	read := func(rows pgx.Rows) error { return rows.Scan(&places, &tokens, &here) }
	err := t.d.query(ctx, read, t.free, t.columns(calls)...)
	switch {
	case err == nil:
		err = t.d.saw(before, here)
	case undone(err):
		return
	}
	for _, c := range calls {
		c.err = err
	}
	for i, place := range places {
		c := calls[place-1]
		c.did, c.answer = true, answer{state: t.done, here: here}
		if i < len(tokens) {
			c.answer.token = tokens[i]
		}
	}
}

// column collects one argument of each call.
func column[T any](calls []*call, i int) []T {
	all := make([]T, len(calls))
	for j, c := range calls {
		all[j] = c.args[i].(T)
	}
	return all
}
