// This file maps errors of the client library and of the servers to those of the contract. Callers act on the class:
// ErrUnavailable promises that the call had no effect, ErrUnknown makes the core clean up after the request. An
// unknown error becomes ErrUnknown, which costs a cleanup at worst; as ErrUnavailable it could leave a node that
// closes a name.

package zookeeper

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// answer is an error code of the protocol.
type answer struct {
	code  int
	err   error // the library's error, if it has one
	words string
	// backend.ErrUnavailable: the request was not done. backend.ErrMisconfigured: nor will it be, until an operator
	// changes a setting or a right. backend.ErrUnknown: it may have been done.
	class error
	again bool // another try may do better, over another connection or on another session
}

// Error implements error, for codes without an error of the library.
func (a *answer) Error() string { return "ZooKeeper answers " + strconv.Itoa(a.code) + ": " + a.words }

const codeThrottled = -127

// answers are all codes of ZooKeeper 3.5 to 3.9. Codes that only its clients generate are included, as unknown. The
// class depends on the origin of the code in the servers: before the change is proposed, in the processor that refuses
// (PrepRequestProcessor and others), or after a change may have been executed (FinalRequestProcessor).
var answers = []*answer{
	{-1, nil, "system error", backend.ErrUnknown, false},
	{-2, nil, "runtime inconsistency", backend.ErrUnknown, false},
	{-3, nil, "data inconsistency", backend.ErrUnknown, false},
	{-4, nil, "connection loss", backend.ErrUnknown, false},
	{-5, nil, "marshalling error, which stands for any fault in a server", backend.ErrUnknown, false},
	{-6, nil, "the request is not implemented: containers need version 3.5, and zookeeper.extendedTypesEnabled is " +
		"needed for some others", backend.ErrMisconfigured, false},
	{-7, nil, "operation timeout", backend.ErrUnknown, false},
	{-8, zk.ErrBadArguments, "bad arguments", backend.ErrUnavailable, false},
	{-9, nil, "invalid state", backend.ErrUnknown, false},
	{-12, nil, "the leader does not know the session", backend.ErrUnavailable, true},
	{-13, nil, "no quorum of the new configuration is connected", backend.ErrUnavailable, false},
	{-14, nil, "another reconfiguration is in progress", backend.ErrUnavailable, false},
	{-100, zk.ErrAPIError, "API error", backend.ErrUnavailable, false},
	{-101, zk.ErrNoNode, "no node", backend.ErrUnavailable, false},
	{-102, zk.ErrNoAuth, "no right", backend.ErrMisconfigured, false},
	{-103, zk.ErrBadVersion, "bad version", backend.ErrUnavailable, false},
	{-108, zk.ErrNoChildrenForEphemerals, "ephemeral nodes have no children", backend.ErrUnavailable, false},
	{-110, zk.ErrNodeExists, "node exists", backend.ErrUnavailable, false},
	{-111, zk.ErrNotEmpty, "node has children", backend.ErrUnavailable, false},
	{-112, zk.ErrSessionExpired, "session expired", backend.ErrUnavailable, true},
	{-113, nil, "invalid callback", backend.ErrUnknown, false},
	{-114, zk.ErrInvalidACL, "invalid ACL", backend.ErrMisconfigured, false},
	{-115, zk.ErrAuthFailed, "authentication failed", backend.ErrMisconfigured, false},
	{-116, zk.ErrClosing, "the client is closing", backend.ErrUnknown, false},
	{-117, zk.ErrNothing, "no answers", backend.ErrUnknown, false},
	{-118, zk.ErrSessionMoved, "the session has moved to another server", backend.ErrUnavailable, true},
	{-119, nil, "the server is cut off from the others and read-only", backend.ErrUnavailable, true},
	{-120, nil, "the session is local to its server, which makes no global one of it: set " +
		"localSessionsUpgradingEnabled", backend.ErrMisconfigured, false},
	{-121, nil, "no such watcher", backend.ErrUnavailable, false},
	{-122, nil, "request timeout", backend.ErrUnknown, false},
	{-123, zk.ErrReconfigDisabled, "reconfiguration is disabled", backend.ErrUnavailable, false},
	{-124, nil, "the servers require SASL (enforce.auth.enabled or sessionRequireClientSASLAuth), which this " +
		"driver does not have", backend.ErrMisconfigured, false},
	{-125, nil, "the quota of a node above is used up (zookeeper.enforceQuota): raise it with setquota",
		backend.ErrMisconfigured, false},
	{codeThrottled, nil, "the server throttles (zookeeper.throttled_op_wait_time)", backend.ErrUnavailable, true},
}

