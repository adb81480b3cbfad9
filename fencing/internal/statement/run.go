package statement

import (
	"context"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
)

// Conn is a transaction of some client library.
type Conn interface {
	// Exec executes a statement and returns how many rows it changed.
	Exec(ctx context.Context, query string, args ...any) (rows int64, err error)
	// Row scans the one row that a query answers with, and reports whether there was one.
	Row(ctx context.Context, query string, args []any, into ...any) (found bool, err error)
}

// ErrOldView: the transaction has read something before it showed its claim, and keeps reading the state of that time.
var ErrOldView = errors.New("the transaction's view of the data is older than the check: " +
	"show the claim before anything is read")

// Check shows the claims to the guard inside the transaction. The caller rolls back after an error. First is set if
// the transaction has executed no statement before. The section that it returns begins with Begin.
func (s Set) Check(ctx context.Context, db Conn, claims []fencing.Claim, first bool) (_ *Section, err error) {
	if s, err = s.found(ctx, db); err != nil {
		return nil, fmt.Errorf("check %q: %w", claims[0].Resource, err)
	}
	defer func() { s.lost(err) }()
	section := &Section{set: s, claims: claims}
	seen := make([]fencing.Seen, len(claims))
	for i, c := range claims {
		var checks int64
		if seen[i], checks, err = s.lock(ctx, db, c.Resource, first); err != nil {
			return nil, fmt.Errorf("check %q: %w", c.Resource, fault(err))
		}
		if i == 0 {
			section.checks = checks
		}
	}
	if err := s.admit(ctx, db, claims, seen); err != nil || s.Stale == "" {
		return section, err
	}
	if _, err := db.Exec(ctx, s.Stale); err != nil {
		return nil, fmt.Errorf("check %q: %w", claims[0].Resource, err)
	}
	return section, nil
}

// admit judges the claims by the memory of their resources, and remembers them.
func (s Set) admit(ctx context.Context, db Conn, claims []fencing.Claim, seen []fencing.Seen) error {
	terms, err := s.pinned(ctx, db, claims)
	if err != nil {
		return fmt.Errorf("check %q: %w", claims[0].Resource, err)
	}
	next := 0
	remember, err := fencing.JudgeAll(claims, terms, func(string) (fencing.Seen, error) {
		next++
		return seen[next-1], nil
	})
	if err != nil {
		return err
	}
	for i, c := range claims {
		if remember[i] == seen[i] && s.View == "" {
			continue // the row is counted by Lock
		}
		if _, err := db.Exec(ctx, s.Remember, remember[i].String(), c.Resource); err != nil {
			return fmt.Errorf("check %q: %w", c.Resource, err)
		}
	}
	return nil
}

// pinned returns the guard's terms, after the first claim has set their space.
func (s Set) pinned(ctx context.Context, db Conn, claims []fencing.Claim) (fencing.Terms, error) {
	terms, err := s.terms(ctx, db, claims...)
	if err == nil {
		err = s.Memory.Check(terms)
	}
	if pinned := terms.Pin(claims[0]); err == nil && pinned != terms {
		if _, err = db.Exec(ctx, s.Pin, pinned.String(), terms.String()); err == nil {
			terms, err = s.terms(ctx, db) // another client may have been faster
		}
	}
	return terms, err
}

// lock locks the row of a resource and returns its memory, and its count of checks.
func (s Set) lock(ctx context.Context, db Conn, resource string, first bool) (_ fencing.Seen, checks int64, _ error) {
	if _, err := db.Exec(ctx, s.Lock, resource); err != nil {
		return fencing.Seen{}, 0, err
	}
	viewed := int64(-1)
	if s.View != "" && !first {
		if _, err := db.Row(ctx, s.View, []any{resource}, &viewed); err != nil {
			return fencing.Seen{}, 0, err
		}
	}
	seen, checks, known, err := s.seen(ctx, db, resource)
	switch {
	case err != nil:
		return seen, checks, err
	case !known:
		return seen, checks, errors.New("the locked row is missing")
	case s.View != "" && !first && viewed != checks:
		return seen, checks, ErrOldView
	}
	return seen, checks, nil
}

func (s Set) seen(ctx context.Context, db Conn, resource string) (_ fencing.Seen, checks int64, known bool, _ error) {
	var state string
	known, err := db.Row(ctx, s.Seen, []any{resource}, &state, &checks)
	if err != nil || state == "" {
		return fencing.Seen{}, checks, known, err
	}
	seen, err := fencing.ParseSeen(state)
	return seen, checks, known, err
}

