// This file lets concurrent calls of one verb share a statement and its commit.
//
// A lock costs a disk write: a commit waits for it, whatever the number of names in it. 32 callers with a name each
// had 0.44 of the rate of plain UPDATEs when each acquire committed alone, and 0.98 in a run in which they shared
// (bench/RESULTS.md, PostgreSQL, tput32; the machine was busy in both). No call waits for others to come: the first
// call is sent immediately, and the calls that come meanwhile share the next statement.

package postgres

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
)

// together sends the calls of one verb. A call that comes while no other is in progress is a separate statement. Calls
// that come meanwhile share a statement, which completes those without a conflict and never waits for the row of a
// name. The others are repeated, each call alone: so every refusal is the answer to one call, and a name that one
// caller cannot get delays no other caller.
//
// With ten concurrent callers, the first call is sent alone; the second starts fly, which sends it together with the
// calls that have come by then; the others come while that statement waits for the disk, and share the next one. With
// one caller no statement is shared or delayed.
//
// mu protects single, flying and waiting. No statement runs while it is held.
type together struct {
	d       *Driver
	one     string // the statement of one call
	free    string // of several
	columns func([]*call) []any
	done    string // the state of calls that the shared statement completed

	mu      sync.Mutex // protects the following fields
	single  int        // calls that are sent alone
	flying  bool       // a loop sends the waiting calls
	waiting []*call
}

// call is one exchange, of an acquire or a release, that shares a statement. ended is closed by fly when the statement
// has its answer; did, answer and err are valid after that.
type call struct {
	args   []any // of the statement of one
	ended  chan struct{}
	did    bool // the following fields are valid, once ended is closed
	answer answer
	err    error
}

// mostCalls bounds the calls that share one statement. With two concurrent statements, each did half as much for
// nearly the same cost (260 to 331 µs of processors for a cycle with two, 180 to 220 with one; bench/RESULTS.md).
const mostCalls = 64

// ask returns the answer to one call, which is sent alone if it does not fit among others, or if no call is in
// progress. If ctx ends first, a call that has not been sent never will be, and is ErrUnavailable; a sent call may
// still take effect, and is ErrUnknown.
func (t *together) ask(ctx context.Context, fits bool, args ...any) (answer, error) {
	t.mu.Lock()
	// The call is sent alone: it does not fit, such as a request with a minimum time, or no call is in progress that it
	// could join.
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
	// One loop for each verb. It belongs to the gate, so that Close waits for sent calls.
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
		// The caller leaves; its call must not be sent any more.
		if t.withdraw(c) {
			return answer{}, notSent(ctx, ctx.Err())
		}
		return answer{}, fmt.Errorf("%w: %w", backend.ErrUnknown, ctx.Err())
	}
	// Another transaction was in conflict: ask alone, for a separate answer.
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

// fly sends the waiting calls, mostCalls at a time and one statement after the other, until the list is empty. It
// decides to end under mu, so that a call is either in the list before or starts another fly.
func (t *together) fly(ctx context.Context) {
	for {
		t.mu.Lock()
		// First come, first served.
		calls := slices.Clone(t.waiting[:min(len(t.waiting), mostCalls)])
		// slices.Delete clears the tail, so that the array keeps no call alive.
		t.waiting = slices.Delete(t.waiting, 0, len(calls))
		if len(calls) == 0 {
			t.flying = false
			t.mu.Unlock()
			return
		}
		t.mu.Unlock()
		// callTime bounds the statement, whatever the callers' contexts: one caller's end must not end the others'
		// statement.
		t.send(ctx, calls)
		for _, c := range calls {
			close(c.ended)
		}
	}
}

// send sends all of calls in one statement, and sets the answer of each. An error from the server means that all of it
// was rolled back, and each call gets its own error when it is repeated alone. Any other error, such as a broken
// connection, is the answer to all of them, since the statement may have taken effect. c.did, c.answer and c.err are
// written here and read after ended is closed.
func (t *together) send(ctx context.Context, calls []*call) {
	var places, tokens []int64
	var nonces []string
	var here int64
	before := t.d.position()
	read := func(rows pgx.Rows) error { return rows.Scan(&places, &tokens, &nonces, &here) }
	err := t.d.query(ctx, read, t.free, t.columns(calls)...)
	switch {
	case err == nil:
		err = t.d.saw(before, here)
	case undone(err):
		// The statement had no effect, and no call is marked: each is repeated alone.
		return
	}
	for _, c := range calls {
		c.err = err
	}
	for i, place := range places {
		// places are the calls that the statement completed, from 1; tokens is as long for an acquire, and empty for a
		// release.
		c := calls[place-1]
		c.did, c.answer = true, answer{state: t.done, here: here}
		if i < len(tokens) {
			c.answer.token, c.answer.nonce = tokens[i], nonces[i]
		}
	}
}

// column returns one argument of each call.
func column[T any](calls []*call, i int) []T {
	all := make([]T, len(calls))
	for j, c := range calls {
		all[j] = c.args[i].(T)
	}
	return all
}
