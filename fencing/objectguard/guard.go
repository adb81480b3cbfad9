// Package objectguard guards small objects in an object store that has conditional writes: S3 and what speaks its language,
// Azure Blob Storage, Google Cloud Storage. The object itself carries the token, in its first line, and is replaced only if
// it is still the one that was judged (If-Match), so check and write are one step.
//
//	guard, err := objectguard.New(store, nil)
//
//	err = locks.Do(ctx, "state", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Put(ctx, fencing.Claim{Resource: "state", Token: lease.Token()}, newState)
//	})
//
// # What it takes
//
// The line is in the content, and not in the object's metadata, because the ETag of S3 is a hash of the content alone: two
// holders that write the same bytes would leave the same ETag, and a stale If-Match would pass. Read with Get, which takes
// the line off, or skip everything up to the first newline.
//
// An object is read and written as a whole, twice over the network, so guard something small: state, a manifest, the name
// of the newest version. Large data go into an object of a name never used before, with the token in it for those who look,
// and their name into the guarded one:
//
//	name := fmt.Sprintf("backup/%v-%s", lease.Token(), rand.Text())
//	upload(ctx, name, data)
//	err := guard.Put(ctx, claim, []byte(name)) // refused: nobody will ever read what was uploaded
//
// The object must not be deleted, nor an older version restored: a guard that forgets admits a stale writer.
package objectguard

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net/url"
	"strings"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Store is what a guard needs of an object store. HTTP is one; around a vendor's SDK it takes a few lines. Methods are safe
// for concurrent use and return within ctx.
type Store interface {
	// Get returns an object and the tag of its content, which is another one for other content (ETag, generation). If there
	// is none the error wraps ErrNotExist. It must not come from a cache.
	Get(ctx context.Context, key string) (content []byte, tag string, err error)

	// Put writes the object if its tag is still that one; an empty tag: if there is none. Otherwise it changes nothing, and
	// the error wraps ErrChanged.
	Put(ctx context.Context, key string, content []byte, tag string) error
}

var (
	// ErrNotExist: there is no such object.
	ErrNotExist = errors.New("objectguard: no such object")
	// ErrChanged: the object is not the one that the condition names.
	ErrChanged = errors.New("objectguard: the object has changed")
	// ErrForeign: the object does not begin with a guard's line.
	ErrForeign = errors.New("objectguard: not an object that a guard wrote")
)

// Options of a guard. Nil is the same as the zero value.
type Options struct {
	// Prefix is in front of a resource to make the key of its object.
	Prefix string
	// Space is the only one whose tokens are accepted (Lease.TokenSpace); it is remembered beside every token. Empty: any.
	Space string
}

// Guard guards the objects of one store. It is safe for concurrent use, and implements fencing.SpaceGuard for writes that
// go elsewhere; those to the object use Put.
type Guard struct {
	store  Store
	prefix string
	space  string
}

var _ fencing.SpaceGuard = (*Guard)(nil)

// New returns a guard. It does no I/O. The error is a *fencing.InvalidError that names what cannot be used.
func New(store Store, o *Options) (*Guard, error) {
	if o == nil {
		o = &Options{}
	}
	if store == nil {
		return nil, fmt.Errorf("objectguard: new: %w", &fencing.InvalidError{What: "store", Why: "it is nil"})
	}
	if err := fencing.ValidateSpace(o.Space); err != nil {
		return nil, fmt.Errorf("objectguard: new: %w", err)
	}
	return &Guard{store: store, prefix: o.Prefix, space: o.Space}, nil
}

// Check implements fencing.Guard. It leaves the content as it is.
func (g *Guard) Check(ctx context.Context, resource string, token fencing.Token) error {
	return g.CheckFrom(ctx, "", resource, token)
}

// CheckFrom is Check for a token whose space is known.
func (g *Guard) CheckFrom(ctx context.Context, space, resource string, token fencing.Token) error {
	return g.replace(ctx, fencing.Claim{Resource: resource, Token: token, Space: space}, func(old []byte) []byte { return old })
}

// Put checks the claim and, if it is admitted, replaces the content of the resource's object, in one step. Where others
// write at the same time it judges again, until ctx ends. Other errors are the store's; whether the content was replaced is
// then not known, and Put can be called again with the same token.
func (g *Guard) Put(ctx context.Context, c fencing.Claim, content []byte) error {
	return g.replace(ctx, c, func([]byte) []byte { return content })
}

