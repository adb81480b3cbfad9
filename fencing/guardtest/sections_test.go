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
	patience := 30 * time.Second
	if f.unsorted {
		patience = 5 * time.Second // of two that wait for each other one gives up
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
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
	shown := map[string]record{} // as a check leaves it, which makes no write
	var repeated, refused error
	news := false
	for _, c := range list {
		name := f.name(c.Resource)
		r, err := f.load(name)
		if err != nil {
			return fail(err)
		}
		look := r
		switch err := f.judge(c, &r); {
		case errors.Is(err, fencing.ErrRepeated):
			repeated = err
		case err != nil:
			refused = err
		default:
			news = news || c.Sequence != 0
			if err := f.judge(c.At(0), &look); err != nil {
				return fail(err)
			}
		}
		if f.piecemeal && refused == nil && repeated == nil {
			if err := f.save(name, r); err != nil {
				return fail(err)
			}
		}
		seen[c.Resource], shown[c.Resource] = r, look
	}
	if refused != nil && !f.heedless {
		return fail(refused)
	}
	if repeated != nil && news && !f.mixes {
		return fail(fencing.ErrReordered)
	}
	if repeated != nil {
		return fail(repeated)
	}
	if f.hasty {
		shown = seen
	}
	for _, c := range list {
		if err := errors.Join(f.pin(c), f.save(f.name(c.Resource), shown[c.Resource])); err != nil {
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
	for name, each := range seen {
		if name == resource {
			each.Value = value
		}
		if err := f.save(f.name(name), each); err != nil {
			return err
		}
	}
	return nil
}

// ends are sections that lose their locks on the way.
func (f *files) ends() map[guardtest.End]guardtest.Ended {
	all := map[guardtest.End]guardtest.Ended{}
	for _, end := range []guardtest.End{
		guardtest.Deadlock, guardtest.ImplicitCommit, guardtest.Interrupt, guardtest.LostConnection, guardtest.ManualCommit,
	} {
		all[end] = func(ctx context.Context, claims fencing.Claims, resource string, ended func(), change guardtest.Change,
		) error {
			seen, unlock, err := f.begin(ctx, claims)
			if err != nil {
				return err
			}
			unlock()
			ended()
			r := seen[resource]
			value, err := change(ctx, r.Value)
			switch {
			case f.trusted == end:
				r.Value = value
				return errors.Join(err, f.save(f.name(resource), r))
			case f.retried:
				_, err = change(ctx, r.Value)
			case f.accused:
				return fencing.ErrStale
			}
			return errors.Join(fencing.ErrUnfenced, err)
		}
	}
	return all
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

// pin sets the space of the terms unless it is set.
func (f *files) pin(c fencing.Claim) error {
	t, err := f.Terms(context.Background())
	if errors.Is(err, fencing.ErrTermsLost) && f.mends {
		t, err = fencing.NewTerms(), nil
	}
	if pinned := t.Pin(c); err == nil && pinned != t {
		return f.setTerms(pinned.String())
	}
	return err
}

func (f *files) setTerms(text string) error {
	if text == "" {
		return os.Remove(f.termsPath())
	}
	return f.replaceText(f.termsPath(), []byte(text))
}

func (f *files) Terms(context.Context) (t fencing.Terms, err error) {
	text, err := os.ReadFile(f.termsPath())
	if errors.Is(err, os.ErrNotExist) {
		return t, fencing.ErrTermsLost
	}
	if err == nil {
		t, err = fencing.ParseTerms(string(text))
	}
	if f.credits && errors.Is(err, fencing.ErrGuardVersion) {
		return fencing.Terms{}, nil
	}
	return t, err
}

func (f *files) Create(ctx context.Context) error {
	_, err := f.Terms(ctx)
	if !errors.Is(err, fencing.ErrTermsLost) {
		return err
	}
	all, failed := filepath.Glob(filepath.Join(f.dir, "????????????????"))
	if len(all) > 0 && !f.heals || failed != nil {
		return errors.Join(err, failed)
	}
	return f.setTerms(fencing.NewTerms().String())
}

func (f *files) Migrate(ctx context.Context) error {
	_, err := f.Terms(ctx)
	return err
}

// wipe removes all but the files that are locked.
func (f *files) wipe(context.Context) error {
	all, err := filepath.Glob(filepath.Join(f.dir, "????????????????"))
	for _, path := range append(all, f.termsPath()) {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

func (f *files) Seen(_ context.Context, resource string) (fencing.Seen, error) {
	r, err := f.load(f.name(resource))
	return r.Seen, err
}

func (f *files) change(next func(fencing.Terms, error) (fencing.Terms, error)) error {
	t, err := f.Terms(context.Background())
	if err == nil {
		err = f.known(t)
	}
	n, err := next(t, err)
	if err != nil {
		return err
	}
	if f.accept != nil {
		n = f.accept(t, n)
	}
	return f.setTerms(n.String())
}

func (f *files) Accept(_ context.Context, space string, floor fencing.Token) error {
	return f.change(func(t fencing.Terms, err error) (fencing.Terms, error) {
		if errors.Is(err, fencing.ErrTermsLost) {
			t, err = fencing.LostTerms(), nil
		}
		if err != nil {
			return t, err
		}
		return t.Accept(space, floor)
	})
}

func (f *files) Raise(_ context.Context, floor fencing.Token) error {
	return f.change(func(t fencing.Terms, err error) (fencing.Terms, error) {
		if err != nil {
			return t, err
		}
		return t.Raise(floor)
	})
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
