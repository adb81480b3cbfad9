package server

// Translation: the words of the wire into those of the state machine and back. Nothing is decided here.

import (
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/lead"
)

func sessionOf(q *lockpb.Request) (machine.SessionID, error) {
	var id machine.SessionID
	if len(q.Session) != len(id) {
		return id, invalid("session", "it has %d bytes, not %d", len(q.Session), len(id))
	}
	copy(id[:], q.Session)
	if id == (machine.SessionID{}) {
		return id, invalid("session", "it is zero")
	}
	return id, nil
}

// requestError is a request that is refused with a code of the wire.
type requestError struct{ wire *lockpb.Error }

func (e *requestError) Error() string { return e.wire.Message }

func refused(code lockpb.Code, field, format string, args ...any) error {
	return &requestError{&lockpb.Error{Code: code, Field: field, Message: fmt.Sprintf(format, args...)}}
}

func invalid(field, format string, args ...any) error {
	return refused(lockpb.Code_CODE_INVALID, field, format, args...)
}

var kindsIn = map[lockpb.Kind]machine.Kind{
	lockpb.Kind_KIND_EXCLUSIVE: machine.Exclusive,
	lockpb.Kind_KIND_SHARED:    machine.Shared,
	lockpb.Kind_KIND_PERMITS:   machine.Permits,
}

var kindsOut = map[machine.Kind]lockpb.Kind{
	machine.Exclusive: lockpb.Kind_KIND_EXCLUSIVE,
	machine.Shared:    lockpb.Kind_KIND_SHARED,
	machine.Permits:   lockpb.Kind_KIND_PERMITS,
}

func acquireCommand(all []*lockpb.Acquire, under []string) (machine.Command, error) {
	c := machine.Command{Op: machine.OpAcquire, Requests: make([]machine.Request, len(all)), Under: under}
	if len(all) == 0 {
		return c, invalid("requests", "there are none")
	}
	c.Wait = all[0].GetWait()
	for i, a := range all {
		kind, ok := kindsIn[a.GetKind()]
		if !ok {
			return c, invalid("kind", "%d is not known", a.GetKind())
		}
		if a.GetWait() != c.Wait {
			return c, invalid("wait", "the requests do not agree")
		}
		c.Requests[i] = machine.Request{
			Name: a.GetName(), ID: a.GetRequestId(), HoldID: a.GetHoldId(), Owner: a.GetOwner(), Kind: kind,
			Permits: a.GetPermits(), Limit: a.GetLimit(), Hierarchical: a.GetHierarchical(),
			MinHold: time.Duration(a.GetMinHoldNanos()), Metadata: a.GetMetadata(),
		}
	}
	return c, nil
}

// codesOut are the answers of the state machine that are errors of the wire.
var codesOut = map[machine.Code]lockpb.Code{
	machine.CodeHeld:      lockpb.Code_CODE_HELD,
	machine.CodeNotHeld:   lockpb.Code_CODE_NOT_HELD,
	machine.CodeCancelled: lockpb.Code_CODE_CANCELLED,
	machine.CodeDeadlock:  lockpb.Code_CODE_DEADLOCK,
	machine.CodeMismatch:  lockpb.Code_CODE_LIMIT_MISMATCH,
	machine.CodeConflict:  lockpb.Code_CODE_CONFLICT,
	machine.CodeInvalid:   lockpb.Code_CODE_INVALID,
	machine.CodeNoSession: lockpb.Code_CODE_SESSION_ENDED,
	machine.CodeStale:     lockpb.Code_CODE_STALE,
	machine.CodeUnknown:   lockpb.Code_CODE_UNSUPPORTED,
}

// messages for people, where the state machine gives none.
var messages = map[machine.Code]string{
	machine.CodeHeld:      "the lock is held",
	machine.CodeNotHeld:   "there is no such hold or wait",
	machine.CodeCancelled: "the acquire was given up before it arrived",
	machine.CodeDeadlock:  "waiting would deadlock",
	machine.CodeNoSession: "the session is not open",
	machine.CodeStale:     "the client said that it has the answer",
}

// resultReply is the reply to a command, without number and renewed.
func resultReply(x *machine.Result, k *lead.Timekeeper, limits machine.Limits) *lockpb.Reply {
	switch x.Code {
	case machine.CodeLimit:
		return errorReply(limitError(x.Field, limits))
	case machine.CodeOK:
		return doneReply()
	case machine.CodeGranted:
		return &lockpb.Reply{Answer: &lockpb.Reply_Acquired{Acquired: &lockpb.Acquired{Grants: grantsOut(x.Grants, k)}}}
	case machine.CodeQueued:
		return &lockpb.Reply{Answer: &lockpb.Reply_Acquired{Acquired: &lockpb.Acquired{Queued: true, Ticket: x.Ticket}}}
	}
	e := &lockpb.Error{Code: codesOut[x.Code], Message: x.Detail, Field: x.Field}
	if e.Message == "" {
		e.Message = messages[x.Code]
	}
	if b := x.Holder; b != nil {
		e.Name, e.Holder, e.HoldId = b.Name, b.Owner, b.HoldID
		if !b.Waits {
			e.RetryAfterNanos = int64(k.Left(b.Session))
		}
	}
	for _, b := range x.Cycle {
		e.Cycle = append(e.Cycle, &lockpb.Blocker{Name: b.Name, Owner: b.Owner, Waits: b.Waits})
	}
	return errorReply(e)
}

