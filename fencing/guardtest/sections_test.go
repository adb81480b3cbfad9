//go:build unix

package guardtest_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
)

type sectionKey struct{}

// begin locks the resources of the claims, judges them, and remembers what is admitted. Seen holds what was there.
func (f *files) begin(ctx context.Context, claims fencing.Claims) (seen map[string]record, end func(), _ error) {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return nil, nil, err
	}
	if f.unsorted {
		list = claims.List()
	}
	var unlocks []func()
	end = func() {
		for _, unlock := range unlocks {
			unlock()
		}
	}
	fail := func(err error) (map[string]record, func(), error) {
		end()
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second) // of two that wait for each other one gives up
	defer cancel()
	for i, c := range list {
		if i > 0 {
			time.Sleep(time.Millisecond) // a round trip
		}
		unlock, err := f.lock(ctx, f.name(c.Resource))
		if err != nil {
			return fail(err)
		}
		unlocks = append(unlocks, unlock)
	}
	seen = map[string]record{}
	var repeated, refused error
	for _, c := range list {
		name := f.name(c.Resource)
		r, err := f.load(name)
		if err != nil {
			return fail(err)
		}
		switch err := f.judge(c, &r); {
		case errors.Is(err, fencing.ErrRepeated):
			repeated = err
		case err != nil:
			refused = err
		case f.piecemeal && refused == nil:
			if err := f.save(name, r); err != nil {
				return fail(err)
			}
		}
		seen[c.Resource] = r
	}
	if refused != nil && !f.heedless {
		return fail(refused)
	}
	if repeated != nil {
		return fail(repeated)
	}
	for _, c := range list {
		if err := errors.Join(f.pin(c), f.save(f.name(c.Resource), seen[c.Resource])); err != nil {
			return fail(err)
		}
	}
	return seen, end, nil
}

func (f *files) update(ctx context.Context, claims fencing.Claims, resource string, change guardtest.Change) error {
	if ctx.Value(sectionKey{}) != nil && !f.naive {
		return fencing.ErrNested
	}
	old, err := f.load(f.name(resource))
	if err != nil {
		return err
	}
	value := ""
	if f.ahead {
		if value, err = change(ctx, old.Value); err != nil {
			return err
		}
		time.Sleep(time.Millisecond) // a round trip
	}
	seen, end, err := f.begin(ctx, claims)
	if errors.Is(err, fencing.ErrRepeated) {
		return nil
	}
	if err != nil {
		return err
	}
	defer end()
	r := seen[resource]
	if !f.ahead {
		if value, err = change(context.WithValue(ctx, sectionKey{}, true), r.Value); err != nil {
			return err
		}
	}
	r.Value = value
	return f.save(f.name(resource), r)
}

func (f *files) hand(ctx context.Context, c fencing.Claim, h guardtest.Hand) error {
	view, err := f.load(f.name(c.Resource))
	if err != nil {
		return err
	}
	h.Early()
	seen, end, err := f.begin(ctx, c)
	if err != nil {
		if !h.Careless || !f.careless {
			return err
		}
		return f.save(f.name(c.Resource), record{Seen: view.Seen, Value: h.Change(view.Value)})
	}
	defer end()
	r := seen[c.Resource]
	if f.oldView {
		r.Value = view.Value
	}
	r.Value = h.Change(r.Value)
	return f.save(f.name(c.Resource), r)
}

func (f *files) savepoint(_ context.Context, c fencing.Claim, rival func(), value string) error {
	if !f.undone {
		return fencing.ErrNested
	}
	rival()
	r, err := f.load(f.name(c.Resource))
	if err != nil {
		return err
	}
	r.Value = value
	return f.save(f.name(c.Resource), r)
}

// The operator's side. The terms are in a file of their own.

func (f *files) termsPath() string { return filepath.Join(f.dir, "terms") }

// pin sets the terms unless they are set.
func (f *files) pin(c fencing.Claim) error {
	if _, err := os.Stat(f.termsPath()); err == nil {
		return nil
	}
	return f.replace(f.termsPath(), fencing.First(c))
}

func (f *files) Terms(context.Context) (t fencing.Terms, err error) {
	return t, f.read(f.termsPath(), &t)
}

func (f *files) Seen(_ context.Context, resource string) (fencing.Seen, error) {
	r, err := f.load(f.name(resource))
	return r.Seen, err
}

func (f *files) change(next func(fencing.Terms) (fencing.Terms, error)) error {
	t, err := f.Terms(context.Background())
	if err != nil {
		return err
	}
	n, err := next(t)
	if err != nil {
		return err
	}
	if f.accept != nil {
		n = f.accept(t, n)
	}
	return f.replace(f.termsPath(), n)
}

func (f *files) Accept(_ context.Context, space string, floor fencing.Token) error {
	return f.change(func(t fencing.Terms) (fencing.Terms, error) { return t.Accept(space, floor) })
}

func (f *files) Raise(_ context.Context, floor fencing.Token) error {
	return f.change(func(t fencing.Terms) (fencing.Terms, error) { return t.Raise(floor) })
}

func (f *files) Clean(ctx context.Context) (n int64, _ error) {
	terms, err := f.Terms(ctx)
	if err != nil {
		return 0, err
	}
	all, err := filepath.Glob(filepath.Join(f.dir, "????????????????"))
	if err != nil {
		return 0, err
	}
	for _, path := range all {
		var r record
		if err := f.read(path, &r); err != nil {
			return n, err
		}
		if f.needless(terms, r.Seen) {
			if err := os.Remove(path); err != nil {
				return n, err
			}
			n++
		}
	}
	return n, nil
}
