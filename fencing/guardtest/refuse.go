package guardtest

import (
	"errors"

	"github.com/fencelock/fencelock/fencing"
)

var refuseClauses = []Clause{
	{
		ID: "R1", Group: "refuses", Slug: "stale", run: refusesStale,
		Rule: "a token lower than the highest admitted token is refused with ErrStale",
	},
	{
		ID: "R2", Group: "refuses", Slug: "zero", run: refusesZero,
		Rule: "the zero token is refused with ErrNoToken, even for a new resource",
	},
	{
		ID: "R3", Group: "refuses", Slug: "not-exclusive", run: refusesNotExclusive,
		Rule: "the token of a shared hold or of permits is refused with ErrNotExclusive, however high",
	},
	{
		ID: "R4", Group: "refuses", Slug: "another-space", needs: needSpace, run: refusesAnotherSpace,
		Rule: "a token of another space, or without a space, is refused with ErrSpace, however high",
	},
	{
		ID: "R5", Group: "refuses", Slug: "tells-both-tokens", run: tellsBothTokens,
		Rule: "each refusal has its own error type, with the refused token and the highest admitted token",
	},
	{
		ID: "R6", Group: "refuses", Slug: "leaves-no-trace", run: leavesNoTrace,
		Rule: "the guard does not remember refused tokens",
	},
	{
		ID: "R7", Group: "refuses", Slug: "poison", run: refusesPoison,
		Rule: "a token above fencing.MaxToken, which would lock out all later holders, is not admitted",
	},
}

func refusesPoison(t *trial) {
	c, name := t.client(), t.resource()
	for _, token := range []fencing.Token{fencing.MaxToken + 1, 1<<63 - 1} {
		if err := t.check(c, t.claim(name, token)); err == nil {
			t.errorf("check of token %v = nil, want an error", token)
		}
	}
	t.admit(c, name, 1)
}

func refusesStale(t *trial) {
	a, b, name := t.client(), t.client(), t.resource()
	t.admit(a, name, 33)
	t.admit(b, name, 34)
	t.refuse(a, t.claim(name, 33), fencing.ErrStale, "after a higher token from another client")
	t.refuse(b, t.claim(name, 1), fencing.ErrStale, "after a higher token from the same client")
	t.refuse(t.client(), t.claim(name, 33), fencing.ErrStale, "from a new client")
}

func refusesZero(t *trial) {
	c, name := t.client(), t.resource()
	t.refuse(c, t.claim(name, 0), fencing.ErrNoToken, "for a new resource")
	t.admit(c, name, 1)
	t.refuse(c, t.claim(name, 0), fencing.ErrNoToken, "after a token")
}

func refusesNotExclusive(t *trial) {
	c, name := t.client(), t.resource()
	t.refuse(c, t.claim(name, fencing.Token(7).NotExclusive()), fencing.ErrNotExclusive, "for a new resource")
	t.admit(c, name, 7)
	t.refuse(c, t.claim(name, fencing.Token(7).NotExclusive()), fencing.ErrNotExclusive,
		"with the number that was admitted")
	t.refuse(c, t.claim(name, fencing.Token(8).NotExclusive()), fencing.ErrNotExclusive, "with a higher number")
}

func refusesAnotherSpace(t *trial) {
	c, name := t.client(), t.resource()
	other := func(space string, token fencing.Token) fencing.Claim {
		return fencing.Claim{Resource: name, Token: token, Space: space}
	}
	t.admit(c, t.resource(), 1) // of the space of all claims of this suite, and of the first one
	t.refuse(c, other(t.h.Space+"-restored", 5), fencing.ErrSpace, "for a new resource, of another space")
	t.refuse(c, other("", 5), fencing.ErrSpace, "for a new resource, of no space")
	t.admit(c, name, 5)
	t.refuse(c, other(t.h.Space+"-restored", 9), fencing.ErrSpace, "of another space")
	t.refuse(c, other("", 9), fencing.ErrSpace, "of no space")
	t.admit(c, name, 6)
}

func tellsBothTokens(t *trial) {
	c, name := t.client(), t.resource()
	t.admit(c, name, 40)
	shared := fencing.Token(41).NotExclusive()
	tell := func(claim fencing.Claim, want fencing.Token,
		tokens func(error) (resource string, token, highest fencing.Token)) {
		err := t.check(c, claim)
		resource, token, highest := tokens(err)
		if resource != name || token != want || highest != 40 {
			t.errorf("%#v has the resource %q and the tokens %v and %v, want %q, %v and 40", err, resource, token,
				highest, name, want)
		}
	}
	tell(t.claim(name, 39), 39, func(err error) (string, fencing.Token, fencing.Token) {
		if e := (*fencing.StaleError)(nil); errors.As(err, &e) {
			return e.Resource, e.Token, e.Highest
		}
		return "", 0, 0
	})
	tell(t.claim(name, 0), 0, func(err error) (string, fencing.Token, fencing.Token) {
		if e := (*fencing.NoTokenError)(nil); errors.As(err, &e) {
			return e.Resource, 0, e.Highest
		}
		return "", 0, 0
	})
	tell(t.claim(name, shared), shared, func(err error) (string, fencing.Token, fencing.Token) {
		if e := (*fencing.NotExclusiveError)(nil); errors.As(err, &e) {
			return e.Resource, e.Token, e.Highest
		}
		return "", 0, 0
	})
	if t.h.Space == "" {
		return
	}
	tell(fencing.Claim{Resource: name, Token: 42, Space: "elsewhere"}, 42,
		func(err error) (string, fencing.Token, fencing.Token) {
			e := (*fencing.SpaceError)(nil)
			if !errors.As(err, &e) {
				return "", 0, 0
			}
			if e.Space != "elsewhere" || e.Want != t.h.Space {
				t.errorf("%#v has the spaces %q and %q, want elsewhere and %q", err, e.Space, e.Want, t.h.Space)
			}
			return e.Resource, e.Token, e.Highest
		})
}

func leavesNoTrace(t *trial) {
	c, name := t.client(), t.resource()
	_ = t.check(c, t.claim(name, 0))
	_ = t.check(c, t.claim(name, fencing.Token(99).NotExclusive()))
	if t.h.Space != "" {
		_ = t.check(c, fencing.Claim{Resource: name, Token: 99, Space: "elsewhere"})
	}
	t.admit(c, name, 5)
	t.refuse(c, t.claim(name, 3), fencing.ErrStale, "below what was admitted")
	t.refuse(c, t.claim(name, 4), fencing.ErrStale, "above what was refused, and below what was admitted")
	if t.h.Space != "" {
		_ = t.check(c, fencing.Claim{Resource: name, Token: 99, Space: "elsewhere"})
	}
	_ = t.check(c, t.claim(name, fencing.Token(99).NotExclusive()))
	t.admit(c, name, 5)
	if highest := t.highest(c, name); highest != 5 {
		t.errorf("after refusals the guard remembers %v, want 5", highest)
	}
}