// Get returns the content that was put last, and its token. If there is none the error wraps ErrNotExist.
func (g *Guard) Get(ctx context.Context, resource string) ([]byte, fencing.Token, error) {
	o, _, err := g.load(ctx, resource)
	if err == nil && !o.known {
		err = ErrNotExist
	}
	if err != nil {
		return nil, 0, fmt.Errorf("objectguard: get %q: %w", resource, err)
	}
	return o.content, o.seen.Token, nil
}

func (g *Guard) replace(ctx context.Context, c fencing.Claim, content func(old []byte) []byte) error {
	fail := func(err error) error { return fmt.Errorf("objectguard: check %q: %w", c.Resource, err) }
	if err := c.Validate(); err != nil {
		return fmt.Errorf("objectguard: check: %w", err)
	}
	nonce := rand.Text() // tells our own write from another with the same token and content
	before := ""
	for n := 0; ; n++ {
		if err := ctx.Err(); err != nil {
			return fail(err)
		}
		old, tag, err := g.load(ctx, c.Resource)
		switch {
		case err != nil && fencing.Refused(c, g.space) != nil:
			return fencing.Refused(c, g.space) // without its highest token
		case err != nil:
			return fail(err)
		case old.known && old.nonce == nonce:
			return nil // a write whose answer was lost, and the store, or what is before it, repeated it
		case n > 0 && tag == before:
			pause(ctx, n) // nobody was faster: the store refuses for reasons of its own
		}
		before = tag
		if err := fencing.Judge(c, g.space, old.seen); err != nil {
			return err
		}
		now := object{
			seen: fencing.Seen{Token: c.Token, Space: g.space}, nonce: nonce, content: content(old.content),
		}
		err = g.store.Put(ctx, g.prefix+c.Resource, now.text(), tag)
		if err == nil {
			return nil
		}
		if !errors.Is(err, ErrChanged) {
			return fail(err)
		}
	}
}

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

// AcceptSpace makes the resource one of the space to, whose tokens begin anew, if it is one of the space from, and reports
// whether it was. From then on guards with the space from are refused. It is an administrator's act: after the lock service
// was replaced or restored, and when no holder of the old one can write any more. An empty from names what guards without a
// space have written: the token then stays.
func (g *Guard) AcceptSpace(ctx context.Context, resource, from, to string) (bool, error) {
	err := fencing.Claim{Resource: resource, Space: to}.Validate()
	if err == nil && (to == "" || to == from) {
		err = &fencing.InvalidError{What: "space", Value: to, Why: "it is empty, or the one before"}
	}
	for err == nil {
		var o object
		var tag string
		if o, tag, err = g.load(ctx, resource); err != nil || !o.known || o.seen.Space != from {
			break
		}
		if o.seen.Space = to; from != "" {
			o.seen.Token = 0
		}
		o.nonce = rand.Text()
		if err = g.store.Put(ctx, g.prefix+resource, o.text(), tag); err == nil {
			return true, nil
		}
		if errors.Is(err, ErrChanged) {
			err = ctx.Err()
		}
	}
	if err != nil {
		return false, fmt.Errorf("objectguard: accept space %q for %q: %w", to, resource, err)
	}
	return false, nil
}

// object is what the store keeps: one line of text, and the content.
type object struct {
	known   bool // false: there is none
	seen    fencing.Seen
	nonce   string
	content []byte
}

const magic = "fencing-token"

func (o object) text() []byte {
	return append(fmt.Appendf(nil, "%s %v %s %s\n", magic, o.seen.Token, o.nonce, url.PathEscape(o.seen.Space)), o.content...)
}

func (g *Guard) load(ctx context.Context, resource string) (object, string, error) {
	text, tag, err := g.store.Get(ctx, g.prefix+resource)
	if errors.Is(err, ErrNotExist) {
		return object{seen: fencing.Seen{Space: g.space}}, "", nil
	}
	if err != nil {
		return object{}, "", err
	}
	line, content, _ := bytes.Cut(text, []byte("\n"))
	words := strings.Split(string(line), " ")
	if len(words) != 4 || words[0] != magic {
		return object{}, "", ErrForeign
	}
	token, err := fencing.ParseToken(words[1])
	if err != nil {
		return object{}, "", fmt.Errorf("%w: %w", ErrForeign, err)
	}
	space, err := url.PathUnescape(words[3])
	if err != nil {
		return object{}, "", fmt.Errorf("%w: %w", ErrForeign, err)
	}
	if tag == "" {
		return object{}, "", errors.New("the store gave no tag: If-Match has nothing to go by")
	}
	return object{known: true, seen: fencing.Seen{Token: token, Space: space}, nonce: words[2], content: content}, tag, nil
}
