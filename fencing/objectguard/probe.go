package objectguard

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
)

var (
	// ErrUnconditional: the store writes although the condition does not hold. A guard on it admits stale writers.
	ErrUnconditional = errors.New("objectguard: the store ignores conditions")
	// ErrNotAtomic: of several concurrent writes that name the same object the store executes more than one: it looks at
	// the condition, and writes in another step. A guard on it loses acknowledged writes.
	ErrNotAtomic = errors.New("objectguard: the store does not check conditions and write atomically")
)

// How often Probe lets writes meet, and how many of them. A store that works answers each round in the time of two
// requests.
const probeRounds, probeWrites = 5, 8

// Probe tries whether the store heeds conditions, with an object of the key: many servers that speak the language of
// S3 ignore If-Match silently, and others look at it and write in two steps. It answers ErrUnconditional or
// ErrNotAtomic if so; the latter is found by chance, as concurrent writes have to meet between the two steps. It takes
// about 60 requests. Run it once for each store, before it is used, with an unused key.
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
		return fail("get what was put", fmt.Errorf("%w: different content has the same ETag %q", ErrUnconditional, now))
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
	for range probeRounds {
		if err := meet(ctx, s, key); err != nil {
			return fail("put several times at once", err)
		}
	}
	return nil
}

// meet writes several times at once, each with the tag of the object as it is. One of them may be executed.
func meet(ctx context.Context, s Store, key string) error {
	_, tag, err := s.Get(ctx, key)
	if err != nil {
		return err
	}
	answers := make(chan error, probeWrites)
	for range probeWrites {
		go func() { answers <- s.Put(ctx, key, []byte(rand.Text()), tag) }()
	}
	written, failed := 0, error(nil)
	for range probeWrites {
		switch err := <-answers; {
		case err == nil:
			written++
		case !errors.Is(err, ErrChanged):
			failed = err
		}
	}
	if written > 1 {
		return fmt.Errorf("%w: of %d concurrent writes with one ETag it acknowledged "+
			"%d", ErrNotAtomic, probeWrites, written)
	}
	return failed
}
