package statement

// From format 1, with numbers in separate columns, to format 2, with one text. Where the database changes tables
// within transactions, the migration is one transaction. MySQL and MariaDB do not: there the columns of both formats
// are there for a while, and the transaction between the two changes of the table decides which of them is in force.

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
)

// Migrate brings the table to the present format. Tx runs a step in a transaction.
func (s Set) Migrate(ctx context.Context, tx func(func(Conn) error) error) error {
	if err := tx(func(db Conn) (err error) { s, err = s.found(ctx, db); return err }); err != nil {
		return err
	}
	format := func() error {
		return tx(func(db Conn) error { _, err := s.terms(ctx, db); return err })
	}
	err := format()
	var version *fencing.VersionError
	if err == nil && s.Taint != "" { // the columns of format 1 may be there still
		return tx(func(db Conn) error {
			var epoch, floor, space string
			if _, err := db.Row(ctx, s.Older, nil, &epoch, &floor, &space); err != nil {
				return unless(noColumn(err), err)
			}
			_, err := db.Exec(ctx, s.Drop[0])
			return err
		})
	}
	if !errors.As(err, &version) || version.Found != 1 {
		return err
	}
	exec := func(queries ...string) func(Conn) error {
		return func(db Conn) error {
			for _, query := range queries {
				if _, err := db.Exec(ctx, query); err != nil {
					return err
				}
			}
			return nil
		}
	}
	steps := []func(Conn) error{exec(s.Add), func(db Conn) error { return s.convert(ctx, db) }, exec(s.Drop...)}
	if s.Taint == "" {
		all := steps
		steps = []func(Conn) error{func(db Conn) error {
			for _, step := range all {
				if err := step(db); err != nil {
					return err
				}
			}
			return nil
		}}
	}
	for i, step := range steps {
		err := tx(step)
		if err == nil || i == 0 && s.Taint != "" && number(err) == 1060 { // ER_DUP_FIELDNAME: begun before
			continue
		}
		if format() == nil {
			return nil // another client was faster
		}
		return err
	}
	return nil
}

func unless(fine bool, err error) error {
	if fine {
		return nil
	}
	return err
}

// convert fills the column of format 2.
func (s Set) convert(ctx context.Context, db Conn) error {
	var epoch, floor, space string
	known, err := db.Row(ctx, s.Older, nil, &epoch, &floor, &space)
	if err != nil {
		return err
	}
	terms := fencing.NewTerms()
	if known {
		if terms, err = memory.OlderTerms(epoch, floor, space); err != nil {
			return err
		}
	}
	filled, err := db.Exec(ctx, s.Fill)
	if err == nil && (known || filled == 0) { // else they are lost, and stay so
		_, err = db.Exec(ctx, s.SetTerms, terms.String())
	}
	if err == nil && s.Taint != "" {
		_, err = db.Exec(ctx, s.Taint)
	}
	return err
}

// number returns the code of an error of MySQL, or 0.
func number(err error) uint64 {
	for _, each := range chain(err) {
		v := reflect.Indirect(reflect.ValueOf(each))
		if v.Kind() != reflect.Struct {
			continue
		}
		if n := v.FieldByName("Number"); n.IsValid() && n.CanUint() { // go-sql-driver/mysql
			return n.Uint()
		}
	}
	return 0
}

// noTable reports whether the database returned that there is no such table.
func noTable(err error) bool { return says(err, "42P01", 1146, "no such table") }

// noColumn reports whether the database returned that there is no such column.
func noColumn(err error) bool { return says(err, "42703", 1054, "no such column", "has no column") }

// says reports whether err has a code or text of PostgreSQL, MySQL or SQLite.
func says(err error, state string, code uint64, texts ...string) bool {
	for _, each := range chain(err) {
		if e, ok := each.(interface{ SQLState() string }); ok { // pgx, lib/pq
			return e.SQLState() == state
		}
	}
	if n := number(err); n != 0 || err == nil {
		return n == code
	}
	return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(err.Error(), text) })
}
