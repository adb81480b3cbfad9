package objectguard

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
)

// Store is the interface of an object store to a guard. HTTP implements it; around a vendor's SDK it takes a few
// lines. Methods are safe for concurrent use and return within ctx.
type Store interface {
	// Get returns an object and the tag of its content, which differs for different content (ETag, generation). If
	// the object does not exist the error wraps ErrNotExist. The answer must not come from a cache.
	Get(ctx context.Context, key string) (content []byte, tag string, err error)

	// Put writes the object if it still has the tag, or for an empty tag if it does not exist. Otherwise the object
	// stays unchanged, and the error wraps ErrChanged.
	Put(ctx context.Context, key string, content []byte, tag string) error
}

var (
	// ErrNotExist: there is no such object.
	ErrNotExist = errors.New("objectguard: no such object")
	// ErrChanged: the object does not meet the condition.
	ErrChanged = errors.New("objectguard: the object has changed")
	// ErrForeign: the object does not begin with a guard's line.
	ErrForeign = errors.New("objectguard: the object was not written by a guard")
	// ErrRefuses: the store keeps refusing a condition that matches the object. A proxy that rewrites ETags, to
	// distinguish compressed answers for example, causes this.
	ErrRefuses = errors.New("objectguard: the store refuses the ETag that it returned")
)

// Options of a guard. Nil is the same as the zero value.
type Options struct {
	// Prefix is in front of a resource to make the key of its object.
	Prefix string

	// ID is the expected ID of the guard's memory (fencing.Terms.ID): another ID is fencing.ErrGuardID. Zero: the ID that
	// this Guard sees first, so that a bucket that was emptied and set up again before that is not detected.
	ID fencing.Nonce
}

// Guard guards the objects of one store. It is safe for concurrent use.
type Guard struct {
	store  Store
	prefix string
	memory *memory.Pin
}

var (
	_ fencing.Guard  = (*Guard)(nil)
	_ fencing.Keeper = (*Guard)(nil)
)

// New returns a guard. It does no I/O: Create comes before the first check. The error is a *fencing.InvalidError that
// names the invalid argument.
func New(store Store, o *Options) (*Guard, error) {
	if o == nil {
		o = &Options{}
	}
	if store == nil {
		return nil, fmt.Errorf("objectguard: new: %w", &fencing.InvalidError{What: "store", Why: "it is nil"})
	}
	return &Guard{store: store, prefix: o.Prefix, memory: memory.NewPin(o.ID)}, nil
}

// Check shows the claims, and leaves contents as they are: from then on lower tokens are refused. Objects are checked
// one after the other, up to the first refusal; the objects before it then remember the holder's own token.
func (g *Guard) Check(ctx context.Context, claims fencing.Claims) error {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return fmt.Errorf("objectguard: check: %w", err)
	}
	for _, c := range fencing.Unordered(list) {
		if err := g.replace(ctx, "check", c, nil); err != nil {
			return err
		}
	}
	return nil
}

// Put checks the claim and, if it is admitted, replaces the content of the resource's object, in one step. Where others
// write at the same time it repeats the judgement, until ctx ends. Other errors are the store's; whether the content
// was replaced is then unknown, and Put can be repeated with the same token. Where the hold has made the write before
// (Claim.Sequence) it is there, and Put returns nil.
func (g *Guard) Put(ctx context.Context, c fencing.Claim, content []byte) error {
	return done(g.replace(ctx, "put", c, func(object) ([]byte, error) { return content, nil }))
}

