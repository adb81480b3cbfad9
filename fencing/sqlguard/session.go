package sqlguard

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// session is the transaction of one section, and in MySQL and MariaDB the connection that it is on. There autocommit is
// off until the transaction has ended, so that statements after an implicit commit do not commit on their own, and the
// section can still roll them back.
type session struct {
	g    *Guard
	tx   *sql.Tx
	conn *sql.Conn // nil: not MySQL

	// answered: the database has confirmed the end of the transaction. Setting autocommit within one would commit it.
	answered bool
	// unfenced: the transaction ended before its section. The connection may have more than that: LOCK TABLES.
	unfenced bool
}

// begin begins the transaction of a section.
func (g *Guard) begin(ctx context.Context) (*session, error) {
	s := &session{g: g}
	options := &sql.TxOptions{Isolation: g.level}
	var err error
	if g.dialect != MySQL {
		s.tx, err = g.db.BeginTx(ctx, options)
		return s, err
	}
	if g.pool == nil {
		s.conn = g.db.(*sql.Conn) // New has seen it
	} else if s.conn, err = g.pool.Conn(ctx); err != nil {
		return nil, err
	}
	if _, err = s.conn.ExecContext(ctx, statement.AutocommitOff); err == nil {
		s.tx, err = s.conn.BeginTx(ctx, options)
	}
	if err != nil {
		s.end(ctx)
		return nil, err
	}
	return s, nil
}

// failed returns the error of a section with a function that failed with err.
func (s *session) failed(ctx context.Context, section *statement.Section, err error) error {
	if ctx.Err() != nil {
		return err
	}
	verified := section.Verify(ctx, conn{s.tx})
	if errors.Is(verified, fencing.ErrUnfenced) || errors.Is(verified, sql.ErrTxDone) {
		s.unfenced = true
		if s.conn == nil || !section.Undone(ctx, conn{s.tx}) {
			return named(statement.Unfenced(err))
		}
	}
	return err
}

func (s *session) commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err // database/sql rolls back
	}
	err := s.tx.Commit()
	s.answered = err == nil
	if err == nil || statement.Answered(err) || errors.Is(err, sql.ErrTxDone) {
		return err
	}
	return fmt.Errorf("sqlguard: %w: %w", fencing.ErrUnknown, err)
}

// end rolls back an uncommitted transaction, and returns the connection unchanged, or closes it.
func (s *session) end(ctx context.Context) {
	if s.tx != nil && !s.answered {
		s.answered = s.tx.Rollback() == nil
	}
	if s.conn == nil {
		return
	}
	if s.answered && !s.unfenced {
		_, err := s.conn.ExecContext(ctx, statement.AutocommitBack)
		s.answered = err == nil
	}
	if !s.answered || s.unfenced {
		s.conn.Raw(func(any) error { return driver.ErrBadConn }) //nolint:errcheck // it returns this very error
	}
	if s.g.pool != nil {
		s.conn.Close() //nolint:errcheck // it returns to the pool, or is closed already
	}
}
