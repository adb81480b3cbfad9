package conformance

import (
	"errors"

	"github.com/fencelock/fencelock/backend"
)

// conflictClauses cover the holder's details in a refusal.
var conflictClauses = []Clause{
	{
		ID: "Q10", Group: "permits", Slug: "limit-conflict-names-the-holder", caps: backend.CapPermits,
		run:  limitConflictNamesTheHolder,
		Rule: "an ErrLimitMismatch is a *LimitError with the name, the kind and limit in use, and a holder",
	},
	{
		ID: "M6", Group: "multi", Slug: "refused-set-names-the-lock", caps: backend.CapMultiAcquire,
		run:  refusedSetNamesTheLock,
		Rule: "if a name of a set is held, AcquireAll returns a *HeldError with that name",
	},
}

func limitConflictNamesTheHolder(t *trial) {
	a, b := t.client(), t.client()
	permits, plain := t.permits(t.name(), 1, 3), t.request(t.name())
	t.take(a, permits, "of a free name")
	t.take(a, plain, "of a free name")
	for what, r := range map[string]backend.Request{
		"permits of another limit":         t.permits(permits.Name, 1, 4),
		"an exclusive hold beside permits": t.request(permits.Name),
		"permits beside an exclusive hold": t.permits(plain.Name, 1, 3),
	} {
		want := backend.LimitError{Name: r.Name, Kind: backend.KindPermits, Limit: 3, Holder: permits.Owner}
		if r.Name == plain.Name {
			want.Kind, want.Limit, want.Holder = backend.KindExclusive, 0, plain.Owner
		}
		_, err := t.try(b, r)
		if got := (*backend.LimitError)(nil); !errors.As(err, &got) || *got != want {
			t.Errorf("%s = %v, want a *LimitError with %+v", what, err, want)
		}
	}
}

func refusedSetNamesTheLock(t *trial) {
	a, b := t.client(), t.client()
	rs := t.three()
	for i := range rs {
		g := t.take(a, t.request(rs[i].Name), "of a free name")
		_, err := t.all(t.within(ample), b, rs, false)
		if held := (*backend.HeldError)(nil); !errors.As(err, &held) || held.Name != rs[i].Name {
			t.Errorf("a set whose name %d of 3 is held = %v, want a *HeldError with the name %q", i+1, err, rs[i].Name)
		}
		t.release(a, g, "by the holder")
	}
}
