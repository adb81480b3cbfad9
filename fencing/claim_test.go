package fencing_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/fencing"
)

func TestJudge(t *testing.T) {
	shared := fencing.Token(9).NotExclusive()
	for _, c := range []struct {
		claim fencing.Claim
		space string
		seen  fencing.Seen
		want  error
	}{
		{fencing.Claim{Token: 5}, "", fencing.Seen{}, nil},
		{fencing.Claim{Token: 5}, "", fencing.Seen{Token: 5}, nil},
		{fencing.Claim{Token: 5, Space: "a"}, "", fencing.Seen{Token: 5}, nil}, // trusts every space
		{fencing.Claim{Token: 5, Space: "a"}, "a", fencing.Seen{Space: "a"}, nil},
		{fencing.Claim{Token: 4}, "", fencing.Seen{Token: 5}, fencing.ErrStale},
		{fencing.Claim{}, "", fencing.Seen{}, fencing.ErrNoToken},
		{fencing.Claim{Token: shared}, "", fencing.Seen{Token: 5}, fencing.ErrNotExclusive},
		{fencing.Claim{Token: 9, Space: "b"}, "a", fencing.Seen{Token: 5, Space: "a"}, fencing.ErrSpace},
		{fencing.Claim{Token: 9}, "a", fencing.Seen{Token: 5, Space: "a"}, fencing.ErrSpace},
		{fencing.Claim{Token: 9, Space: "a"}, "a", fencing.Seen{Token: 5, Space: "b"}, fencing.ErrSpace},
		{fencing.Claim{Token: 9, Space: "a"}, "a", fencing.Seen{Token: 5}, fencing.ErrSpace}, // seen before the guard had a space
		{fencing.Claim{Token: 9}, "", fencing.Seen{Token: 5, Space: "a"}, fencing.ErrSpace},  // seen by a guard with one
	} {
		if err := fencing.Judge(c.claim, c.space, c.seen); !errors.Is(err, c.want) {
			t.Errorf("Judge(%+v, %q, %+v) = %v, want %v", c.claim, c.space, c.seen, err, c.want)
		}
	}
	for token, want := range map[fencing.Token]error{0: fencing.ErrNoToken, shared: fencing.ErrNotExclusive, 1: nil} {
		if err := fencing.Refused(fencing.Claim{Token: token, Space: "a"}, "a"); !errors.Is(err, want) {
			t.Errorf("Refused(%v) = %v, want %v", token, err, want)
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
		{Resource: "a", Space: "\t"}, {Resource: "a", Space: strings.Repeat("s", 256)},
	} {
		err := bad.Validate()
		var invalid *fencing.InvalidError
		if !errors.Is(err, fencing.ErrInvalid) || !errors.As(err, &invalid) || len(err.Error()) > 200 {
			t.Errorf("%.20q of %.20q: %v, want a short *InvalidError", bad.Resource, bad.Space, err)
		}
	}
	if err := new(fencing.Memory).Check(t.Context(), "", 1); !errors.Is(err, fencing.ErrInvalid) {
		t.Errorf("Memory.Check of no resource = %v, want ErrInvalid", err)
	}
}

func TestContextCarriesAClaim(t *testing.T) {
	if c, ok := fencing.FromContext(t.Context()); ok {
		t.Errorf("a bare context carries %+v", c)
	}
	want := fencing.Claim{Resource: "a", Token: 7, Space: "s"}
	if got, ok := fencing.FromContext(fencing.NewContext(t.Context(), want)); !ok || got != want {
		t.Errorf("got %+v, %v; want %+v", got, ok, want)
	}
}

// spaceless is a Guard that cannot be told a space.
type spaceless struct{ *fencing.Memory }

func (spaceless) CheckFrom() {}

func (g spaceless) Check(ctx context.Context, resource string, token fencing.Token) error {
	return g.Memory.CheckFrom(ctx, "", resource, token)
}

func TestCheckTellsTheSpaceToThoseWhoWantIt(t *testing.T) {
	claim := fencing.Claim{Resource: "a", Token: 7, Space: "s"}
	if err := fencing.Check(t.Context(), fencing.NewMemory("s"), claim); err != nil {
		t.Errorf("a SpaceGuard: %v", err)
	}
	if err := fencing.Check(t.Context(), spaceless{fencing.NewMemory("s")}, claim); !errors.Is(err, fencing.ErrSpace) {
		t.Errorf("a Guard that only knows Check: %v, want ErrSpace", err)
	}
}

// Do keeps everybody else out until the write is done, and what it admitted is remembered also if the write fails.
func TestMemoryDo(t *testing.T) {
	var g fencing.Memory
	failed := errors.New("disk full")
	value := 0
	do := func(token fencing.Token, err error) error {
		return g.Do(t.Context(), fencing.Claim{Resource: "a", Token: token}, func() error { value = int(token); return err })
	}
	for _, step := range []struct {
		token       fencing.Token
		fails, want error
		value       int
	}{
		{33, nil, nil, 33}, {34, failed, failed, 34}, {33, nil, fencing.ErrStale, 34}, {34, nil, nil, 34},
	} {
		if err := do(step.token, step.fails); !errors.Is(err, step.want) || value != step.value {
			t.Errorf("Do with %v = %v, and the value is %d; want %v and %d", step.token, err, value, step.want, step.value)
		}
	}
}