// terms returns the guard's terms, or an error that wraps fencing.ErrTermsLost if they are missing. The error is an
// *fencing.InvalidError if the connection cannot carry the claims.
func (s Set) terms(ctx context.Context, db Conn, claims ...fencing.Claim) (fencing.Terms, error) {
	var state, encoding, other string
	into := []any{&state, &encoding, &other}
	if s.find == "" {
		into = into[:1]
	}
	known, err := db.Row(ctx, s.Terms, nil, into...)
	switch {
	case err != nil:
		return fencing.Terms{}, fault(err)
	case other != "":
		return fencing.Terms{}, s.errTwo(other)
	case !known:
		return fencing.Terms{}, fencing.ErrTermsLost
	case state == "":
		return fencing.Terms{}, memory.Older() // its migration is in progress
	}
	if err := readable(encoding, claims); err != nil {
		return fencing.Terms{}, err
	}
	return fencing.ParseTerms(state)
}

// fault returns the error about the guard's memory for a missing table or one with other columns.
func fault(err error) error {
	switch {
	case noTable(err):
		return fmt.Errorf("%w: %w", fencing.ErrTermsLost, err)
	case noColumn(err):
		return fmt.Errorf("%w: %w", memory.Older(), err)
	}
	return err
}

// Create makes the table and its terms, and finds out whether they are there.
func (s Set) Create(ctx context.Context, db Conn) error {
	there, err := s.found(ctx, db)
	if err != nil {
		return err
	}
	steps := there.Schema
	if there.Table != s.Table { // in a schema where the role may have no right to create tables
		steps = steps[len(steps)-1:]
	}
	for _, each := range steps {
		if _, err := db.Exec(ctx, each); err != nil {
			return there.created(err)
		}
	}
	_, err = there.terms(ctx, db)
	return err
}

// ReadTerms is Keeper.Terms.
func (s Set) ReadTerms(ctx context.Context, db Conn) (_ fencing.Terms, err error) {
	if s, err = s.found(ctx, db); err != nil {
		return fencing.Terms{}, err
	}
	terms, err := s.terms(ctx, db)
	s.lost(err)
	return terms, err
}

// ReadSeen is Keeper.Seen.
func (s Set) ReadSeen(ctx context.Context, db Conn, resource string) (_ fencing.Seen, err error) {
	if s, err = s.found(ctx, db); err == nil {
		_, err = s.terms(ctx, db, fencing.Claim{Resource: resource})
	}
	if err != nil {
		s.lost(err)
		return fencing.Seen{}, err
	}
	seen, _, _, err := s.seen(ctx, db, resource)
	return seen, err
}

// Accept is Keeper.Accept.
func (s Set) Accept(ctx context.Context, db Conn, space string, floor fencing.Token) error {
	return s.change(ctx, db, func(t fencing.Terms, err error) (fencing.Terms, error) {
		if errors.Is(err, fencing.ErrTermsLost) && !noTable(err) {
			t, err = fencing.LostTerms(), nil
		}
		if err != nil {
			return t, err
		}
		return t.Accept(space, floor)
	})
}

// Raise is Keeper.Raise.
func (s Set) Raise(ctx context.Context, db Conn, floor fencing.Token) error {
	return s.change(ctx, db, func(t fencing.Terms, err error) (fencing.Terms, error) {
		if err != nil {
			return t, err
		}
		return t.Raise(floor)
	})
}

// change sets the terms to the result of f, while no check is in progress.
func (s Set) change(
	ctx context.Context, db Conn, f func(fencing.Terms, error) (fencing.Terms, error),
) (err error) {
	if s, err = s.found(ctx, db); err != nil {
		return err
	}
	if s.Alone != "" {
		if _, err := db.Exec(ctx, s.Alone); err != nil {
			return fault(err)
		}
	}
	terms, err := s.terms(ctx, db)
	if err == nil {
		err = s.Memory.Check(terms)
	}
	if terms, err = f(terms, err); err != nil {
		return err
	}
	_, err = db.Exec(ctx, s.SetTerms, terms.String())
	return err
}

// Sweep is Keeper.Clean.
func (s Set) Sweep(ctx context.Context, db Conn) (_ int64, err error) {
	if s, err = s.found(ctx, db); err != nil {
		return 0, err
	}
	terms, err := s.terms(ctx, db)
	if err == nil {
		err = s.Memory.Check(terms)
	}
	if err != nil {
		return 0, err
	}
	return db.Exec(ctx, s.Clean, int64(terms.Epoch), int64(terms.Floor)) //nolint:gosec // of 63 bits
}
