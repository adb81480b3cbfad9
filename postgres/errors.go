// This file says what an error of PostgreSQL or pgx means for the question that matters here: was the transaction
// committed? The server names a state (SQLSTATE, appendix A of its manual) only if it has ended the transaction,
// except where it may have been stopped between the commit and the answer. Without a state the connection broke, and
// only pgx knows whether anything had been written to it.
//
// The states that are told apart, by their first two characters where not all five are given:
//
//	08, 57P01              the connection or the server ended: perhaps after the commit
//	40                     serialization failure or deadlock: taken back, another try may do better
//	53, 55, 57             no room, a row that was waited for, shutdown: taken back
//	25006                  a read-only transaction: a standby answers
//	28, 42, 3D, 3F, 0A000  login, rights, a name that is missing, a feature: the same tomorrow
//	26000, 42P05           a prepared statement that is missing or there already: a pooler, see mixedUp
//	FL001                  a set of names that could not be had whole, raised by acquire_all
//
// The predicates overlap on purpose: unsent, rolledBack and undone say what did not happen, again and definite what to
// do next, misconfigured what will not pass by itself.

package postgres

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// callError names the call and the lock, gives err its class, and adds what to do about a schema that is missing or
// closed to the role. It is nil for nil.
func callError(call, name string, err error) error {
	if misconfigured(err) && !kit.Classified(err) {
		err = fmt.Errorf("%w%s", err, remedy(err))
	}
	return kit.CallError(driverName, call, name, err, classOf)
}

// errNotice: the server said something between the statement and the end of its commit. "Canceling wait for
// synchronous replication" is such a notice, in the server's language, which is why its text is not compared; the
// commit then is answered as a success and is none. Every other notice is taken for the same: the statements raise
// none of their own, and an outcome that is unknown for nothing costs a look (TestSynchronousCommitWithoutAStandby).
var errNotice = errors.New("the server raised a notice while it committed")

// classOf gives PostgreSQL's errors their class, or nil for one that it does not know, which kit.CallError makes
// ErrUnknown. The end of a context stays as it is: what was sent and not answered has been marked where it was sent
// (callEnded, put), and what was not sent as well (notSent).
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
// nothing.
func unsent(err error) bool {
	var dial *pgconn.ConnectError
	return pgconn.SafeToRetry(err) || errors.As(err, &dial) && !misconfigured(err)
}

// sqlState returns the five characters by which the server names an error, or "" if it is none of the server's.
func sqlState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// rolledBack reports whether the server said that the transaction left nothing and that a later one may do better: it
// is busy, starting, stopping, or made a choice among transactions that were in each other's way. 25006, a read-only
// transaction, is what a standby answers.
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

// again reports whether another try of the same request may do better at once: the connection broke, or the
// transaction was in another one's way. Definite answers, ends of contexts and connections that could not be made are
// not tried again here, since the caller should hear of them.
func again(err error) bool {
	// Another try would repeat the answer, or is not wanted, or has not even begun.
	if definite(err) || errors.Is(err, errNotice) || kit.IsContext(err) || unsent(err) {
		return false
	}
	// No state means that the connection broke. The rest: a set that could not be had whole (FL001), a server that is
	// stopping, a row that was waited for, and serialization failures and deadlocks (class 40).
	code := sqlState(err)
	return code == "" || code == "FL001" || code == "57P01" || code == lockTimeout || strings.HasPrefix(code, "40")
}

// definite reports whether err is an answer of the contract's that another try would only repeat.
func definite(err error) bool {
	// Unknown is an answer of the contract's, and the one that another try may improve.
	if errors.Is(err, backend.ErrUnknown) {
		return false
	}
	return kit.Classified(err) || errors.Is(err, errNoSession) || misconfigured(err)
}

// misconfigured reports whether the server refuses what it will refuse tomorrow too: the password, the role's rights,
// a schema or function that is not there, a feature that it lacks.
func misconfigured(err error) bool {
	code := sqlState(err)
	return strings.HasPrefix(code, "28") || strings.HasPrefix(code, "42") || strings.HasPrefix(code, "3D") ||
		strings.HasPrefix(code, "3F") || code == "0A000"
}

// remedy says what to do about some errors, to be put behind them.
func remedy(err error) string {
	switch sqlState(err) {
	case "3F000", "42883", "42P01":
		return ": the schema is missing or older than this driver; run `fencelock postgres migrate` or postgres.Migrate"
	case "42501":
		return ": the role may not use the schema; grant usage on it, and execute on its functions"
	}
	return ""
}

// undone reports whether the server said that the statement failed, whatever the reason: it left nothing. A server
// that is stopped may say so between a commit and its answer, so that this state, as a broken connection, leaves it
// open.
func undone(err error) bool {
	code := sqlState(err)
	return code != "" && code != "57P01" && !strings.HasPrefix(code, "08") && !errors.Is(err, backend.ErrUnknown)
}
