package fencing_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/fencing"
)

func TestJudge(t *testing.T) {
	shared := fencing.Token(9).NotExclusive()
	type seen = fencing.Seen
	of := func(token fencing.Token, space string, sequence uint64) fencing.Claim {
		return fencing.Claim{Token: token, Space: space, Sequence: sequence}
	}
	for _, c := range []struct {
		claim fencing.Claim
		terms fencing.Terms
		seen  seen
		want  error
		after seen
	}{
		{of(5, "", 0), fencing.Terms{}, seen{}, nil, seen{Token: 5}},
		{of(5, "", 0), fencing.Terms{}, seen{Token: 5}, nil, seen{Token: 5}},
		{of(5, "a", 0), fencing.Terms{}, seen{Token: 5}, nil, seen{Token: 5}}, // no space to compare with
		{of(5, "a", 0), fencing.Terms{Space: "a"}, seen{}, nil, seen{Token: 5}},
		{of(4, "", 0), fencing.Terms{}, seen{Token: 5}, fencing.ErrStale, seen{Token: 5}},
		{of(0, "", 0), fencing.Terms{}, seen{}, fencing.ErrNoToken, seen{}},
		{of(shared, "", 0), fencing.Terms{}, seen{Token: 5}, fencing.ErrNotExclusive, seen{Token: 5}},
		{of(9, "b", 0), fencing.Terms{Space: "a"}, seen{Token: 5}, fencing.ErrSpace, seen{Token: 5}},
		{of(9, "", 0), fencing.Terms{Space: "a"}, seen{Token: 5}, fencing.ErrSpace, seen{Token: 5}},
		{of(9, "", 0), fencing.Terms{Floor: 10}, seen{Token: 5}, fencing.ErrStale, seen{Token: 5}},
		// What was seen is of an old epoch.
		{of(9, "", 0), fencing.Terms{Epoch: 1, Floor: 9}, seen{Token: 50}, nil, seen{Epoch: 1, Token: 9}},
		{of(8, "", 0), fencing.Terms{Epoch: 1, Floor: 9}, seen{Token: 50}, fencing.ErrStale, seen{Epoch: 1}},
		{of(5, "", 3), fencing.Terms{}, seen{Token: 4, Sequence: 8}, nil, seen{Token: 5, Sequence: 3}},
		{of(5, "", 4), fencing.Terms{}, seen{Token: 5, Sequence: 3}, nil, seen{Token: 5, Sequence: 4}},
		{of(5, "", 3), fencing.Terms{}, seen{Token: 5, Sequence: 3}, fencing.ErrRepeated, seen{Token: 5, Sequence: 3}},
		{of(5, "", 2), fencing.Terms{}, seen{Token: 5, Sequence: 3}, fencing.ErrReordered, seen{Token: 5, Sequence: 3}},
		{of(5, "", 0), fencing.Terms{}, seen{Token: 5, Sequence: 3}, nil, seen{Token: 5, Sequence: 3}},
	} {
		if after, err := fencing.Judge(c.claim, c.terms, c.seen); !errors.Is(err, c.want) || after != c.after {
			t.Errorf("Judge(%+v, %+v, %+v) = %+v, %v, want %+v, %v",
				c.claim, c.terms, c.seen, after, err, c.after, c.want)
		}
	}
}

// A write that was repeated may be so only if none of its claims is refused.
func TestJudgeAll(t *testing.T) {
	a, b := fencing.Claim{Resource: "a", Token: 5}.At(3), fencing.Claim{Resource: "b", Token: 5}
	for highest, want := range map[fencing.Token]error{5: fencing.ErrRepeated, 6: fencing.ErrStale} {
		_, err := fencing.JudgeAll([]fencing.Claim{a, b}, fencing.Terms{}, func(resource string) (fencing.Seen, error) {
			if resource == "a" {
				return fencing.Seen{Token: 5, Sequence: 3}, nil
			}
			return fencing.Seen{Token: highest}, nil
		})
		if !errors.Is(err, want) {
			t.Errorf("the other claim's token is %v of %v: %v, want %v", b.Token, highest, err, want)
		}
	}
}

