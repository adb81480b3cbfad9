package objectguard

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
)

// object is the stored form: one line of text, and the content.
type object struct {
	known   bool // false: it does not exist
	seen    fencing.Seen
	unique  string
	full    bool // false: a claim was shown, without a content so far
	shown   bool // the present claim was shown before
	content []byte
}

// The line of an object is the magic, a new word for each PUT, one of the two states, and the text of package
// fencing; the line of the terms is their magic, such a word, and the text.
const (
	magic      = "fencing-token"
	empty      = "empty"
	full       = "full"
	termsMagic = "fencing-terms"
	termsName  = "fencing-terms"
)

func (o object) text() []byte {
	state := empty
	if o.full {
		state = full
	}
	return append(fmt.Appendf(nil, "%s %s %s %v\n", magic, o.unique, state, o.seen), o.content...)
}

func (g *Guard) load(ctx context.Context, resource string) (object, string, error) {
	text, tag, err := g.get(ctx, resource)
	if err != nil || tag == "" {
		return object{}, "", err
	}
	line, content, _ := bytes.Cut(text, []byte("\n"))
	o, state, err := parse(string(line))
	if err == nil && state != empty && state != full {
		err = ErrForeign
	}
	if err != nil {
		return object{}, "", err
	}
	if o.full = state == full; o.full {
		o.content = content
	}
	return o, tag, nil
}

// parse reads the line of an object. In format 1 it was the magic, epoch, token, sequence, the word and the state; an
// object keeps it until it is written to.
func parse(line string) (o object, state string, err error) {
	words := strings.SplitN(line, " ", 4)
	if len(words) != 4 || words[0] != magic {
		return o, "", ErrForeign
	}
	o.known, o.unique, state = true, words[1], words[2]
	if older := strings.Split(line, " "); len(older) == 6 {
		o.seen, err = memory.OlderSeen(older[1], older[2], older[3])
		o.unique, state = older[4], older[5]
	} else {
		o.seen, err = fencing.ParseSeen(words[3])
	}
	if err != nil {
		return o, "", fmt.Errorf("%w: %w", ErrForeign, err)
	}
	return o, state, nil
}

// get returns an object and its tag, or no tag if it does not exist.
func (g *Guard) get(ctx context.Context, name string) ([]byte, string, error) {
	text, tag, err := g.store.Get(ctx, g.prefix+name)
	if errors.Is(err, ErrNotExist) {
		return nil, "", nil
	}
	if err == nil && tag == "" {
		err = errors.New("the store returned no ETag, which If-Match needs")
	}
	return text, tag, err
}

// loadTerms returns the terms, their line and their tag, and an error if they are missing or of another format.
func (g *Guard) loadTerms(ctx context.Context) (t fencing.Terms, line, tag string, _ error) {
	text, tag, err := g.get(ctx, termsName)
	if err != nil {
		return t, "", "", err
	}
	if tag == "" {
		return t, "", "", fencing.ErrTermsLost
	}
	line = strings.TrimSuffix(string(text), "\n")
	words := strings.SplitN(line, " ", 3)
	if len(words) != 3 || words[0] != termsMagic {
		return t, "", "", ErrForeign
	}
	if _, older := olderTerms(line); older == nil {
		return t, line, tag, memory.Older()
	}
	t, err = fencing.ParseTerms(words[2])
	return t, line, tag, err
}

// olderTerms reads the line of format 1: the magic, epoch, floor, the word, and the space, percent-encoded.
func olderTerms(line string) (fencing.Terms, error) {
	words := strings.Split(line, " ")
	if len(words) != 5 || words[0] != termsMagic {
		return fencing.Terms{}, ErrForeign
	}
	space, err := url.PathUnescape(words[4])
	if err != nil {
		return fencing.Terms{}, fmt.Errorf("%w: %w", ErrForeign, err)
	}
	return memory.OlderTerms(words[1], words[2], space)
}

func (g *Guard) saveTerms(ctx context.Context, t fencing.Terms, tag string) error {
	return g.store.Put(ctx, g.prefix+termsName, fmt.Appendf(nil, "%s %s %v\n", termsMagic, rand.Text(), t), tag)
}

