//go:build unix

package guardtest_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
)

// files is a guarded resource in a folder: the smallest durable one, for the suite's own tests. Each resource is a
// file that is replaced as a whole, under a lock that the kernel gives up for processes that die.
type files struct {
	dir string
	id  fencing.Nonce // of the memory; zero until it is seen
	break_
}

// known returns an error unless the terms are those of the memory of before.
func (f *files) known(t fencing.Terms) error {
	if f.id == (fencing.Nonce{}) || f.anyID {
		f.id = t.ID
	}
	if f.id != t.ID {
		return fencing.ErrGuardID
	}
	return nil
}

// break_ is what a mutant does otherwise. The zero value breaks nothing.
type break_ struct {
	name func(string) string // under which a resource is remembered
	// In place of judge, which remembers nothing if it returns an error.
	judge     func(c fencing.Claim, r *record) error
	accept    func(t, next fencing.Terms) fencing.Terms  // what an operator's change makes of the terms
	needless  func(t fencing.Terms, s fencing.Seen) bool // what is cleaned
	unlocked  bool                                       // no lock at all
	unsorted  bool                                       // claims are taken as they come
	piecemeal bool                                       // claims are judged and remembered one after the other
	ahead     bool                                       // a section reads before it shows its claim
	heedless  bool                                       // a section calls its function, whatever is judged
	mixes     bool                                       // a set of which some is repeated is repeated
	hasty     bool                                       // a sequence is remembered before its write
	naive     bool                                       // sections do not know of each other
	oldView   bool                                       // a transaction reads what was true when it began
	careless  bool                                       // a transaction goes on after a refusal
	undone    bool                                       // a savepoint takes the check back, and not the transaction
	trusted   guardtest.End                              // a section does not notice this end of its transaction
	retried   bool                                       // a section that is unfenced is tried again
	accused   bool                                       // a section that is unfenced is refused
	steps     []step                                     // of a write, each saved by itself; nil: both at once
	early     bool                                       // the write comes before the check
	deaf      bool                                       // to the context
	credulous bool                                       // it takes any claim for a valid one
	mends     bool                                       // a check makes terms that are missing
	heals     bool                                       // Create makes terms that were lost
	anyID     bool                                       // any memory is the one of before
	credits   bool                                       // any format is the present one
	late      int                                        // how many answers go ahead of their saving
	tokens    map[string]fencing.Token                   // what is remembered in the process only
	buffered  map[string][]record
}

type step uint8

const (
	saveToken step = iota + 1
	saveValue
)

// record is what a file holds.
type record struct {
	fencing.Seen
	Value string

	terms fencing.Terms // by which it is judged
}

// judge is fencing.Judge, and remembers what it admits.
func judge(c fencing.Claim, r *record) error {
	seen, err := fencing.Judge(c, r.terms, r.Seen)
	if err == nil {
		r.Seen = seen
	}
	return err
}

// opener returns a guardtest.Open for a resource that is broken in that way. Its address is the folder.
func opener(b break_) guardtest.Open {
	if b.judge == nil {
		b.judge = judge
	}
	if b.name == nil {
		b.name = func(name string) string { return name }
	}
	if b.needless == nil {
		b.needless = fencing.Terms.Needless
	}
	return func(_ context.Context, dir string) (*guardtest.Client, error) {
		f := &files{dir: dir, break_: b}
		return &guardtest.Client{
			Check: func(ctx context.Context, c fencing.Claim) error { return f.do(ctx, c, nil, nil) },
			Write: func(ctx context.Context, c fencing.Claim, value string, between func()) error {
				return f.do(ctx, c, &value, between)
			},
			Read: func(_ context.Context, resource string) (string, error) {
				r, err := f.load(f.name(resource))
				return r.Value, err
			},
			SetTerms: func(_ context.Context, text string) error { return f.setTerms(text) },
			Wipe:     f.wipe,
			Pinned: func(ctx context.Context, id fencing.Nonce, c fencing.Claim) error {
				return (&files{dir: dir, id: id, break_: b}).do(ctx, c, nil, nil)
			},
			Update: f.update, Hand: f.hand, Savepoint: f.savepoint, Keeper: f, Ends: f.ends(),
		}, nil
	}
}

