// This file classifies errors of PostgreSQL and pgx by the one question that matters: was the transaction
// committed? The server names a state (SQLSTATE, appendix A of its manual) only if it has ended the transaction,
// except where it may have been stopped between the commit and the answer. Without a state the connection broke, and
// only pgx knows whether anything had been written to it.
//
// The distinguished states, by their first two characters where not all five are given:
//
//	08, 57P01              the connection or the server ended: perhaps after the commit
//	40                     serialization failure or deadlock: taken back, another try may do better
//	53, 55, 57             no room, a row that was waited for, shutdown: taken back
//	25006                  a read-only transaction: a standby answers
//	28, 42, 3D, 3F, 0A000  login, rights, a missing name or feature: permanent
//	26000, 42P05           a prepared statement missing or there already: a pooler, see mixedUp
//	22P05                  a text with characters that the database's encoding lacks
//	FL413                  the guards of the database have two memories, raised by one_memory
//	FL001                  a set of names that could not be had whole, raised by acquire_all
//
// The predicates overlap on purpose: unsent, rolledBack and undone cover a missing effect, again and definite the next
// step, misconfigured a permanent error.

package postgres

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// callError names the call and the lock, gives err its class, and adds a remedy for a schema that is missing or
// closed to the role. It is nil for nil.
func callError(call, name string, err error) error {
	if sqlState(err) == "22P05" {
		err = fmt.Errorf("%w: %w", &backend.InvalidError{
			Kind: backend.ErrInvalidName, What: "name", Value: name, Why: "the encoding of the database lacks its characters",
		}, err)
	}
	if misconfigured(err) && !kit.Classified(err) {
		err = fmt.Errorf("%w%s", err, remedy(err))
	}
	return kit.CallError(driverName, call, name, err, classOf)
}

// errNotice: the server said something between the statement and the end of its commit. "Canceling wait for
// synchronous replication" is such a notice, in the server's language, so its text is not compared; the commit is then
// answered as a success and is none. Every other notice is treated alike: the statements raise no notices, and a
// needless unknown outcome only costs a look (TestSynchronousCommitWithoutAStandby).
var errNotice = errors.New("the server raised a notice while it committed")

// classOf returns the class of PostgreSQL's errors, or nil for an unknown one, which kit.CallError makes ErrUnknown.
// The end of a context stays as it is: the sender has marked requests without an answer (callEnded, put), and unsent
// ones (notSent).
func classOf(err error) error {
	switch {
	case unsent(err), rolledBack(err):
		return backend.ErrUnavailable
	case misconfigured(err):
		return backend.ErrMisconfigured
	}
	return nil
}

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

// rolledBack reports whether the server said that the transaction had no effect and that a later one may do better: it
// is busy, starting, stopping, or chose among conflicting transactions. A standby answers 25006, a read-only
// transaction.
func rolledBack(err error) bool {
	switch code := sqlState(err); {
	case code == "57P01", code == "08006", code == "08003", code == "":
		// It may have been stopped between the commit and the answer.
		return false // it may have been stopped between the commit and the answer
	case strings.HasPrefix(code, "40"), strings.HasPrefix(code, "53"), strings.HasPrefix(code, "55"),
		strings.HasPrefix(code, "57"), code == "FL001", code == "25006":
		return true
	}
	return false
}

// lockTimeout is the state of a statement that gave up waiting for a row, see fencelock.be_patient in the migrations.
const lockTimeout = "55P03"

// again reports whether another try of the same request may do better immediately: the connection broke, or the
// transaction was in another one's way. Definite answers, ends of contexts and connections that could not be made are
// not retried here, since the caller should hear of them.
func again(err error) bool {
	// Another try would repeat the answer, or is not wanted, or has not even begun.
	if definite(err) || errors.Is(err, errNotice) || kit.IsContext(err) || unsent(err) {
		return false
	}
	// No state means that the connection broke. The rest: a set that could not be had whole (FL001), a stopping
	// server, a row that was waited for, and serialization failures and deadlocks (class 40).
	code := sqlState(err)
	return code == "" || code == "FL001" || code == "57P01" || code == lockTimeout || strings.HasPrefix(code, "40")
}

// definite reports whether err is an answer of the contract that another try would only repeat.
func definite(err error) bool {
	// Unknown is an answer of the contract that another try may improve.
	if errors.Is(err, backend.ErrUnknown) {
		return false
	}
	return kit.Classified(err) || errors.Is(err, errNoSession) || misconfigured(err)
}

// misconfigured reports whether the refusal is permanent: the password, the role's rights, a missing schema or
// function, a missing feature.
func misconfigured(err error) bool {
	code := sqlState(err)
	return strings.HasPrefix(code, "28") || strings.HasPrefix(code, "42") || strings.HasPrefix(code, "3D") ||
		strings.HasPrefix(code, "3F") || code == "0A000" || code == "FL413"
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

// undone reports whether the server said that the statement failed, for whatever reason, without effect. A stopping
// server may say so between a commit and its answer, so that this state, like a broken connection, leaves it open.
func undone(err error) bool {
	code := sqlState(err)
	return code != "" && code != "57P01" && !strings.HasPrefix(code, "08") && !errors.Is(err, backend.ErrUnknown)
}
