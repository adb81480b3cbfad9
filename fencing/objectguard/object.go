package objectguard

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock/fencing"
)

// object is what the store keeps: one line of text, and the content.
type object struct {
	known   bool // false: there is none
	seen    fencing.Seen
	nonce   string
	full    bool // false: a claim was shown, and nothing put yet
	content []byte
}

// The line of an object is the magic, epoch, token, sequence, nonce, and one of the two states. That of the terms is
// their magic, epoch, floor, nonce, and the space, percent-encoded.
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
	line := fmt.Appendf(nil, "%s %d %d %d %s %s\n", magic, o.seen.Epoch, uint64(o.seen.Token), o.seen.Sequence, o.nonce,
		state)
	return append(line, o.content...)
}

func (g *Guard) load(ctx context.Context, resource string) (object, string, error) {
	text, tag, err := g.get(ctx, resource)
	if err != nil || tag == "" {
		return object{}, "", err
	}
	line, content, _ := bytes.Cut(text, []byte("\n"))
	words := strings.Split(string(line), " ")
	if len(words) != 6 || words[0] != magic || words[5] != empty && words[5] != full {
		return object{}, "", ErrForeign
	}
	var number [3]uint64
	for i := range number {
		if number[i], err = strconv.ParseUint(words[i+1], 10, 63); err != nil {
			return object{}, "", fmt.Errorf("%w: %w", ErrForeign, err)
		}
	}
	o := object{
		known: true, seen: fencing.Seen{Epoch: number[0], Token: fencing.Token(number[1]), Sequence: number[2]},
		nonce: words[4],
	}
	if o.full = words[5] == full; o.full {
		o.content = content
	}
	return o, tag, nil
}

// get returns an object and its tag, or no tag if there is none.
func (g *Guard) get(ctx context.Context, name string) ([]byte, string, error) {
	text, tag, err := g.store.Get(ctx, g.prefix+name)
	if errors.Is(err, ErrNotExist) {
		return nil, "", nil
	}
	if err == nil && tag == "" {
		err = errors.New("the store gave no tag: If-Match has nothing to go by")
	}
	return text, tag, err
}

func (g *Guard) loadTerms(ctx context.Context) (t fencing.Terms, tag string, _ error) {
	text, tag, err := g.get(ctx, termsName)
	if err != nil || tag == "" {
		return t, "", err
	}
	words := strings.Split(strings.TrimSuffix(string(text), "\n"), " ")
	if len(words) != 5 || words[0] != termsMagic {
		return t, "", ErrForeign
	}
	epoch, err := strconv.ParseUint(words[1], 10, 63)
	floor, err2 := strconv.ParseUint(words[2], 10, 63)
	space, err3 := url.PathUnescape(words[4])
	if err := errors.Join(err, err2, err3); err != nil {
		return t, "", fmt.Errorf("%w: %w", ErrForeign, err)
	}
	return fencing.Terms{Epoch: epoch, Floor: fencing.Token(floor), Space: space}, tag, nil
}

func (g *Guard) saveTerms(ctx context.Context, t fencing.Terms, tag string) error {
	text := fmt.Appendf(nil, "%s %d %d %s %s\n", termsMagic, t.Epoch, uint64(t.Floor), rand.Text(),
		url.PathEscape(t.Space))
	return g.store.Put(ctx, g.prefix+termsName, text, tag)
}

// termsFor returns the guard's terms, which the first claim of all sets.
func (g *Guard) termsFor(ctx context.Context, c fencing.Claim) (fencing.Terms, error) {
	for n := 1; ; n++ {
		terms, tag, err := g.loadTerms(ctx)
		if err != nil || tag != "" {
			return terms, err
		}
		terms = fencing.First(c)
		if _, err := fencing.Judge(c, terms, fencing.Seen{}); err != nil {
			return terms, nil //nolint:nilerr // it is refused, and sets nothing
		}
		if o, _, err := g.load(ctx, c.Resource); err != nil {
			return terms, err
		} else if o.known { // written after terms were set: by somebody just now, or they are lost
			if terms, tag, err = g.loadTerms(ctx); err == nil && tag == "" {
				err = fencing.ErrTermsLost
			}
			return terms, err
		}
		if err := g.saveTerms(ctx, terms, ""); err == nil || !errors.Is(err, ErrChanged) {
			return terms, err
		}
		if n > mostRefusals {
			return terms, ErrRefuses
		}
		pause(ctx, n)
	}
}

// Terms returns what the guard remembers as a whole; see fencing.Keeper.
func (g *Guard) Terms(ctx context.Context) (fencing.Terms, error) {
	terms, _, err := g.loadTerms(ctx)
	if err != nil {
		return terms, fmt.Errorf("objectguard: terms: %w", err)
	}
	return terms, nil
}

// Seen returns what the guard remembers of a resource; see fencing.Keeper.
func (g *Guard) Seen(ctx context.Context, resource string) (fencing.Seen, error) {
	o, _, err := g.load(ctx, resource)
	if err != nil {
		return o.seen, fmt.Errorf("objectguard: seen %q: %w", resource, err)
	}
	return o.seen, nil
}

// Accept makes the guard begin anew; see fencing.Keeper.
func (g *Guard) Accept(ctx context.Context, space string, floor fencing.Token) error {
	return g.change(ctx, "accept", func(t fencing.Terms) (fencing.Terms, error) { return t.Accept(space, floor) })
}

// Raise raises the floor; see fencing.Keeper.
func (g *Guard) Raise(ctx context.Context, floor fencing.Token) error {
	return g.change(ctx, "raise", func(t fencing.Terms) (fencing.Terms, error) { return t.Raise(floor) })
}

func (g *Guard) change(ctx context.Context, call string, f func(fencing.Terms) (fencing.Terms, error)) error {
	fail := func(err error) error { return fmt.Errorf("objectguard: %s: %w", call, err) }
	for n := 1; ; n++ {
		before, tag, err := g.loadTerms(ctx)
		if err != nil {
			return fail(err)
		}
		after, err := f(before)
		if err != nil {
			return fail(err)
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

// Clean removes nothing: objects hold contents, and a Store does not list them.
func (g *Guard) Clean(context.Context) (int64, error) { return 0, nil }