// do checks the claim, and writes if there is a value.
func (f *files) do(ctx context.Context, c fencing.Claim, value *string, between func()) error {
	if err := ctx.Err(); err != nil && !f.deaf {
		return err
	}
	if err := c.Validate(); err != nil && !f.credulous {
		return err
	}
	if value == nil && !f.hasty {
		c = c.At(0)
	}
	c.Resource = f.name(c.Resource)
	unlock, err := f.lock(context.WithoutCancel(ctx), c.Resource)
	if err != nil {
		return err
	}
	defer func() { unlock() }() // of the lock that is held by then
	r, err := f.load(c.Resource)
	if err != nil {
		return err
	}
	if f.early && value != nil {
		r.Value = *value
		if err := f.save(c.Resource, r); err != nil {
			return err
		}
	}
	if f.tokens != nil {
		r.Token = f.tokens[c.Resource]
	}
	before := r
	if err := f.judge(c, &r); err != nil {
		if r != before {
			err = errors.Join(err, f.save(c.Resource, r))
		}
		return err
	}
	if err := f.pin(c); err != nil {
		return err
	}
	if f.unlocked {
		time.Sleep(50 * time.Microsecond) // the round trip between the two steps
	}
	if f.tokens != nil {
		f.tokens[c.Resource] = c.Token
	}
	if value == nil {
		return f.save(c.Resource, r)
	}
	if f.steps == nil {
		between()
		r.Value = *value
		return f.save(c.Resource, r)
	}
	for i, s := range f.steps {
		if i > 0 {
			unlock()
			between()
			time.Sleep(50 * time.Microsecond)
			if unlock, err = f.lock(ctx, c.Resource); err != nil {
				return err
			}
		}
		now, err := f.load(c.Resource)
		if err != nil {
			return err
		}
		if s == saveToken {
			now.Seen = r.Seen
		} else {
			now.Value = *value
		}
		if err := f.save(c.Resource, now); err != nil {
			return err
		}
	}
	return nil
}

func (f *files) path(resource string) string {
	sum := sha256.Sum256([]byte(resource))
	return filepath.Join(f.dir, hex.EncodeToString(sum[:8]))
}

// lock returns what ends it. Ending it again does nothing.
func (f *files) lock(ctx context.Context, resource string) (unlock func(), err error) {
	if f.unlocked {
		return func() {}, nil
	}
	l, err := os.OpenFile(f.path(resource)+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(l.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return func() { l.Close() }, nil
		case !errors.Is(err, syscall.EINTR) && !errors.Is(err, syscall.EWOULDBLOCK):
		case ctx.Err() != nil:
			err = ctx.Err()
		default:
			time.Sleep(100 * time.Microsecond)
			continue
		}
		l.Close()
		return nil, fmt.Errorf("lock %q: %w", resource, err)
	}
}

// load returns what is remembered of a resource, and the terms by which claims on it are judged.
func (f *files) load(resource string) (r record, err error) {
	if queue := f.buffered[resource]; len(queue) > 0 {
		r = queue[len(queue)-1]
	} else if err := f.read(f.path(resource), &r); err != nil {
		return r, err
	}
	r.terms, err = f.Terms(context.Background())
	if errors.Is(err, fencing.ErrTermsLost) && f.mends {
		return r, nil
	}
	if err == nil {
		err = f.known(r.terms)
	}
	return r, err
}

func (f *files) read(path string, into any) error {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	return err
}

// save replaces the file. What a killed process wrote, the kernel keeps.
func (f *files) save(resource string, r record) error {
	if f.late > 0 {
		f.buffered[resource] = append(f.buffered[resource], r)
		if len(f.buffered[resource]) <= f.late {
			return nil
		}
		r, f.buffered[resource] = f.buffered[resource][0], f.buffered[resource][1:]
	}
	return f.replace(f.path(resource), r)
}

func (f *files) replace(path string, content any) error {
	text, err := json.Marshal(content)
	if err != nil {
		return err
	}
	return f.replaceText(path, text)
}

func (f *files) replaceText(path string, text []byte) error {
	t, err := os.CreateTemp(f.dir, "new-")
	if err != nil {
		return err
	}
	_, err = t.Write(text)
	if err := errors.Join(err, t.Close()); err != nil {
		return err
	}
	return os.Rename(t.Name(), path)
}
