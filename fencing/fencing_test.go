package fencing_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/fencelock/fencelock/fencing"
)

func TestTokenText(t *testing.T) {
	for _, want := range []fencing.Token{0, 1, 42, 1<<63 - 1, fencing.Token(7).NotExclusive()} {
		text, err := want.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		var got fencing.Token
		if err := got.UnmarshalText(text); err != nil || got != want {
			t.Errorf("%q read back as %v, %v; want %v", text, got, err, want)
		}
	}
	for _, bad := range []string{"", "s", "0s", "+1", "-1", "1.0", " 1", "1 ", "0x1", "9223372036854775808", "1ss"} {
		if got, err := fencing.ParseToken(bad); err == nil {
			t.Errorf("ParseToken(%q) = %v, want an error", bad, got)
		}
	}
}

func TestTokenExclusive(t *testing.T) {
	shared := fencing.Token(7).NotExclusive()
	for token, want := range map[fencing.Token]bool{0: false, 1: true, 1<<63 - 1: true, shared: false} {
		if token.Exclusive() != want {
			t.Errorf("%v.Exclusive() = %v", token, !want)
		}
	}
	if shared.Order() != 7 {
		t.Errorf("Order() = %d, want 7", shared.Order())
	}
}

func TestMemoryGuard(t *testing.T) {
	ctx := t.Context()
	var g fencing.Memory
	for _, step := range []struct {
		resource string
		token    fencing.Token
		want     error
	}{
		{"a", 33, nil},
		{"a", 33, nil}, // a hold writes many times
		{"a", 34, nil},
		{"a", 33, fencing.ErrStale},
		{"b", 33, nil}, // resources do not mix
		{"a", 0, fencing.ErrNoToken},
		{"a", fencing.Token(99).NotExclusive(), fencing.ErrNotExclusive},
		{"a", 34, nil}, // what was refused left no trace
	} {
		err := g.Check(ctx, fencing.Claim{Resource: step.resource, Token: step.token})
		if !errors.Is(err, step.want) {
			t.Errorf("Check(%s, %v) = %v, want %v", step.resource, step.token, err, step.want)
		}
	}
	stale := (*fencing.StaleError)(nil)
	if err := g.Check(ctx, fencing.Claim{Resource: "a", Token: 1}); !errors.As(err, &stale) || stale.Token != 1 ||
		stale.Highest != 34 {
		t.Errorf("the error %v does not contain both tokens", err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if err := g.Check(ended, fencing.Claim{Resource: "a", Token: 99}); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
	if err := g.Check(ctx, fencing.Claim{Resource: "a", Token: 34}); err != nil {
		t.Errorf("a check with an ended context was remembered: %v", err)
	}
}

// The first claim decides the space of the admitted tokens, and an operator may begin anew.
func TestMemoryKeeper(t *testing.T) {
	ctx := t.Context()
	var g fencing.Memory
	claim := func(token fencing.Token, space string) fencing.Claim {
		return fencing.Claim{Resource: "a", Token: token, Space: space}
	}
	for _, step := range []struct {
		what string
		do   func() error
		want error
	}{
		{
			"a claim that is refused sets no space",
			func() error { return g.Check(ctx, claim(0, "cluster-0")) }, fencing.ErrNoToken,
		},
		{"the first", func() error { return g.Check(ctx, claim(5, "cluster-1")) }, nil},
		{"no space", func() error { return g.Check(ctx, claim(9, "")) }, fencing.ErrSpace},
		{"another space", func() error { return g.Check(ctx, claim(9, "cluster-2")) }, fencing.ErrSpace},
		{"an operator", func() error { return g.Accept(ctx, "cluster-2", 3) }, nil},
		{"the old space", func() error { return g.Check(ctx, claim(99, "cluster-1")) }, fencing.ErrSpace},
		{"below the floor", func() error { return g.Check(ctx, claim(2, "cluster-2")) }, fencing.ErrStale},
		{"the floor", func() error { return g.Check(ctx, claim(3, "cluster-2")) }, nil},
		{"a lower floor", func() error { return g.Raise(ctx, 2) }, fencing.ErrInvalid},
		{"a higher floor", func() error { return g.Raise(ctx, 7) }, nil},
		{"below it", func() error { return g.Check(ctx, claim(6, "cluster-2")) }, fencing.ErrStale},
		{"a space that cannot be", func() error { return g.Accept(ctx, "\n", 0) }, fencing.ErrInvalid},
		{"a floor that cannot be", func() error { return g.Accept(ctx, "", fencing.MaxToken+1) }, fencing.ErrInvalid},
		{
			"a token that no service issues",
			func() error { return g.Check(ctx, claim(1<<63-1, "cluster-2")) }, fencing.ErrInvalid,
		},
	} {
		if err := step.do(); !errors.Is(err, step.want) {
			t.Errorf("%s: %v, want %v", step.what, err, step.want)
		}
	}
	if n, err := g.Clean(ctx); n != 1 || err != nil {
		t.Errorf("Clean = %d, %v, want 1", n, err)
	}
	if err := g.Check(ctx, claim(6, "cluster-2")); !errors.Is(err, fencing.ErrStale) {
		t.Errorf("after Clean: %v, want ErrStale", err)
	}
}

// Whatever the order of concurrent checks, no token is admitted below a token that was admitted before its check began.
func TestMemoryGuardIsMonotone(t *testing.T) {
	var g fencing.Memory
	var mu sync.Mutex
	var highest fencing.Token // admitted, and the admission returned
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 1000 {
				mu.Lock()
				floor := highest
				mu.Unlock()
				token := fencing.Token(1 + rand.Uint64N(10_000))
				if g.Check(t.Context(), fencing.Claim{Resource: "a", Token: token}) != nil {
					continue
				}
				if token < floor {
					t.Errorf("%v was admitted after %v", token, floor)
				}
				mu.Lock()
				highest = max(highest, token)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
}

func ExampleMemory() {
	ctx := context.Background()
	var guard fencing.Memory
	fmt.Println(guard.Check(ctx, fencing.Claim{Resource: "accounts/42", Token: 33})) // holder A writes
	// A was paused, B holds the lock now.
	fmt.Println(guard.Check(ctx, fencing.Claim{Resource: "accounts/42", Token: 34}))
	fmt.Println(guard.Check(ctx, fencing.Claim{Resource: "accounts/42", Token: 33})) // A wakes up
	// Output:
	// <nil>
	// <nil>
	// fencing: token 33 for "accounts/42" is stale: 34 was admitted before
}
