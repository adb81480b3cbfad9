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

// Generations compare before tokens, and nonces tell two holds with one token apart.
func TestJudgeGenerationAndNonce(t *testing.T) {
	type seen = fencing.Seen
	x, y := fencing.NewNonce(), fencing.NewNonce()
	first, second := fencing.Generation{Number: 1, ID: x}, fencing.Generation{Number: 2, ID: y}
	rival := fencing.Generation{Number: 2, ID: x}
	of := func(g fencing.Generation, token fencing.Token, n fencing.Nonce) fencing.Claim {
		return fencing.Claim{Resource: "a", Generation: g, Token: token, Nonce: n}
	}
	none := fencing.Generation{}
	for what, c := range map[string]struct {
		claim fencing.Claim
		seen  seen
		want  error
		after seen
	}{
		"the first with a generation": {of(first, 5, x), seen{Token: 9}, nil, seen{Generation: first, Token: 5, Nonce: x}},
		"a later generation": {
			of(second, 5, x), seen{Generation: first, Token: 9, Nonce: y, Sequence: 3}, nil,
			seen{Generation: second, Token: 5, Nonce: x},
		},
		"an earlier generation": {
			of(first, 99, x), seen{Generation: second, Token: 5}, fencing.ErrStale, seen{Generation: second, Token: 5},
		},
		"no generation, after one": {
			of(none, 99, x), seen{Generation: first, Token: 5}, fencing.ErrStale, seen{Generation: first, Token: 5},
		},
		"a generation with the same number": {
			of(rival, 99, x), seen{Generation: second, Token: 5}, fencing.ErrSpace, seen{Generation: second, Token: 5},
		},
		"a lower token of the same generation": {
			of(first, 4, x), seen{Generation: first, Token: 5}, fencing.ErrStale, seen{Generation: first, Token: 5},
		},
		"the same hold":        {of(none, 5, x), seen{Token: 5, Nonce: x}, nil, seen{Token: 5, Nonce: x}},
		"another hold":         {of(none, 5, y), seen{Token: 5, Nonce: x}, fencing.ErrHold, seen{Token: 5, Nonce: x}},
		"no nonce, after one":  {of(none, 5, fencing.Nonce{}), seen{Token: 5, Nonce: x}, fencing.ErrHold, seen{Token: 5, Nonce: x}},
		"a nonce, after none":  {of(none, 5, x), seen{Token: 5, Sequence: 2}, nil, seen{Token: 5, Nonce: x, Sequence: 2}},
		"no nonce, after none": {of(none, 5, fencing.Nonce{}), seen{Token: 5}, nil, seen{Token: 5}},
		"the next token":       {of(none, 6, y), seen{Token: 5, Nonce: x}, nil, seen{Token: 6, Nonce: y}},
		"the next token without a nonce": {
			of(none, 6, fencing.Nonce{}), seen{Token: 5, Nonce: x}, nil, seen{Token: 6},
		},
		"a later epoch": {of(none, 6, x), seen{Epoch: 1}, fencing.ErrTermsLost, seen{Epoch: 1}},
	} {
		if after, err := fencing.Judge(c.claim, fencing.Terms{}, c.seen); !errors.Is(err, c.want) || after != c.after {
			t.Errorf("%s: Judge(%+v) after %v = %v, %v, want %v, %v", what, c.claim, c.seen, after, err, c.after, c.want)
		}
	}
}

// The texts are read as they were written, and nothing else is.
func TestTexts(t *testing.T) {
	n := fencing.NewNonce()
	for _, want := range []fencing.Seen{
		{}, {Token: 33}, {
			Epoch: 1<<63 - 1, Generation: fencing.Generation{Number: 1<<63 - 1, ID: n}, Token: fencing.MaxToken, Nonce: n,
			Sequence: fencing.MaxSequence,
		},
	} {
		if got, err := fencing.ParseSeen(want.String()); err != nil || got != want {
			t.Errorf("%q is read as %+v, %v", want, got, err)
		}
	}
	for _, want := range []fencing.Terms{
		{}, fencing.NewTerms(), {ID: n, Epoch: 7, Pinned: true, Floor: 9}, {Pinned: true, Space: "= a  -é "},
	} {
		if got, err := fencing.ParseTerms(want.String()); err != nil || got != want {
			t.Errorf("%q is read as %+v, %v", want, got, err)
		}
	}
	for _, bad := range []string{"", "0 33 7", "0 0 33 - 7 ", "0 0 33 - -7", "00 0 33 - 7", "0 1 33 - 7", "0 0 33s - 7", "0 0 33  7"} {
		if got, err := fencing.ParseSeen(bad); !errors.Is(err, fencing.ErrGuardVersion) {
			t.Errorf("%q is read as %+v, %v, want ErrGuardVersion", bad, got, err)
		}
	}
	for _, bad := range []string{"", "0 0 etcd-1", "1 - 0 0 -", "3 - 0 0 -", "2 - 0 0 x", "2 - 0 0", "2 - 0 -1 -"} {
		if got, err := fencing.ParseTerms(bad); !errors.Is(err, fencing.ErrGuardVersion) {
			t.Errorf("%q is read as %+v, %v, want ErrGuardVersion", bad, got, err)
		}
	}
}

// Of a set of claims all that have a sequence are repeated, or it is another write.
func TestJudgeAllOfMixedSets(t *testing.T) {
	of := func(resource string, sequence uint64) fencing.Claim {
		return fencing.Claim{Resource: resource, Token: 5}.At(sequence)
	}
	recall := func(string) (fencing.Seen, error) { return fencing.Seen{Token: 5, Sequence: 3}, nil }
	for what, c := range map[string]struct {
		claims []fencing.Claim
		want   error
		mixed  []string
	}{
		"all":                   {[]fencing.Claim{of("a", 3), of("b", 3)}, fencing.ErrRepeated, nil},
		"all that count":        {[]fencing.Claim{of("a", 3), of("b", 0)}, fencing.ErrRepeated, nil},
		"some":                  {[]fencing.Claim{of("a", 3), of("b", 4), of("c", 3)}, fencing.ErrReordered, []string{"a", "c"}},
		"some, and one earlier": {[]fencing.Claim{of("a", 3), of("b", 2)}, fencing.ErrReordered, nil},
		"none":                  {[]fencing.Claim{of("a", 4), of("b", 0)}, nil, nil},
	} {
		_, err := fencing.JudgeAll(c.claims, fencing.Terms{}, recall)
		var order *fencing.SequenceError
		if !errors.Is(err, c.want) || errors.As(err, &order) && !slices.Equal(order.Mixed, c.mixed) {
			t.Errorf("%s: %v, want %v for %v", what, err, c.want, c.mixed)
		}
		if errors.Is(err, fencing.ErrRepeated) && errors.Is(err, fencing.ErrReordered) {
			t.Errorf("%s: %v is both", what, err)
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
		{Resource: "a", Generation: fencing.Generation{Number: 1}},
		{Resource: "a", Generation: fencing.Generation{ID: fencing.NewNonce()}},
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
		"nil": nil, "an empty set": fencing.Set{}, "an invalid claim": fencing.Set{a, {}},
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
