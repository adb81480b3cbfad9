package statement

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/fencelock/fencelock/fencing"
)

// Conn is a transaction of some client library.
type Conn interface {
	// Exec executes a statement and returns how many rows it changed.
	Exec(ctx context.Context, query string, args ...any) (rows int64, err error)
	// Row scans the one row that a query answers with, and reports whether there was one.
	Row(ctx context.Context, query string, args []any, into ...any) (found bool, err error)
}

// ErrOldView: the transaction has read something before it showed its claim, and goes on reading what was true then.
var ErrOldView = errors.New("the transaction's view of the data is older than the check: " +
	"show the claim before anything is read")

// Check shows the claims to the guard inside the transaction, with what must come of that: the caller rolls back after
// an error. First says that nothing was executed in the transaction before.
func (s Set) Check(ctx context.Context, db Conn, claims []fencing.Claim, first bool) error {
	seen := make([]fencing.Seen, len(claims))
	for i, c := range claims {
		var err error
		if seen[i], err = s.lock(ctx, db, c.Resource, first); err != nil {
			return fmt.Errorf("check %q: %w", c.Resource, err)
		}
	}
	terms, known, err := s.terms(ctx, db)
	if err == nil && !known && slices.ContainsFunc(seen, func(s fencing.Seen) bool { return s.Token != 0 }) {
		err = fencing.ErrTermsLost // the first check of all has set them together with the row
	}
	if err == nil && !known {
		if _, err = db.Exec(ctx, s.Pin, claims[0].Space); err == nil {
			terms, known, err = s.terms(ctx, db)
		}
		if err == nil && !known {
			err = errors.New("the guard's terms are gone again")
		}
	}
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
		r := remember[i]
		if _, err := db.Exec(
			ctx, s.Remember, int64(r.Epoch), int64(r.Token), int64(r.Sequence), c.Resource,
		); err != nil {
			return fmt.Errorf("check %q: %w", c.Resource, err)
		}
	}
	return nil
}

// lock locks the row of a resource and returns what it holds.
func (s Set) lock(ctx context.Context, db Conn, resource string, first bool) (fencing.Seen, error) {
	if _, err := db.Exec(ctx, s.Lock, resource); err != nil {
		return fencing.Seen{}, err
	}
	viewed := int64(-1)
	if s.View != "" && !first {
		if _, err := db.Row(ctx, s.View, []any{resource}, &viewed); err != nil {
			return fencing.Seen{}, err
		}
	}
	seen, checks, known, err := s.seen(ctx, db, resource)
	switch {
	case err != nil:
		return seen, err
	case !known:
		return seen, errors.New("the row that was locked is not there")
	case s.View != "" && !first && viewed != checks:
		return seen, ErrOldView
	}
	return seen, nil
}

func (s Set) seen(ctx context.Context, db Conn, resource string) (_ fencing.Seen, checks int64, known bool, _ error) {
	var epoch, token, sequence int64
	known, err := db.Row(ctx, s.Seen, []any{resource}, &epoch, &token, &sequence, &checks)
	return fencing.Seen{
		Epoch: uint64(epoch), Token: fencing.Token(token), Sequence: uint64(sequence),
	}, checks, known, err
}

func (s Set) terms(ctx context.Context, db Conn) (fencing.Terms, bool, error) {
	var epoch, token int64
	var space string
	known, err := db.Row(ctx, s.Terms, nil, &epoch, &space, &token)
	return fencing.Terms{Epoch: uint64(epoch), Space: space, Floor: fencing.Token(token)}, known, err
}

// ReadTerms is Keeper.Terms.
func (s Set) ReadTerms(ctx context.Context, db Conn) (fencing.Terms, error) {
	terms, _, err := s.terms(ctx, db)
	return terms, err
}

// ReadSeen is Keeper.Seen.
func (s Set) ReadSeen(ctx context.Context, db Conn, resource string) (fencing.Seen, error) {
	seen, _, _, err := s.seen(ctx, db, resource)
	return seen, err
}

// Change sets the terms to what change makes of them, while no check is under way.
func (s Set) Change(ctx context.Context, db Conn, change func(fencing.Terms) (fencing.Terms, error)) error {
	if s.Alone != "" {
		if _, err := db.Exec(ctx, s.Alone); err != nil {
			return err
		}
	}
	terms, err := s.ReadTerms(ctx, db)
	if err != nil {
		return err
	}
	if terms, err = change(terms); err != nil {
		return err
	}
	_, err = db.Exec(ctx, s.SetTerms, int64(terms.Epoch), terms.Space, int64(terms.Floor))
	return err
}

// Sweep is Keeper.Clean.
func (s Set) Sweep(ctx context.Context, db Conn) (int64, error) {
	terms, err := s.ReadTerms(ctx, db)
	if err != nil {
		return 0, err
	}
	return db.Exec(ctx, s.Clean, int64(terms.Epoch), int64(terms.Floor))
}

// Elsewhere returns an *InvalidError if the table is named without a schema, and is there in another one than where
// PostgreSQL would create it.
func Elsewhere(ctx context.Context, db Conn, table string) error {
	var schema string
	found, err := db.Row(ctx, `SELECT schemaname FROM pg_catalog.pg_tables
WHERE tablename = $1 AND schemaname <> current_schema() LIMIT 1`, []any{table}, &schema)
	if err == nil && found {
		return &fencing.InvalidError{
			What: "table", Value: table,
			Why: fmt.Sprintf("there is one in the schema %s: name the schema to use", schema),
		}
	}
	return err
}