func TestClaimValidate(t *testing.T) {
	for _, good := range []fencing.Claim{
		{Resource: "a"}, {Resource: strings.Repeat("é", 256), Space: strings.Repeat("s", 255)}, {Resource: " a/B c "},
	} {
		if err := good.Validate(); err != nil {
			t.Errorf("%.20q of %.20q: %v", good.Resource, good.Space, err)
		}
	}
	for _, bad := range []fencing.Claim{
		{}, {Resource: "a\x00"}, {Resource: "a\n"}, {Resource: "\xff"}, {Resource: strings.Repeat("a", 513)},
		{Resource: "a", Token: fencing.MaxToken + 1}, {Resource: "a", Token: 1, Sequence: fencing.MaxSequence + 1},
		{Resource: "a", Space: "\t"}, {Resource: "a", Space: strings.Repeat("s", 256)},
	} {
		err := bad.Validate()
		var invalid *fencing.InvalidError
		if !errors.Is(err, fencing.ErrInvalid) || !errors.As(err, &invalid) || len(err.Error()) > 200 {
			t.Errorf("%.20q of %.20q: %v, want a short *InvalidError", bad.Resource, bad.Space, err)
		}
	}
	if err := new(fencing.Memory).Check(
		t.Context(), fencing.Claim{Resource: "", Token: 1},
	); !errors.Is(err, fencing.ErrInvalid) {
		t.Errorf("Memory.Check of no resource = %v, want ErrInvalid", err)
	}
}

// What came with a request is not what goes out with the calls that its handler makes.
func TestContextsCarryClaims(t *testing.T) {
	want := fencing.Claim{Resource: "a", Token: 7, Space: "s"}
	in, out := fencing.NewIncomingContext(t.Context(), want), fencing.NewOutgoingContext(t.Context(), want)
	if got, ok := fencing.FromIncomingContext(in); !ok || got != want {
		t.Errorf("incoming: %+v, %v; want %+v", got, ok, want)
	}
	if got, ok := fencing.FromOutgoingContext(out); !ok || got != want {
		t.Errorf("outgoing: %+v, %v; want %+v", got, ok, want)
	}
	if got, ok := fencing.FromOutgoingContext(in); ok {
		t.Errorf("a request's claim leaks into what its handler sends: %+v", got)
	}
	if got, ok := fencing.FromIncomingContext(out); ok {
		t.Errorf("a claim to send is taken for one that came: %+v", got)
	}
}

func TestSorted(t *testing.T) {
	a, b := fencing.Claim{Resource: "a", Token: 7}, fencing.Claim{Resource: "b", Token: 5}
	given := fencing.Set{b, a, b}
	got, err := fencing.Sorted(given)
	if err != nil || !slices.Equal(got, []fencing.Claim{a, b}) {
		t.Errorf("Sorted = %v, %v; want a and b", got, err)
	}
	if !slices.Equal(given, fencing.Set{b, a, b}) {
		t.Errorf("the caller's set was changed: %v", given)
	}
	for what, bad := range map[string]fencing.Claims{
		"nil": nil, "an empty set": fencing.Set{}, "one that is not valid": fencing.Set{a, {}},
		"two tokens for one resource": fencing.Set{a, {Resource: "a", Token: 8}},
	} {
		if _, err := fencing.Sorted(bad); !errors.Is(err, fencing.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", what, err)
		}
		if err := new(fencing.Memory).Check(t.Context(), bad); !errors.Is(err, fencing.ErrInvalid) {
			t.Errorf("Memory.Check of %s: %v, want ErrInvalid", what, err)
		}
	}
}

// A set is admitted as a whole or not at all.
func TestMemoryAdmitsAllOrNone(t *testing.T) {
	var g fencing.Memory
	a, b := fencing.Claim{Resource: "a", Token: 7}, fencing.Claim{Resource: "b", Token: 5}
	if err := g.Check(t.Context(), fencing.Claim{Resource: "b", Token: 6}); err != nil {
		t.Fatal(err)
	}
	if err := g.Check(t.Context(), fencing.Set{a, b}); !errors.Is(err, fencing.ErrStale) {
		t.Errorf("a set with a stale token: %v, want ErrStale", err)
	}
	a.Token = 3
	if err := g.Check(t.Context(), a); err != nil {
		t.Errorf("the other half of the refused set is remembered: %v", err)
	}
}

// Do keeps everybody else out until the write is done, and what it admitted is remembered also if the write fails.
func TestMemoryDo(t *testing.T) {
	var g fencing.Memory
	failed := errors.New("disk full")
	value := 0
	do := func(token fencing.Token, err error) error {
		return g.Do(t.Context(), fencing.Claim{Resource: "a", Token: token},
			func() error { value = int(token); return err })
	}
	for _, step := range []struct {
		token       fencing.Token
		fails, want error
		value       int
	}{
		{33, nil, nil, 33}, {34, failed, failed, 34}, {33, nil, fencing.ErrStale, 34}, {34, nil, nil, 34},
	} {
		if err := do(step.token, step.fails); !errors.Is(err, step.want) || value != step.value {
			t.Errorf("Do with %v = %v, and the value is %d; want %v and %d",
				step.token, err, value, step.want, step.value)
		}
	}
}
