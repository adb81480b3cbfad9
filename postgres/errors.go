// This file classifies errors of PostgreSQL and pgx by the one question that matters: was the transaction
// committed? The server names a state (SQLSTATE, appendix A of its manual) only if it has ended the transaction,
// except where it may have been stopped between the commit and the answer. Without a state the connection broke, and
// only pgx knows whether anything had been written to it.
//
// The table states has the states that this driver distinguishes, by all five characters or by the first two.
// TestStates tries each of them before and after the commit. PgBouncer sends 08P01 for all its errors; if the
// text shows that no server has the request, the request had no effect (pooled).

package postgres

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// named gives an error about a name its class: the encoding of the database may lack characters of the name.
func named(name string, err error) error {
	if sqlState(err) == "22P05" {
		err = fmt.Errorf("%w: %w", &backend.InvalidError{
			Kind: backend.ErrInvalidName, What: "name", Value: name, Why: "the encoding of the database lacks its characters",
		}, err)
	}
	return err
}

// callError names the call, and gives err its class, for calls outside of the engine. It is nil for nil.
func callError(call string, err error) error {
	if text := remedy(err); text != "" {
		err = fmt.Errorf("%w%s", err, text)
	}
	return kit.CallError(driverName, call, "", err, func(err error) error {
		switch {
		case unsent(err), rolledBack(err):
			return backend.ErrUnavailable
		case misconfigured(err):
			return backend.ErrMisconfigured
		}
		return nil
	})
}

// errNotice: the server sent a notice between the statement and the end of its commit. "Canceling wait for synchronous
// replication" is such a notice, in the server's language, so its text is not compared; the server then reports a
// success, although the commit is not replicated. All other notices are treated alike: the statements raise no
// notices, and a needless unknown outcome only costs a look (TestSynchronousCommitWithoutAStandby).
var errNotice = errors.New("the server raised a notice while it committed")

// unsent reports whether no byte of the request left: the connection could not be made, or pgx knows that it wrote
// no byte.
func unsent(err error) bool {
	var dial *pgconn.ConnectError
	return pgconn.SafeToRetry(err) || errors.As(err, &dial) && !misconfigured(err)
}

// sqlState returns the five characters by which the server names an error, or "" for any other error.
func sqlState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// meaning describes the effect of a state on the statement that it ended.
type meaning struct {
	undone bool // the transaction had no effect; otherwise it may have been committed before the answer
	again  bool // another try may succeed, after a pause and on another connection if this one has ended
	never  bool // another try fails until an operator changes the settings, the rights or the schema
}

// states are the meanings, by state or by class. A state that is not here failed for a reason that the driver does not
// know: its call is ErrUnknown.
var states = map[string]meaning{
	"08":    {again: true},               // the connection ended, perhaps after the commit
	"08001": {undone: true, again: true}, // it was not made
	"08004": {undone: true, again: true}, // it was refused

	"25":    {undone: true},              // the state of the transaction does not allow the statement
	"25006": {undone: true},              // read-only, such as on a standby
	"25P02": {undone: true, again: true}, // a pooler handed over another client's failed transaction
	"25P03": {undone: true, again: true}, // idle_in_transaction_session_timeout
	"25P04": {undone: true, again: true}, // transaction_timeout

	"40":    {undone: true, again: true}, // serialization failure or deadlock
	"40003": {again: true},               // the outcome is unknown

	"53": {undone: true}, // no room: disk, memory, connections

	"55":    {undone: true},              // an object is not in the state for it
	"55P03": {undone: true, again: true}, // a row was waited for too long, see fencelock.be_patient

	"57":    {again: true},               // the server ended the connection, perhaps after the commit
	"57014": {undone: true, again: true}, // statement_timeout, or an operator cancelled the statement
	"57P03": {undone: true, again: true}, // it is starting or stopping
	"57P05": {undone: true, again: true}, // idle_session_timeout

	"23505": {undone: true, again: true}, // a row was made since a snapshot, where the isolation is not read committed
	"FL001": {undone: true, again: true}, // a set of names that could not be had whole, raised by acquire_all
	"FL002": {},                          // a set that was granted before and has ended, in part at least: by acquire_all
	"FL003": {undone: true},              // a restore is under way, raised by enter
	"FL004": {undone: true, never: true}, // the log position is beyond a token, raised by position

	"28":    {undone: true, never: true}, // login
	"3D":    {undone: true, never: true}, // no such database
	"3F":    {undone: true, never: true}, // no such schema
	"42":    {undone: true, never: true}, // rights, or a missing name
	"0A000": {undone: true, never: true}, // a missing feature
	"FL005": {undone: true, again: true}, // the statement came after a later decision about its request, raised by acquire
	"FL413": {undone: true, never: true}, // the guards of the database have two memories, raised by one_memory
}

// pooled are the prefixes of PgBouncer's errors before a server has the request.
var pooled = []string{
	"client_idle_timeout", "query_wait_timeout", "client_login_timeout", "pgbouncer cannot connect to server",
	"no more connections allowed", "server login has been failing", "server_login_retry", "the database system is",
	"bouncer config error", "database is disabled", "pooler is shut down", "server is not ready",
}

// meaningOf returns the meaning of the state that err has, and false for an error without a known one. A broken
// connection has none.
func meaningOf(err error) (meaning, bool) {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || len(pg.Code) != 5 {
		return meaning{}, false
	}
	m, ok := states[pg.Code]
	if !ok {
		m, ok = states[pg.Code[:2]]
	}
	if pg.Code == "08P01" {
		m.undone = slices.ContainsFunc(pooled, func(says string) bool { return strings.HasPrefix(pg.Message, says) })
	}
	return m, ok
}

// rolledBack reports whether the server reported that the transaction had no effect and that a later one may succeed:
// it is busy, starting, stopping, or chose among conflicting transactions.
func rolledBack(err error) bool {
	m, _ := meaningOf(err)
	return m.undone && !m.never
}

// again reports whether another try of the same request may succeed immediately: the connection broke, or the
// transaction was in conflict with another one. Answers, ends of contexts and connections that could not be made are
// not repeated.
func again(err error) bool {
	if kit.Classified(err) || misconfigured(err) || kit.IsContext(err) || unsent(err) {
		return false
	}
	m, known := meaningOf(err)
	return m.again || !known
}

// misconfigured reports whether the refusal is permanent: the password, the role's rights, a missing schema or
// function, a missing feature.
func misconfigured(err error) bool {
	m, _ := meaningOf(err)
	return m.never
}

// remedy returns the advice for some errors, to be put behind them.
func remedy(err error) string {
	switch sqlState(err) {
	case "3F000", "42883", "42P01":
		return ": the schema is missing or older than this driver; run `fencelock postgres migrate` or postgres.Migrate"
	case "42501":
		return ": the role may not use the schema; grant usage on it, and execute on its functions"
	}
	return ""
}

// undone reports whether the server reported that the statement failed, for any reason, without effect. The states of
// a stopping server may also come between a commit and its answer, so that they leave the outcome open, like a broken
// connection.
func undone(err error) bool {
	m, known := meaningOf(err)
	return sqlState(err) != "" && (m.undone || !known) && !errors.Is(err, backend.ErrUnknown)
}
