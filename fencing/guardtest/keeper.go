package guardtest

import (
	"errors"

	"github.com/fencelock/fencelock/fencing"
)

var keeperClauses = []Clause{
	{
		ID: "K1", Group: "keeper", Slug: "begins-anew", needs: needKeeper | needSpace, run: beginsAnew,
		Rule: "after Accept, the guard admits only tokens of the new space, from its floor on, " +
			"and forgets the tokens seen before",
	},
	{
		ID: "K2", Group: "keeper", Slug: "floor", needs: needKeeper, run: floor,
		Rule: "a floor refuses lower tokens for every resource, Raise never lowers it, and it does not change the space",
	},
	{
		ID: "K3", Group: "keeper", Slug: "clean", needs: needKeeper, run: clean,
		Rule: "Clean forgets only tokens that the floor or the epoch refuses anyway",
	},
}

// anew restarts the guard, with the space of all other clauses, when the clause ends.
func (t *trial) anew(c *Client) {
	if err := c.Keeper.Accept(t.ctx, t.h.Space, 0); err != nil {
		t.errorf("Accept(%q, 0) = %v", t.h.Space, err)
	}
}

func beginsAnew(t *trial) {
	c, known, fresh := t.client(), t.resource(), t.resource()
	t.admit(c, known, 2000)
	before, err := c.Keeper.Terms(t.ctx)
	if err != nil || before.Space != t.h.Space {
		t.errorf("Terms = %+v, %v, want the space %q", before, err, t.h.Space)
	}
	if err := c.Keeper.Accept(t.ctx, "replaced", 1000); err != nil {
		t.fatalf("Accept = %v", err)
	}
	defer t.anew(c)
	of := func(name string, token fencing.Token) fencing.Claim {
		return fencing.Claim{Resource: name, Token: token, Space: "replaced"}
	}
	for _, name := range []string{known, fresh} {
		t.refuse(c, t.claim(name, 3000), fencing.ErrSpace, "of the old space")
		t.refuse(t.client(), of(name, 999), fencing.ErrStale, "below the floor")
		if err := t.check(c, of(name, 1000)); err != nil {
			t.errorf("check of the floor's token = %v, want it admitted", err)
		}
		if seen, err := c.Keeper.Seen(t.ctx, name); err != nil || seen.Token != 1000 {
			t.errorf("Seen = %+v, %v, want 1000", seen, err)
		}
	}
	after, err := c.Keeper.Terms(t.ctx)
	if after.ID != before.ID || after.Epoch != before.Epoch+1 || after.Space != "replaced" || after.Floor != 1000 ||
		err != nil {
		t.errorf("Terms = %+v, %v, want %+v in the next epoch, with the space replaced and the floor 1000", after, err,
			before)
	}
}

func floor(t *trial) {
	c, known, fresh := t.client(), t.resource(), t.resource()
	t.admit(c, known, 5)
	defer t.anew(c)
	if err := c.Keeper.Raise(t.ctx, 50); err != nil {
		t.fatalf("Raise(50) = %v", err)
	}
	if err := c.Keeper.Raise(t.ctx, 49); !errors.Is(err, fencing.ErrInvalid) {
		t.errorf("Raise(49) = %v, want ErrInvalid", err)
	}
	for _, name := range []string{known, fresh} {
		t.refuse(c, t.claim(name, 49), fencing.ErrStale, "below the floor")
		t.admit(c, name, 50)
		if t.h.Space != "" {
			other := fencing.Claim{Resource: name, Token: 60, Space: t.h.Space + "-restored"}
			t.refuse(c, other, fencing.ErrSpace, "of another space, after Raise")
		}
	}
}

func clean(t *trial) {
	c, low, high := t.client(), t.resource(), t.resource()
	t.admit(c, low, 5)
	t.admit(c, high, 60)
	at, restored, nonce := t.resource(), t.resource(), fencing.NewNonce()
	t.take(c, t.held(at, 50, nonce, fencing.Generation{}), "at the later floor")
	t.take(c, t.held(restored, 5, nonce, fencing.Generation{Number: 1, ID: nonce}), "of a generation")
	defer t.anew(c)
	if err := c.Keeper.Raise(t.ctx, 50); err != nil {
		t.fatalf("Raise(50) = %v", err)
	}
	removed, err := c.Keeper.Clean(t.ctx)
	if err != nil {
		t.fatalf("Clean = %v", err)
	}
	if seen, err := c.Keeper.Seen(t.ctx, low); err != nil || removed > 0 && seen != (fencing.Seen{}) {
		t.errorf("after Clean = %d the guard remembers %+v, %v", removed, seen, err)
	}
	t.notef("%d resources were forgotten", removed)
	t.refuse(c, t.claim(low, 49), fencing.ErrStale, "below the floor")
	t.refuse(c, t.claim(high, 59), fencing.ErrStale, "below what was admitted")
	t.admit(c, high, 60)
	t.refuse(c, t.claim(at, 50), fencing.ErrHold, "of another hold, at the floor")
	t.refuse(c, t.claim(restored, 60), fencing.ErrStale, "of an earlier generation, above the floor")
}
