package guardtest

import (
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
)

var holdClauses = []Clause{
	{
		ID: "N1", Group: "holds", Slug: "equal-token", run: equalToken,
		Rule: "an equal token with another nonce, or without a nonce, is refused with ErrHold; " +
			"a greater token has its own nonce",
	},
	{
		ID: "N2", Group: "holds", Slug: "nonce-is-filled", run: nonceIsFilled,
		Rule: "the first nonce that is shown with a token is remembered, as if the token's first claim had included it",
	},
	{
		ID: "N3", Group: "holds", Slug: "generations", run: generations,
		Rule: "a claim of a later generation is admitted whatever its token, a claim of an earlier generation, or of none, " +
			"is refused with ErrStale, and a claim of another generation with the same number is refused with ErrSpace",
	},
}

func (t *trial) held(resource string, token fencing.Token, nonce fencing.Nonce, g fencing.Generation) fencing.Claim {
	c := t.claim(resource, token)
	c.Nonce, c.Generation = nonce, g
	return c
}

// take ends the clause unless the guard admits the claim.
func (t *trial) take(c *Client, claim fencing.Claim, when string) {
	if err := t.check(c, claim); err != nil {
		t.fatalf("%s: check of %+v = %v, want it admitted", when, claim, err)
	}
}

func equalToken(t *trial) {
	a, b, name := t.client(), t.client(), t.resource()
	one, two, never := fencing.NewNonce(), fencing.NewNonce(), fencing.Generation{}
	t.take(a, t.held(name, 33, one, never), "of the first hold")
	for range 2 {
		t.refuse(b, t.held(name, 33, two, never), fencing.ErrHold, "of another hold with the token")
		t.refuse(b, t.claim(name, 33), fencing.ErrHold, "of a hold without a nonce")
		t.take(a, t.held(name, 33, one, never), "again")
	}
	var hold *fencing.HoldError
	if err := t.check(b, t.held(name, 33, two, never)); !errors.As(err, &hold) || hold.Nonce != two || hold.Want != one {
		t.errorf("%v names the holds %+v, want %v and %v", err, hold, two, one)
	}
	t.take(b, t.held(name, 34, two, never), "of the next hold")
	t.refuse(a, t.held(name, 33, one, never), fencing.ErrStale, "of the first hold after the next one")
	t.refuse(a, t.held(name, 34, one, never), fencing.ErrHold, "of the first hold with the next one's token")
	t.take(a, t.claim(name, 35), "of a hold without a nonce, with a greater token")
}

func nonceIsFilled(t *trial) {
	a, b, name := t.client(), t.client(), t.resource()
	one, two, never := fencing.NewNonce(), fencing.NewNonce(), fencing.Generation{}
	t.take(a, t.claim(name, 33), "without a nonce")
	t.take(a, t.held(name, 33, one, never), "with the first nonce")
	t.refuse(b, t.held(name, 33, two, never), fencing.ErrHold, "with another nonce")
	t.refuse(b, t.claim(name, 33), fencing.ErrHold, "without one")
	t.take(b, t.held(name, 33, one, never), "with the first nonce again")
	if a.Keeper != nil {
		seen, err := a.Keeper.Seen(t.ctx, name)
		if err != nil || seen.Token != 33 || seen.Nonce != one {
			t.errorf("Seen = %+v, %v, want the token 33 and the nonce %v", seen, err, one)
		}
	}
}

func generations(t *trial) {
	c, name, nonce := t.client(), t.resource(), fencing.NewNonce()
	first := fencing.Generation{Number: 9, ID: fencing.NewNonce()}
	second := fencing.Generation{Number: 10, ID: fencing.NewNonce()} // greater as a number, and not as text
	other := fencing.Generation{Number: 10, ID: fencing.NewNonce()}
	t.take(c, t.claim(name, 200), "of a service that was never restored")
	t.take(c, t.held(name, 100, nonce, first), "of the first generation")
	t.refuse(c, t.claim(name, 300), fencing.ErrStale, "of no generation")
	t.take(c, t.held(name, 3, nonce, second), "of the second generation")
	t.refuse(c, t.held(name, 2, nonce, second), fencing.ErrStale, "of the second generation, with a lower token")
	t.refuse(c, t.held(name, 400, nonce, first), fencing.ErrStale, "of the first generation")
	t.refuse(c, t.held(name, 400, nonce, other), fencing.ErrSpace, "of another second generation")
	t.refuse(c, t.claim(name, 400), fencing.ErrStale, "of no generation")
	t.take(c, t.held(name, 4, nonce, second), "of the second generation, with a greater token")
}

