package objectguard

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
)

// ErrUnconditional: the store writes although the condition does not hold. A guard on it admits stale writers.
var ErrUnconditional = errors.New("objectguard: the store ignores conditions")

// Probe tries whether the store heeds conditions, with an object of the key: many servers that speak the language of S3 do
// not know If-Match, and say nothing. It answers ErrUnconditional if not. Run it once for each store, at startup for
// example, with a key that nothing else uses.
func Probe(ctx context.Context, s Store, key string) error {
	fail := func(step string, err error) error { return fmt.Errorf("objectguard: probe %q: %s: %w", key, step, err) }
	first := []byte(rand.Text())
	_, tag, err := s.Get(ctx, key)
	if err != nil && !errors.Is(err, ErrNotExist) {
		return fail("get", err)
	}
	if err := s.Put(ctx, key, first, tag); err != nil {
		return fail("put", err)
	}
	_, now, err := s.Get(ctx, key)
	if err != nil {
		return fail("get what was put", err)
	}
	if now == "" || now == tag {
		return fail("get what was put", fmt.Errorf("%w: other content has the tag %q again", ErrUnconditional, now))
	}
	for _, c := range []struct{ step, tag string }{
		{"put an object that must not be there", ""},
		{"put with the tag of other content", `"00000000000000000000000000000000"`},
	} {
		switch err := s.Put(ctx, key, []byte(rand.Text()), c.tag); {
		case err == nil:
			return fail(c.step, ErrUnconditional)
		case !errors.Is(err, ErrChanged):
			return fail(c.step, err)
		}
	}
	return nil
}
