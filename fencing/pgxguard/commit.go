package pgxguard

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// errNotice: the wait for a synchronous standby was cancelled. The server still reports the commit as a success, and
// adds a notice, in its own language, so the text is not compared.
var errNotice = errors.New("the server raised a notice while it committed")

// commit commits, and returns an error that wraps fencing.ErrUnknown if the answer is missing or ambiguous.
func commit(ctx context.Context, tx pgx.Tx) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	// The pool's configuration is the caller's, so its OnNotice is out of reach; the trace of the connection's messages
	// is not.
	seen := &notices{frontend: tx.Conn().PgConn().Frontend()}
	seen.frontend.Trace(seen, pgproto3.TracerOptions{SuppressTimestamps: true})
	err := tx.Commit(ctx)
	switch {
	case err == nil && seen.any:
		return fmt.Errorf("pgxguard: %w: %w", fencing.ErrUnknown, errNotice)
	case err == nil, statement.Answered(err), errors.Is(err, pgx.ErrTxClosed), errors.Is(err, pgx.ErrTxCommitRollback):
		return err
	}
	return fmt.Errorf("pgxguard: %w: %w", fencing.ErrUnknown, err)
}

// notices is the trace of one statement, in which only notices count. It ends with the statement: afterwards another
// caller may have the connection.
type notices struct {
	frontend *pgproto3.Frontend
	any      bool
}

func (n *notices) Write(line []byte) (int, error) {
	n.any = n.any || bytes.Contains(line, []byte("\tNoticeResponse\t"))
	if bytes.Contains(line, []byte("\tReadyForQuery\t")) {
		n.frontend.Untrace()
	}
	return len(line), nil
}