var memoryClauses = []Clause{
	{
		ID: "I1", Group: "memory", Slug: "terms-lost", needs: needKeeper | needSetTerms, run: termsLost,
		Rule: "without its terms the guard admits nothing, even for a new resource; " +
			"Create does not restore them, only an operator with Accept does",
	},
	{
		ID: "I2", Group: "memory", Slug: "created-anew", needs: needKeeper | needWipe, run: createdAnew,
		Rule: "if a memory is dropped and created again, a guard that has used the former memory returns ErrGuardID",
	},
	{
		ID: "I3", Group: "memory", Slug: "not-created", needs: needKeeper | needWipe, run: notCreated,
		Rule: "before Create, every check returns ErrTermsLost, which is no refusal; a second Create changes nothing",
	},
	{
		ID: "I4", Group: "memory", Slug: "another-format", needs: needKeeper | needSetTerms, run: anotherFormat,
		Rule: "in a memory of another format, checks and operator calls return ErrGuardVersion with both formats, " +
			"and the memory stays unchanged",
	},
	{
		ID: "I5", Group: "memory", Slug: "pinned-id", needs: needKeeper | needPinned, run: pinnedID,
		Rule: "a guard with an ID in its options admits nothing in another memory, and changes nothing there",
	},
	{
		ID: "I6", Group: "memory", Slug: "terms-restored", needs: needKeeper | needSetTerms, run: termsRestored,
		Rule: "a claim on a resource that was seen in a later epoch than that of the terms returns ErrTermsLost; " +
			"an operator deletes the terms and calls Accept",
	},
}

// fails reports an error of the clause unless the guard cannot detect the case, for that reason.
func (t *trial) fails(c *Client, claim fencing.Claim, want error, when string) {
	t.refuse(c, claim, want, when)
	if err := t.check(c, claim); fencing.Refusal(err) {
		t.errorf("%s: check of token %v = %v, which is a refusal", when, claim.Token, err)
	}
}

func (t *trial) must(err error, call string) {
	if err != nil {
		t.fatalf("%s = %v", call, err)
	}
}

func termsLost(t *trial) {
	c, known, fresh := t.client(), t.resource(), t.resource()
	t.admit(c, known, 2000)
	t.must(c.SetTerms(t.ctx, ""), "SetTerms")
	for _, client := range []*Client{c, t.client()} {
		t.fails(client, t.claim(known, 2001), fencing.ErrTermsLost, "of a known resource, without terms")
		t.fails(client, t.claim(fresh, 33), fencing.ErrTermsLost, "of a new resource, without terms")
		t.fails(client, t.claim(known, 2001), fencing.ErrTermsLost, "of a known resource, after one of a new one")
		if err := client.Keeper.Raise(t.ctx, 1); !errors.Is(err, fencing.ErrTermsLost) {
			t.errorf("Raise without terms = %v, want ErrTermsLost", err)
		}
		if t.h.Blind {
			continue
		}
		if err := client.Keeper.Create(t.ctx); !errors.Is(err, fencing.ErrTermsLost) {
			t.errorf("Create of a memory that has lost its terms = %v, want ErrTermsLost", err)
		}
	}
	t.must(t.client().Keeper.Accept(t.ctx, t.h.Space, 2001), "Accept")
	t.fails(c, t.claim(known, 2001), fencing.ErrGuardID, "of a guard that has seen the terms before")
	c = t.client()
	t.refuse(c, t.claim(known, 2000), fencing.ErrStale, "below the floor that was accepted")
	t.admit(c, known, 2001)
	t.admit(c, fresh, 2001)
	t.anew(c)
}

func termsRestored(t *trial) {
	c, name := t.client(), t.resource()
	t.admit(c, name, 10)
	before, err := c.Keeper.Terms(t.ctx)
	t.must(err, "Terms")
	t.must(c.Keeper.Accept(t.ctx, t.h.Space, 0), "Accept")
	t.admit(c, name, 20)
	t.must(c.SetTerms(t.ctx, before.String()), "SetTerms")
	for _, client := range []*Client{c, t.client()} {
		t.fails(client, t.claim(name, 30), fencing.ErrTermsLost, "under terms of an earlier epoch")
	}
	t.must(c.SetTerms(t.ctx, ""), "SetTerms")
	t.must(t.client().Keeper.Accept(t.ctx, t.h.Space, 25), "Accept")
	c = t.client()
	t.refuse(c, t.claim(name, 24), fencing.ErrStale, "below the floor that was accepted")
	t.admit(c, name, 30)
	t.anew(c)
}