func doneReply() *lockpb.Reply {
	return &lockpb.Reply{Answer: &lockpb.Reply_Done{Done: &lockpb.Done{}}}
}

// aliveReply answers a keepalive. The outbox counts the pushes before it.
func aliveReply() *lockpb.Reply {
	r := doneReply()
	r.Pushed = new(uint64)
	return r
}

func errorReply(e *lockpb.Error) *lockpb.Reply {
	return &lockpb.Reply{Answer: &lockpb.Reply_Error{Error: e}}
}

func grantsOut(grants []machine.Grant, k *lead.Timekeeper) []*lockpb.Grant {
	out := make([]*lockpb.Grant, len(grants))
	for i, g := range grants {
		out[i] = &lockpb.Grant{Name: g.Name, RequestId: g.RequestID, Token: uint64(g.Token)}
		if g.MinHold > 0 {
			out[i].ClosedNanos = int64(k.Closed(g.Token))
		}
	}
	return out
}

func grantedPush(n *machine.Notice, k *lead.Timekeeper) *lockpb.Reply {
	return &lockpb.Reply{Answer: &lockpb.Reply_Granted{Granted: &lockpb.Granted{
		Session: n.Session[:], Grants: grantsOut(n.Grants, k), Ticket: n.Ticket,
	}}}
}

// reasonsOut has none for what somebody gave back who knows the request id.
var reasonsOut = map[machine.Cause]lockpb.Reason{
	machine.CauseExpired: lockpb.Reason_REASON_SESSION_ENDED,
	machine.CauseClosed:  lockpb.Reason_REASON_SESSION_ENDED,
	machine.CauseForced:  lockpb.Reason_REASON_FORCE_RELEASED,
	machine.CauseMoved:   lockpb.Reason_REASON_MOVED,
}

func lostPush(n *machine.Notice) *lockpb.Reply {
	return &lockpb.Reply{Answer: &lockpb.Reply_Lost{Lost: &lockpb.Lost{
		Session: n.Session[:], Name: n.Name, RequestId: n.RequestID, Token: uint64(n.Token),
		Reason: reasonsOut[n.Cause], Message: n.Detail,
	}}}
}

// nameState is a name as people see it. k is nil in a member that does not lead, which knows no deadlines.
func nameState(info *machine.Info, k *lead.Timekeeper) *lockpb.NameState {
	out := &lockpb.NameState{Name: info.Name, Waiters: uint32(info.Waiters), Revision: info.Revision}
	for i := range info.Holders {
		h := &info.Holders[i]
		left := k.Left(h.Session)
		if h.Lingering {
			left = k.Closed(h.Token)
		}
		out.Holders = append(out.Holders, &lockpb.Holder{
			Owner: h.Owner, HoldId: h.HoldID, Kind: kindsOut[h.Kind], Permits: h.Permits, Limit: h.Limit,
			Token: uint64(h.Token), SinceUnixNanos: h.Since, ExpiresInNanos: int64(left), Metadata: h.Metadata,
			Lingering: h.Lingering,
		})
	}
	return out
}

var eventsOut = map[machine.EventType]lockpb.EventType{
	machine.EventAcquired:  lockpb.EventType_EVENT_ACQUIRED,
	machine.EventReleased:  lockpb.EventType_EVENT_RELEASED,
	machine.EventExpired:   lockpb.EventType_EVENT_EXPIRED,
	machine.EventForced:    lockpb.EventType_EVENT_FORCE_RELEASED,
	machine.EventQueued:    lockpb.EventType_EVENT_QUEUED,
	machine.EventCancelled: lockpb.EventType_EVENT_CANCELLED,
	machine.EventFreed:     lockpb.EventType_EVENT_FREED,
}

func eventOut(e *machine.Event) *lockpb.Event {
	return &lockpb.Event{
		Type: eventsOut[e.Type], Name: e.Name, Owner: e.Owner, Token: uint64(e.Token), Reason: e.Reason,
		Revision: e.Revision, TimeUnixNanos: e.At, HoldId: e.HoldID, By: e.By,
	}
}

// watchError is the error of a watch that cannot go on.
func watchError(err error) *lockpb.Error {
	var compacted *machine.CompactedError
	if errors.As(err, &compacted) {
		return &lockpb.Error{
			Code: lockpb.Code_CODE_COMPACTED, Message: err.Error(), CompactRevision: compacted.Revision,
		}
	}
	return &lockpb.Error{Code: lockpb.Code_CODE_INVALID, Field: "since", Message: err.Error()}
}
