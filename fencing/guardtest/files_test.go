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

// files is a guarded resource in a folder: the smallest one that lasts, for the suite's own tests. Each resource is a file
// that is replaced as a whole, under a lock that the kernel gives up for processes that die.
type files struct {
	dir   string
	space string
	break_
}

// break_ is what a mutant does otherwise. The zero value breaks nothing.
type break_ struct {
	name     func(string) string                                  // under which a resource is remembered
	judge    func(c fencing.Claim, space string, r *record) error // in place of fencing.Judge; it may change the record
	unlocked bool                                                 // no lock at all
	steps    []step                                               // of a write, each saved by itself; nil: both at once
	early    bool                                                 // the write comes before the check
	deaf     bool                                                 // to the context
	late     int                                                  // how many answers go ahead of their saving
	tokens   map[string]fencing.Token                             // what is remembered in the process only
	buffered map[string][]record
}

type step uint8

const (
	saveToken step = iota + 1
	saveValue
)

// record is what a file holds.
type record struct {
	Known bool
	Token fencing.Token
	Space string
	Value string
}

func (r record) seen(space string) fencing.Seen {
	if !r.Known {
		return fencing.Seen{Space: space}
	}
	return fencing.Seen{Token: r.Token, Space: r.Space}
}

func judge(c fencing.Claim, space string, r *record) error {
	return fencing.Judge(c, space, r.seen(space))
}

// opener returns a guardtest.Open for a resource that is broken in that way. Its address is the folder.
func opener(b break_) guardtest.Open {
	if b.judge == nil {
		b.judge = judge
	}
	if b.name == nil {
		b.name = func(name string) string { return name }
	}
	return func(_ context.Context, dir string) (*guardtest.Client, error) {
		f := &files{dir: dir, space: space, break_: b}
		return &guardtest.Client{
			Check: func(ctx context.Context, c fencing.Claim) error { return f.do(ctx, c, nil, nil) },
			Write: func(ctx context.Context, c fencing.Claim, value string, between func()) error {
				return f.do(ctx, c, &value, between)
			},
			Read: func(_ context.Context, resource string) (string, error) {
				r, err := f.load(resource)
				return r.Value, err
			},
		}, nil
	}
}

// do checks the claim, and writes if there is a value.
func (f *files) do(ctx context.Context, c fencing.Claim, value *string, between func()) error {
	if err := ctx.Err(); err != nil && !f.deaf {
		return err
	}
	c.Resource = f.name(c.Resource)
	unlock, err := f.lock(c.Resource)
	if err != nil {
		return err
	}
	defer func() { unlock() }() // the one that is held by then
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
		r.Token, r.Known = f.tokens[c.Resource], true
		r.Space = f.space
	}
	before := r
	if err := f.judge(c, f.space, &r); err != nil {
		if r != before {
			err = errors.Join(err, f.save(c.Resource, r))
		}
		return err
	}
	if f.unlocked {
		time.Sleep(50 * time.Microsecond) // the round trip between the two steps
	}
	r.Known, r.Token, r.Space = true, c.Token, f.space
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
			if unlock, err = f.lock(c.Resource); err != nil {
				return err
			}
		}
		now, err := f.load(c.Resource)
		if err != nil {
			return err
		}
		if s == saveToken {
			now.Known, now.Token, now.Space = true, c.Token, f.space
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
func (f *files) lock(resource string) (unlock func(), err error) {
	if f.unlocked {
		return func() {}, nil
	}
	l, err := os.OpenFile(f.path(resource)+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(l.Fd()), syscall.LOCK_EX)
		if err == nil {
			return func() { l.Close() }, nil
		}
		if !errors.Is(err, syscall.EINTR) {
			l.Close()
			return nil, fmt.Errorf("lock %q: %w", resource, err)
		}
	}
}

func (f *files) load(resource string) (r record, err error) {
	if queue := f.buffered[resource]; len(queue) > 0 {
		return queue[len(queue)-1], nil
	}
	text, err := os.ReadFile(f.path(resource))
	if errors.Is(err, os.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	return r, err
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
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	t, err := os.CreateTemp(f.dir, "new-")
	if err != nil {
		return err
	}
	_, err = t.Write(text)
	if err := errors.Join(err, t.Close()); err != nil {
		return err
	}
	return os.Rename(t.Name(), f.path(resource))
}