func createdAnew(t *trial) {
	c, name := t.client(), t.resource()
	t.admit(c, name, 34)
	t.must(c.Wipe(t.ctx), "Wipe")
	t.fails(c, t.claim(name, 34), fencing.ErrTermsLost, "without a memory")
	t.must(t.client().Keeper.Create(t.ctx), "Create")
	t.fails(c, t.claim(name, 33), fencing.ErrGuardID, "below what was seen, in a memory that was created anew")
	t.fails(c, t.claim(name, 35), fencing.ErrGuardID, "above what was seen, in a memory that was created anew")
	if err := c.Keeper.Raise(t.ctx, 1); !errors.Is(err, fencing.ErrGuardID) {
		t.errorf("Raise in a memory that was created anew = %v, want ErrGuardID", err)
	}
	t.admit(t.client(), name, 33)
}

func notCreated(t *trial) {
	c, name := t.client(), t.resource()
	t.must(c.Wipe(t.ctx), "Wipe")
	for range 2 {
		t.fails(c, t.claim(name, 5), fencing.ErrTermsLost, "before Create")
	}
	t.must(c.Keeper.Create(t.ctx), "Create")
	t.admit(c, name, 5)
	before, err := c.Keeper.Terms(t.ctx)
	t.must(err, "Terms")
	t.must(t.client().Keeper.Create(t.ctx), "Create again")
	if after, err := c.Keeper.Terms(t.ctx); err != nil || after != before || after.ID == (fencing.Nonce{}) {
		t.errorf("after Create again the terms are %+v, %v, want %+v, with an ID", after, err, before)
	}
	t.must(c.Keeper.Migrate(t.ctx), "Migrate")
	t.refuse(c, t.claim(name, 4), fencing.ErrStale, "after Create again")
}

func anotherFormat(t *trial) {
	c, name := t.client(), t.resource()
	t.admit(c, name, 34)
	terms, err := c.Keeper.Terms(t.ctx)
	t.must(err, "Terms")
	later := fmt.Sprintf("%d %v and more", fencing.Format+1, terms.ID)
	t.must(c.SetTerms(t.ctx, later), "SetTerms")
	for _, client := range []*Client{c, t.client()} {
		t.fails(client, t.claim(name, 35), fencing.ErrGuardVersion, "in a memory of a later format")
		var version *fencing.VersionError
		if err := t.check(client, t.claim(name, 35)); !errors.As(err, &version) || version.Found != fencing.Format+1 ||
			version.Want != fencing.Format {
			t.errorf("check in a memory of a later format = %v, want a *VersionError with both formats", err)
		}
		for call, err := range map[string]error{
			"Accept": client.Keeper.Accept(t.ctx, t.h.Space, 0), "Raise": client.Keeper.Raise(t.ctx, 1),
			"Create": client.Keeper.Create(t.ctx), "Migrate": client.Keeper.Migrate(t.ctx),
		} {
			if !errors.Is(err, fencing.ErrGuardVersion) {
				t.errorf("%s in a memory of a later format = %v, want ErrGuardVersion", call, err)
			}
		}
	}
	t.must(c.SetTerms(t.ctx, terms.String()), "SetTerms")
	t.refuse(c, t.claim(name, 33), fencing.ErrStale, "in the format of before")
	t.admit(c, name, 34)
}

func pinnedID(t *trial) {
	c, name := t.client(), t.resource()
	t.admit(c, name, 34)
	terms, err := c.Keeper.Terms(t.ctx)
	t.must(err, "Terms")
	check := func(id fencing.Nonce, token fencing.Token) error {
		return c.Pinned(t.ctx, id, t.claim(name, token))
	}
	if err := check(fencing.NewNonce(), 36); !errors.Is(err, fencing.ErrGuardID) || fencing.Refusal(err) {
		t.errorf("check by a guard with another ID = %v, want ErrGuardID, and no refusal", err)
	}
	if err := check(terms.ID, 35); err != nil {
		t.errorf("check by a guard with the memory's ID = %v, want it admitted", err)
	}
}
