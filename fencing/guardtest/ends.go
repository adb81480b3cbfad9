package guardtest

import (
	"context"
	"errors"
	"strings"

	"github.com/fencelock/fencelock/fencing"
)

// End is a way in which a transaction ends before its guarded section does.
type End string

// The ends that the clauses V try, where a resource has them.
const (
	Deadlock       End = "deadlock"        // the database rolled back, and the section's function dropped the error
	ImplicitCommit End = "implicit-commit" // a statement committed what came before it
	Interrupt      End = "interrupt"       // a statement was interrupted, and the transaction rolled back with it
	LostConnection End = "lost-connection" // the connection ended
	ManualCommit   End = "manual-commit"   // a statement said COMMIT
)

// Ended is a guarded section like Client.Update with a transaction that ends early: it shows the claims, reads
// the resource, lets the transaction end, calls ended, writes the result of f, and drops the errors of its
// statements. It returns f's error to the guard.
type Ended func(ctx context.Context, claims fencing.Claims, resource string, ended func(), f Change) error

var endClauses = []Clause{
	endClause("V1", Deadlock, "by a deadlock"),
	endClause("V2", ImplicitCommit, "by an implicit commit"),
	endClause("V3", Interrupt, "by an interrupt"),
	endClause("V4", LostConnection, "with its connection"),
	endClause("V5", ManualCommit, "by a COMMIT in a statement"),
}

func endClause(id string, end End, how string) Clause {
	return Clause{
		ID: id, Group: "ends", Slug: string(end), needs: needUpdate | needWrite, end: end,
		Rule: "a section whose transaction ended " + how + " is not acknowledged, refused or retried, " +
			"and returns ErrUnfenced if any part of it is written",
		run: func(t *trial) {
			t.ended(end, nil)
			t.ended(end, errors.New("the function failed"))
		},
	}
}

// ended lets a rival write after the transaction of a section has ended, and before the section writes. The function
// of the section fails with that error, if it is one.
func (t *trial) ended(end End, failure error) {
	a, b, name := t.client(), t.client(), t.resource()
	t.update(a, t.claim(name, 33), name, "0")
	rival, calls := errors.New("it was not called"), 0
	ctx, cancel := context.WithTimeout(t.ctx, patience)
	defer cancel()
	err := a.Ends[end](ctx, t.claim(name, 33), name, func() {
		ctx, cancel := context.WithTimeout(ctx, 20*blocked) // it is kept out, if the section is still fenced
		defer cancel()
		rival = b.Update(ctx, t.claim(name, 34), name, func(_ context.Context, old string) (string, error) {
			return old + "B", nil
		})
	}, func(_ context.Context, old string) (string, error) {
		calls++
		return old + "A", failure
	})
	value := t.read(b, name)
	switch {
	case err == nil:
		t.errorf("the section is acknowledged after its transaction has ended; the value is %q, and the rival's section was %v",
			value, rival)
	case fencing.Refusal(err):
		t.errorf("the section = %v, which is a refusal", err)
	case errors.Is(err, fencing.ErrUnfenced):
	case strings.Contains(value, "A"), rival == nil && !strings.Contains(value, "B"):
		t.errorf("the value is %q, and the section = %v, want ErrUnfenced; the rival's section was %v", value, err, rival)
	}
	if calls != 1 {
		t.errorf("the section's function was called %d times", calls)
	}
	if failure != nil && err != nil && !errors.Is(err, failure) {
		t.errorf("the section = %v, want the error of its function as well", err)
	}
	t.notef("%v with the function's error %v: %v; the value is %q", end, failure, err, value)
}