// termsFor returns the guard's terms, after the first claim has set their space.
func (g *Guard) termsFor(ctx context.Context, c fencing.Claim) (fencing.Terms, error) {
	for n := 1; ; n++ {
		terms, _, tag, err := g.loadTerms(ctx)
		if err == nil {
			err = g.memory.Check(terms)
		}
		if err != nil {
			return terms, err
		}
		pinned := terms.Pin(c)
		if pinned == terms {
			return terms, nil
		}
		if _, err := fencing.Judge(c, terms, fencing.Seen{}); err != nil {
			return terms, nil //nolint:nilerr // it is refused, and sets nothing
		}
		if err := g.saveTerms(ctx, pinned, tag); err == nil || !errors.Is(err, ErrChanged) {
			return pinned, err
		}
		if n > mostRefusals {
			return terms, ErrRefuses
		}
		pause(ctx, n)
	}
}

// Create makes the guard's terms, with a random ID, before the first check. Terms that are there stay as they are; in
// another format they are fencing.ErrGuardVersion, see Migrate. A Store does not list its objects, so Create does not
// see that terms were lost: call it once, when the bucket is set up, and not when a program starts.
func (g *Guard) Create(ctx context.Context) error {
	_, _, _, err := g.loadTerms(ctx)
	if errors.Is(err, fencing.ErrTermsLost) {
		if err = g.saveTerms(ctx, fencing.NewTerms(), ""); errors.Is(err, ErrChanged) {
			_, _, _, err = g.loadTerms(ctx) // another client was faster
		}
	}
	if err != nil {
		return fmt.Errorf("objectguard: create: %w", err)
	}
	return nil
}

// Migrate brings the guard's terms of format 1 to the present one, with a new ID; earlier versions of this package fail
// on each check from then on. Objects are read in both formats. On terms of the present format it has no effect.
func (g *Guard) Migrate(ctx context.Context) error {
	return g.change(ctx, "migrate", func(t fencing.Terms, text string, err error) (fencing.Terms, error) {
		if older, failed := olderTerms(text); failed == nil {
			return older, nil
		}
		return t, err
	})
}

// Terms returns the guard's terms; see fencing.Keeper.
func (g *Guard) Terms(ctx context.Context) (fencing.Terms, error) {
	terms, _, _, err := g.loadTerms(ctx)
	if err != nil {
		return terms, fmt.Errorf("objectguard: terms: %w", err)
	}
	return terms, nil
}

// Seen returns the guard's memory of a resource; see fencing.Keeper.
func (g *Guard) Seen(ctx context.Context, resource string) (fencing.Seen, error) {
	o, _, err := g.load(ctx, resource)
	if err != nil {
		return o.seen, fmt.Errorf("objectguard: seen %q: %w", resource, err)
	}
	return o.seen, nil
}

// Accept restarts the guard; see fencing.Keeper.
func (g *Guard) Accept(ctx context.Context, space string, floor fencing.Token) error {
	return g.change(ctx, "accept", func(t fencing.Terms, _ string, err error) (fencing.Terms, error) {
		if errors.Is(err, fencing.ErrTermsLost) {
			t, err = fencing.LostTerms(), nil
		}
		if err != nil {
			return t, err
		}
		return t.Accept(space, floor)
	})
}

// Raise raises the floor; see fencing.Keeper.
func (g *Guard) Raise(ctx context.Context, floor fencing.Token) error {
	return g.change(ctx, "raise", func(t fencing.Terms, _ string, err error) (fencing.Terms, error) {
		if err != nil {
			return t, err
		}
		return t.Raise(floor)
	})
}

// change sets the terms to the result of f on them, or on the text of other ones.
func (g *Guard) change(ctx context.Context, call string,
	f func(t fencing.Terms, text string, err error) (fencing.Terms, error),
) error {
	fail := func(err error) error { return fmt.Errorf("objectguard: %s: %w", call, err) }
	for n := 1; ; n++ {
		before, text, tag, err := g.loadTerms(ctx)
		if err == nil {
			err = g.memory.Check(before)
		}
		after, err := f(before, text, err)
		if err != nil {
			return fail(err)
		}
		if after == before {
			return nil
		}
		err = g.saveTerms(ctx, after, tag)
		if err == nil || !errors.Is(err, ErrChanged) {
			if err != nil {
				return fail(err)
			}
			return nil
		}
		if n > mostRefusals {
			return fail(ErrRefuses)
		}
		pause(ctx, n)
	}
}

// Clean has no effect: objects hold contents, and a Store does not list them.
func (g *Guard) Clean(context.Context) (int64, error) { return 0, nil }