// Update shows the claim, reads the object, and replaces its content by the result of f, if the object has not changed
// since; otherwise it retries, until ctx ends. old is nil if the object does not exist. If f fails, Update returns its
// error and the content stays. f may be called more than once, so it must have no side effects. For other errors see
// Put.
func (g *Guard) Update(ctx context.Context, c fencing.Claim, f func(old []byte) ([]byte, error)) error {
	if f == nil {
		return fmt.Errorf("objectguard: update: %w", &fencing.InvalidError{What: "function", Why: "it is nil"})
	}
	for {
		err := done(g.replace(ctx, "update", c, func(old object) ([]byte, error) {
			if !old.shown {
				return nil, errUnseen // the object was not read under this claim
			}
			return f(old.content)
		}))
		if !errors.Is(err, errUnseen) {
			return err
		}
		if err := g.replace(ctx, "update", c.At(0), nil); err != nil {
			return err
		}
	}
}

var errUnseen = errors.New("the claim was not shown yet")

// done is the outcome of a write that the hold may have made before.
func done(err error) error {
	if errors.Is(err, fencing.ErrRepeated) {
		return nil
	}
	return err
}

// Get returns the content that was put last, and its token. If the object does not exist the error wraps ErrNotExist.
func (g *Guard) Get(ctx context.Context, resource string) ([]byte, fencing.Token, error) {
	o, _, err := g.load(ctx, resource)
	if err == nil && !o.full {
		err = ErrNotExist
	}
	if err != nil {
		return nil, 0, fmt.Errorf("objectguard: get %q: %w", resource, err)
	}
	return o.content, o.seen.Token, nil
}

// replace judges the claim, and writes the object with the new memory and the result of content; a nil content keeps
// the old content.
func (g *Guard) replace(ctx context.Context, call string, c fencing.Claim,
	content func(old object) ([]byte, error)) error {
	fail := func(err error) error { return fmt.Errorf("objectguard: %s %q: %w", call, c.Resource, err) }
	if err := c.Validate(); err != nil {
		return fmt.Errorf("objectguard: %s: %w", call, err)
	}
	if c.Resource == termsName {
		return fail(&fencing.InvalidError{What: "resource", Value: c.Resource, Why: "the guard's terms have this name"})
	}
	unique := rand.Text() // distinguishes our write from another with the same token and content
	before, same := "", 0
	var said error // by the store, when it did not write
	for n := 0; ; n++ {
		if err := ctx.Err(); err != nil {
			return fail(err)
		}
		terms, err := g.termsFor(ctx, c)
		if err != nil {
			return fail(err)
		}
		old, tag, err := g.load(ctx, c.Resource)
		switch {
		case err != nil:
			if _, refused := fencing.Judge(c, terms, fencing.Seen{}); fencing.Refusal(refused) {
				return refused // for any content of the object
			}
			return fail(err)
		case old.known && old.unique == unique:
			return nil // a write with a lost answer, which the store, or a proxy before it, repeated
		case n > 0 && tag == before: // no other client was faster: the store refuses for internal reasons
			if same++; same > mostRefusals {
				return fail(fmt.Errorf("%w: %v", ErrRefuses, said))
			}
			pause(ctx, same)
		default:
			same = 0
		}
		before = tag
		shown, err := fencing.Judge(c.At(0), terms, old.seen)
		old.shown = err == nil && shown == old.seen
		remember, err := fencing.Judge(c, terms, old.seen)
		if err != nil {
			if !fencing.Refusal(err) {
				return fail(err)
			}
			return err
		}
		now := object{seen: remember, unique: unique, full: old.full, content: old.content}
		if content != nil {
			if now.content, err = content(old); err != nil {
				return err
			}
			now.full = true
		} else if old.known && remember == old.seen {
			return nil // it is shown
		}
		err = g.store.Put(ctx, g.prefix+c.Resource, now.text(), tag)
		if err == nil {
			return nil
		}
		if !errors.Is(err, ErrChanged) {
			return fail(err)
		}
		said = err
	}
}

// mostRefusals bounds the times that the store may refuse a condition that holds: about four seconds.
const mostRefusals = 12

// pause waits for about 10 ms, doubling to 640 ms, or until ctx ends.
func pause(ctx context.Context, n int) {
	d := 10 * time.Millisecond << min(n-1, 6)
	timer := time.NewTimer(d/2 + mathrand.N(d))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
