package guardtest

import (
	"context"
	"errors"
	"strings"

	"github.com/fencelock/fencelock/fencing"
)

var handClauses = []Clause{
	{
		ID: "H1", Group: "hand", Slug: "old-view", needs: needHand | needUpdate | needWrite, run: oldView,
		Rule: "a transaction with a view older than a rival's commit is not admitted, " +
			"or reads the rival's write, even with a valid token",
	},
	{
		ID: "H2", Group: "hand", Slug: "refused-is-rolled-back", needs: needHand | needUpdate | needWrite,
		run:  refusedIsRolledBack,
		Rule: "after a refusal, the transaction cannot commit anything",
	},
	{
		ID: "H3", Group: "hand", Slug: "savepoint", needs: needSavepoint | needUpdate | needWrite, run: savepoint,
		Rule: "a check that was rolled back with its savepoint does not admit the writes of the outer transaction",
	},
}

func oldView(t *trial) {
	for _, token := range []fencing.Token{8, 9, 10} { // lower than the rival's, the same, higher
		a, b, name := t.client(), t.client(), t.resource()
		t.update(a, t.claim(name, 7), name, "0")
		err := a.Hand(t.ctx, t.claim(name, token), Hand{
			Early: func() {
				err := t.repeat(func(ctx context.Context) error {
					return b.Update(ctx, t.claim(name, 9), name, func(_ context.Context, old string) (string, error) {
						return old + "B", nil
					})
				})
				if err != nil {
					t.errorf("the rival's section = %v", err)
				}
			},
			Change: func(old string) string { return old + "A" },
		})
		value := t.read(b, name)
		if !strings.Contains(value, "B") || err == nil && !strings.Contains(value, "A") {
			t.errorf("token %v after the rival's 9: %v, and the value is %q: an acknowledged write is lost", token, err,
				value)
		}
		if token < 9 && err == nil {
			t.errorf("token %v was admitted after 9", token)
		}
	}
}

func refusedIsRolledBack(t *trial) {
	c, name := t.client(), t.resource()
	t.update(c, t.claim(name, 34), name, "34")
	for token, reason := range map[fencing.Token]error{33: fencing.ErrStale, 0: fencing.ErrNoToken} {
		err := c.Hand(t.ctx, t.claim(name, token), Hand{
			Early: func() {}, Change: func(string) string { return "written all the same" }, Careless: true,
		})
		if err == nil {
			t.errorf("a careless transaction with token %v = nil, want an error that is %q, or the transaction's",
				token, reason)
		}
		if value := t.read(t.client(), name); value != "34" {
			t.errorf("after a refusal of token %v the value is %q, want 34", token, value)
		}
	}
}

func savepoint(t *trial) {
	a, b, name := t.client(), t.client(), t.resource()
	t.update(a, t.claim(name, 33), name, "33")
	err := a.Savepoint(t.ctx, t.claim(name, 33), func() { t.update(b, t.claim(name, 34), name, "34") }, "late")
	if value := t.read(b, name); value == "late" {
		t.errorf("after a check that was rolled back (%v) the value is %q", err, value)
	}
	if !errors.Is(err, fencing.ErrNested) {
		t.errorf("check in a savepoint = %v, want ErrNested", err)
	}
}
