package postgres

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// callError names the call, and maps what PostgreSQL and pgx say to the errors of the contract.
func callError(call, name string, err error) error {
	if misconfigured(err) && !kit.Classified(err) {
		err = fmt.Errorf("%w%s", err, remedy(err))
	}
	return kit.CallError(driverName, call, name, err, classOf)
}

// errNotice: the server said something between the statement and the end of its commit. "Canceling wait for synchronous
// replication" is such a notice, in the server's language; the commit then is answered as a success and is none.
var errNotice = errors.New("the server raised a notice while it committed")

// classOf gives PostgreSQL's errors their class. The end of a context stays: what was sent and not answered has been
// marked where it was sent.
func classOf(err error) error {
	switch {
	case unsent(err), rolledBack(err):
		return backend.ErrUnavailable
	case misconfigured(err):
		return backend.ErrMisconfigured
	}
	return nil
}

// unsent reports whether no byte of the request left.
func unsent(err error) bool {
	var dial *pgconn.ConnectError
	return pgconn.SafeToRetry(err) || errors.As(err, &dial) && !misconfigured(err)
}

func sqlState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// rolledBack reports whether the server said that the transaction left nothing: it is busy, starting, stopping, or made
// a choice among transactions that were in each other's way.
func rolledBack(err error) bool {
	switch code := sqlState(err); {
	case code == "57P01", code == "08006", code == "08003", code == "":
		return false // it may have been stopped between the commit and the answer
	case strings.HasPrefix(code, "40"), strings.HasPrefix(code, "53"), strings.HasPrefix(code, "55"),
		strings.HasPrefix(code, "57"), code == "FL001", code == "25006":
		return true
	}
	return false
}

// lockTimeout: another transaction kept a row for as long as a statement waits, see fencelock.be_patient.
const lockTimeout = "55P03"

// again reports whether another try of the same request may do better at once: the connection broke, or the transaction
// was in another one's way.
func again(err error) bool {
	if definite(err) || errors.Is(err, errNotice) || kit.IsContext(err) || unsent(err) {
		return false
	}
	code := sqlState(err)
	return code == "" || code == "FL001" || code == "57P01" || code == lockTimeout || strings.HasPrefix(code, "40")
}

// definite reports whether err is an answer of the contract's that another try would only repeat.
func definite(err error) bool {
	if errors.Is(err, backend.ErrUnknown) {
		return false
	}
	return kit.Classified(err) || errors.Is(err, errNoSession) || misconfigured(err)
}

// misconfigured reports whether the server refuses what it will refuse tomorrow too.
func misconfigured(err error) bool {
	code := sqlState(err)
	return strings.HasPrefix(code, "28") || strings.HasPrefix(code, "42") || strings.HasPrefix(code, "3D") ||
		strings.HasPrefix(code, "3F") || code == "0A000"
}

func remedy(err error) string {
	switch sqlState(err) {
	case "3F000", "42883", "42P01":
		return ": the schema is missing or older than this driver; run `fencelock postgres migrate` or postgres.Migrate"
	case "42501":
		return ": the role may not use the schema; grant usage on it, and execute on its functions"
	}
	return ""
}

// undone reports whether the server said that the statement failed, whatever the reason: it left nothing. A server that
// is stopped may say so between a commit and its answer.
func undone(err error) bool {
	code := sqlState(err)
	return code != "" && code != "57P01" && !strings.HasPrefix(code, "08") && !errors.Is(err, backend.ErrUnknown)
}
