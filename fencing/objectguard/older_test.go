package objectguard_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/objectguard"
	"github.com/fencelock/fencelock/internal/testtier"
)

func TestOlderWriters(t *testing.T) {
	long := time.Second
	if testtier.Wanted() {
		long = time.Minute
	}
	_, store := newGuard(t, &bucket{dir: t.TempDir()}, &objectguard.Options{Prefix: "others/"})
	guardtest.RunOlder(t, space, long, func(t testing.TB, round int) *guardtest.Older {
		return older(t, store, fmt.Sprintf("%d/", round))
	})
}

// format1 is a look and a PUT of version 9d2c49a: the terms are "fencing-terms EPOCH FLOOR NONCE SPACE", an object
// begins with "fencing-token EPOCH TOKEN SEQUENCE NONCE STATE".
func format1(ctx context.Context, store objectguard.Store, prefix string, c fencing.Claim, text string) error {
	terms, _, err := store.Get(ctx, prefix+"fencing-terms")
	if errors.Is(err, objectguard.ErrNotExist) {
		terms = fmt.Appendf(nil, "fencing-terms 0 0 %s %s\n", rand.Text(), strings.ReplaceAll(c.Space, " ", "%20"))
		err = store.Put(ctx, prefix+"fencing-terms", terms, "")
	}
	if err != nil {
		return err
	}
	words := strings.Split(strings.TrimSuffix(string(terms), "\n"), " ")
	if len(words) != 5 || words[0] != "fencing-terms" {
		return objectguard.ErrForeign
	}
	if words[1] != "0" || words[2] != "0" || words[4] != strings.ReplaceAll(c.Space, " ", "%20") {
		return errors.New("refused by the terms")
	}
	old, tag, err := store.Get(ctx, prefix+c.Resource)
	if err != nil && !errors.Is(err, objectguard.ErrNotExist) {
		return err
	}
	if tag != "" {
		line, _, _ := strings.Cut(string(old), "\n")
		words := strings.Split(line, " ")
		if len(words) != 6 || words[0] != "fencing-token" || words[5] != "empty" && words[5] != "full" {
			return objectguard.ErrForeign
		}
		if token, err := fencing.ParseToken(words[2]); err != nil || c.Token < token {
			return errors.New("stale")
		}
	}
	return store.Put(ctx, prefix+c.Resource,
		fmt.Appendf(nil, "fencing-token 0 %d 0 %s full\n%s", uint64(c.Token), rand.Text(), text), tag)
}

func older(t testing.TB, store objectguard.Store, prefix string) *guardtest.Older {
	open := func() *objectguard.Guard {
		guard, err := objectguard.New(store, &objectguard.Options{Prefix: prefix})
		if err != nil {
			t.Fatal(err)
		}
		return guard
	}
	return &guardtest.Older{
		Keeper: open(),
		Keep: func(ctx context.Context, terms fencing.Terms, seen fencing.Seen) error {
			return errors.Join(
				store.Put(ctx, prefix+"fencing-terms", fmt.Appendf(nil, "fencing-terms %d %d %s %s\n", terms.Epoch,
					uint64(terms.Floor), rand.Text(), strings.ReplaceAll(terms.Space, " ", "%20")), ""),
				store.Put(ctx, prefix+"older", fmt.Appendf(nil, "fencing-token %d %d %d %s full\nold", seen.Epoch,
					uint64(seen.Token), seen.Sequence, rand.Text()), ""),
			)
		},
		Old: func(ctx context.Context, c fencing.Claim, text string) error {
			return format1(ctx, store, prefix, c, text)
		},
		New: func(ctx context.Context, c fencing.Claim, text string) error { return open().Put(ctx, c, []byte(text)) },
		Read: func(ctx context.Context) (string, error) {
			content, _, err := open().Get(ctx, "older")
			return string(content), err
		},
	}
}