// init gives each answer its error: the library's, or itself.
func init() {
	for _, a := range answers {
		if a.err == nil {
			a.err = a
		}
	}
}

// answerOf returns the server's answer in err, or nil.
func answerOf(err error) *answer {
	if i := slices.IndexFunc(answers, func(a *answer) bool { return errors.Is(err, a.err) }); i >= 0 {
		return answers[i]
	}
	return nil
}

// named returns the answer for a code that the library has no error for, and any other error unchanged.
func named(err error) error {
	if err == nil {
		return nil
	}
	number, ok := strings.CutPrefix(err.Error(), "unknown error: ")
	code, invalid := strconv.Atoi(number)
	if !ok || invalid != nil {
		return err
	}
	for _, a := range answers {
		if a.code == code {
			return a.err
		}
	}
	return fmt.Errorf("ZooKeeper returned error code %d, which versions 3.5 to 3.9 do not define", code)
}

// throttled reports whether err is the answer of an overloaded server that has not begun with the request.
func throttled(err error) bool {
	a := answerOf(err)
	return a != nil && a.code == codeThrottled
}

// mayBeDone reports whether err is an answer that leaves the outcome of the request open.
func mayBeDone(err error) bool {
	a := answerOf(err)
	return a != nil && errors.Is(a.class, backend.ErrUnknown)
}

// callError names the call and the lock, and gives err its class. After a lost connection a read-only call is
// ErrUnavailable; the request of any other call may have been executed, so that it is ErrUnknown. Acquire marks its
// own leftovers (giveUp). It is nil for nil.
func (d *Driver) callError(call, name string, err error) error {
	return kit.CallError(driverName, call, name, err, func(err error) error {
		if a := answerOf(err); a != nil && errors.Is(a.class, backend.ErrMisconfigured) {
			return a.class
		}
		switch {
		case isOneOf(err, errNoConnection, errSessionLost, errGone, errStale, errSpent, zk.ErrInvalidPath, zk.ErrNoServer):
			return backend.ErrUnavailable
		case answerOf(err) != nil:
			return answerOf(err).class
		case kit.Changes(call):
			return backend.ErrUnknown
		case errors.Is(err, zk.ErrConnectionClosed),
			call == "ping" && errors.Is(err, context.DeadlineExceeded):
			return backend.ErrUnavailable
		}
		return nil
	})
}

// transient reports whether another try may succeed, over another connection or on another session. The end of a
// context counts, since it may be the try's own; the caller checks its own context. A refusal that names the request
// (ErrNoNode, ErrBadVersion and the like) does not: the sender of the request knows its meaning.
func transient(err error) bool {
	a := answerOf(err)
	return kit.IsContext(err) || a != nil && a.again || isOneOf(err,
		// Errors that another session, connection, node or server may not have.
		errSessionLost, errGone, errStale, errSpent, errNoConnection, zk.ErrConnectionClosed, zk.ErrNoServer,
		backend.ErrUnavailable)
}

// unanswered reports whether a request with an effect was sent and may have been done without an answer.
func unanswered(err error) bool {
	lost := kit.IsContext(err) || errors.Is(err, zk.ErrConnectionClosed) || mayBeDone(err)
	return lost && !errors.Is(err, errNoConnection)
}

// isOneOf reports whether err is one of the errors in some.
func isOneOf(err error, some ...error) bool {
	return slices.ContainsFunc(some, func(e error) bool { return errors.Is(err, e) })
}
