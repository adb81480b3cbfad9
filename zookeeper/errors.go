package zookeeper

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend/engine"
)

// code is an error code of the protocol.
type code int32

// Is reports whether c is an error of the library go-zookeeper/zk that a caller may look for.
func (c code) Is(target error) bool { return c == codeNoAuth && target == zk.ErrNoAuth }

const (
	codeInconsistent   code = -2 // of the operations of a transaction after the one that failed
	codeNoNode         code = -101
	codeNoAuth         code = -102
	codeBadVersion     code = -103
	codeNodeExists     code = -110
	codeNotEmpty       code = -111
	codeSessionExpired code = -112
	codeAuthFailed     code = -115
	codeThrottled      code = -127
)

// meaning is what a code says, in words and for the caller.
type meaning struct {
	words string
	class engine.Class
}

// meanings are all codes of ZooKeeper 3.5 to 3.9. Those that only its clients make for themselves are among them, as
// unknown. The class says where the servers make the code: before the change is proposed, by the processor that refuses
// (PrepRequestProcessor and others), or where a change may have been carried out (FinalRequestProcessor).
var meanings = map[code]meaning{
	-1:               {"system error", engine.Unknown},
	codeInconsistent: {"runtime inconsistency", engine.Unknown},
	-3:               {"data inconsistency", engine.Unknown},
	-4:               {"connection loss", engine.Unknown},
	-5:               {"marshalling error, which stands for any fault in a server", engine.Unknown},
	-6: {"the request is not implemented: containers need version 3.5, and zookeeper.extendedTypesEnabled is " +
		"needed for some others", engine.Never},
	-7:                 {"operation timeout", engine.Unknown},
	-8:                 {"bad arguments", engine.NotDone},
	-9:                 {"invalid state", engine.Unknown},
	-12:                {"the leader does not know the session", engine.NotDone},
	-13:                {"no quorum of the new configuration is connected", engine.NotDone},
	-14:                {"another reconfiguration is in progress", engine.NotDone},
	-100:               {"API error", engine.NotDone},
	codeNoNode:         {"no node", engine.NotDone},
	codeNoAuth:         {"no right", engine.Never},
	codeBadVersion:     {"bad version", engine.NotDone},
	-108:               {"ephemeral nodes have no children", engine.NotDone},
	codeNodeExists:     {"node exists", engine.NotDone},
	codeNotEmpty:       {"node has children", engine.NotDone},
	codeSessionExpired: {"session expired", engine.NoSession},
	-113:               {"invalid callback", engine.Unknown},
	-114:               {"invalid ACL", engine.Never},
	codeAuthFailed:     {"authentication failed", engine.Never},
	-116:               {"the client is closing", engine.Unknown},
	-117:               {"no answers", engine.Unknown},
	-118:               {"the session has moved to another server", engine.NotDone},
	-119:               {"the server is cut off from the others and read-only", engine.NotDone},
	-120: {"the session is local to its server, which makes no global one of it: set " +
		"localSessionsUpgradingEnabled", engine.Never},
	-121: {"no such watcher", engine.NotDone},
	-122: {"request timeout", engine.Unknown},
	-123: {"reconfiguration is disabled", engine.NotDone},
	-124: {"the servers require SASL (enforce.auth.enabled or sessionRequireClientSASLAuth), which this driver does " +
		"not have", engine.Never},
	-125:          {"the quota of a node above is used up (zookeeper.enforceQuota): raise it with setquota", engine.Never},
	codeThrottled: {"the server throttles (zookeeper.throttled_op_wait_time)", engine.NotDone},
}

// Error implements error.
func (c code) Error() string {
	if m, ok := meanings[c]; ok {
		return "ZooKeeper answers " + strconv.Itoa(int(c)) + ": " + m.words
	}
	return fmt.Sprintf("ZooKeeper returned error code %d, which versions 3.5 to 3.9 do not define", int(c))
}

var (
	// errGone: the request's node was deleted by another client.
	errGone = errors.New("the node of the request is gone")
	// errChanged: what was read has changed before it was written.
	errChanged = errors.New("others change the name at the same moment")
	// errSpent: the request's node has a number with which nobody holds.
	errSpent = errors.New("the sequence numbers of the name's queue are exhausted; they restart when the queue is empty")
)

// Classify is engine.Service's. An unknown error becomes Unknown, which costs a cleanup at worst.
func (e *service) Classify(err error) engine.Class {
	var c code
	switch {
	case isOneOf(err, errNoConnection, errGone, errChanged, errSpent):
		return engine.NotDone
	case errors.As(err, &c):
		return meanings[c].class // the zero class is Unknown
	}
	return engine.Unknown
}

// isOneOf reports whether err is one of some errors.
func isOneOf(err error, some ...error) bool {
	return slices.ContainsFunc(some, func(e error) bool { return errors.Is(err, e) })
}

// ignore returns err unless it is one of some.
func ignore(err error, some ...error) error {
	if isOneOf(err, some...) {
		return nil
	}
	return err
}
