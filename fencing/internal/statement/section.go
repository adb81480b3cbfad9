package statement

// The end of a guarded section. The database can end a transaction before its section does: by a deadlock, an implicit
// commit, an interrupt, or because a statement was COMMIT. The lock on the guard's rows is gone then, and another
// holder may have written. So a section verifies at its end that it is still in the transaction of its check.

import (
	"context"
	"fmt"
	"reflect"
	"strings"

	"github.com/fencelock/fencelock/fencing"
)

// Section is a guarded section with claims admitted in a transaction.
type Section struct {
	set    Set
	claims []fencing.Claim
	checks int64 // of the first claim's row, before this check
}

// Begin leaves the mark in the transaction that Verify looks for.
func (s *Section) Begin(ctx context.Context, db Conn) error {
	for _, c := range s.claims {
		if s.set.Mark == "" {
			break
		}
		if _, err := db.Exec(ctx, s.set.Mark, c.Resource); err != nil {
			return s.failed(err)
		}
	}
	if s.set.Savepoint != "" {
		if _, err := db.Exec(ctx, s.set.Savepoint); err != nil {
			return s.failed(err)
		}
	}
	return nil
}

// Verify is the last step before the commit. It returns an error that wraps fencing.ErrUnfenced if the transaction is
// another one than that of the check, and the database's own error if that cannot be found out.
func (s *Section) Verify(ctx context.Context, db Conn) error {
	if s.set.Release != "" {
		if _, err := db.Exec(ctx, s.set.Release); gone(err) {
			return s.failed(fencing.ErrUnfenced)
		} else if err != nil {
			return s.failed(err)
		}
	}
	if s.set.Written != "" {
		var rows int64
		if _, err := db.Row(ctx, s.set.Written, []any{s.claims[0].Resource}, &rows); err != nil {
			return s.failed(err)
		} else if rows == 0 {
			return s.failed(fencing.ErrUnfenced)
		}
	}
	for _, c := range s.claims {
		if s.set.Unmark == "" {
			break
		}
		if rows, err := db.Exec(ctx, s.set.Unmark, c.Resource); err != nil {
			return s.failed(err)
		} else if rows != 1 {
			return s.failed(fencing.ErrUnfenced)
		}
	}
	return nil
}

func (s *Section) failed(err error) error {
	return fmt.Errorf("the end of the section of %q: %w", s.claims[0].Resource, err)
}

// Undone reports whether the transaction of the check was certainly rolled back, after Verify found that it has ended:
// nobody, and so not this section either, has committed a check since. It is for sessions in which no statement commits
// on its own.
func (s *Section) Undone(ctx context.Context, db Conn) bool {
	if s.set.View == "" {
		return false
	}
	var checks int64
	known, err := db.Row(ctx, s.set.View, []any{s.claims[0].Resource}, &checks)
	return err == nil && (!known || checks == s.checks)
}

// gone reports whether the database returned that there is no such savepoint.
func gone(err error) bool {
	if n := number(err); n != 0 {
		return n == 1305 // ER_SP_DOES_NOT_EXIST
	}
	return err != nil && strings.Contains(err.Error(), "no such savepoint") // SQLite
}

// Unfenced returns the error of a section with a function that failed with err after its transaction had ended. A
// refusal in err's chain is hidden: it is not about this section's claims.
func Unfenced(err error) error {
	if fencing.Refusal(err) {
		return fmt.Errorf("%w, and its function failed: %v", fencing.ErrUnfenced, err)
	}
	return fmt.Errorf("%w, and its function failed: %w", fencing.ErrUnfenced, err)
}

// Answered reports whether err is the database's answer to a commit, and not the lack of one: the commit failed.
func Answered(err error) bool {
	for _, each := range chain(err) {
		if e, ok := each.(interface{ SQLState() string }); ok { // pgx, lib/pq
			// A stopping server may return that between the commit and its answer.
			return e.SQLState() != "57P01" && !strings.HasPrefix(e.SQLState(), "08")
		}
		if _, ok := each.(interface{ Code() int }); ok { // modernc.org/sqlite
			return true
		}
		v := reflect.Indirect(reflect.ValueOf(each))
		if v.Kind() == reflect.Struct && (v.FieldByName("Number").IsValid() || v.FieldByName("ExtendedCode").IsValid()) {
			return true
		}
	}
	return false
}

// Statements for MySQL and MariaDB before the transaction of a section and after the answer to its end. The latter also
// removes the mark by which triggers know the session.
const (
	AutocommitOff  = `SET @fencing_autocommit = @@autocommit, autocommit = 0`
	AutocommitBack = `SET autocommit = @fencing_autocommit, @fencing_mark = NULL`
)

// WithoutSequence takes the sequences out of the claims of a check without a write: only a step that writes records
// one.
func WithoutSequence(claims []fencing.Claim) {
	for i := range claims {
		claims[i].Sequence = 0
	}
}
