package server

// Translation between the wire and the state machine. It makes no decisions.

import (
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/lead"
)

// sessionOf returns the id of a session on the wire.
func sessionOf(raw []byte) (machine.SessionID, error) {
	var id machine.SessionID
	if len(raw) != len(id) {
		return id, invalid("session", "it has %d bytes, not %d", len(raw), len(id))
	}
	copy(id[:], raw)
	if id == (machine.SessionID{}) {
		return id, invalid("session", "it is zero")
	}
	return id, nil
}

// nonceOf returns the nonce on the wire; zero without one.
func nonceOf(raw []byte) (n fencing.Nonce, err error) {
	if len(raw) != 0 && len(raw) != len(n) {
		return n, invalid("nonce", "it has %d bytes, not %d", len(raw), len(n))
	}
	copy(n[:], raw)
	return n, nil
}

// nonceOut is the inverse.
func nonceOut(n fencing.Nonce) []byte {
	if n == (fencing.Nonce{}) {
		return nil
	}
	return n[:]
}

// requestError is a refusal of a request with a code of the wire.
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
			MinHold: time.Duration(a.GetMinHoldNanos()), Metadata: a.GetMetadata(), HeedsMaxHold: a.GetHeedsMaxHold(),
		}
		nonce, err := nonceOf(a.GetNonce())
		if err != nil {
			return c, err
		}
		c.Requests[i].Nonce = nonce
	}
	return c, nil
}

// codesOut maps the state machine's codes to the wire's errors.
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
	machine.CodeDenied:    lockpb.Code_CODE_DENIED,
}

// messages are for people, and used if the state machine has no message.
var messages = map[machine.Code]string{
	machine.CodeHeld:      "the lock is held",
	machine.CodeNotHeld:   "there is no such hold or wait",
	machine.CodeCancelled: "the acquire was cancelled before it arrived",
	machine.CodeDeadlock:  "waiting would deadlock",
	machine.CodeNoSession: "the session is not open",
	machine.CodeStale:     "the client said that it has the answer",
}

// resultReply returns the reply to a command, without number and renewed.
func resultReply(x *machine.Result, k *lead.Timekeeper, limits machine.Limits) *lockpb.Reply {
	switch x.Code {
	case machine.CodeLimit:
		e := limitError(x.Field, limits)
		if x.Detail != machine.LimitReached { // the limit of a policy
			e.Message = x.Detail
		}
		return errorReply(e)
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

// grantsOut omits request ids: they are in the request that is answered.
func grantsOut(grants []machine.Grant, k *lead.Timekeeper) []*lockpb.Grant {
	out := make([]*lockpb.Grant, len(grants))
	for i, g := range grants {
		out[i] = &lockpb.Grant{Name: g.Name, Token: uint64(g.Token), Nonce: nonceOut(g.Nonce)}
		if g.MinHold > 0 {
			out[i].ClosedNanos = int64(k.Closed(g.Token))
		}
		out[i].LastNanos = int64(k.Last(g.Token, g.MaxHold))
	}
	return out
}

func grantedPush(n *machine.Notice, ids clientIDs, k *lead.Timekeeper) *lockpb.Reply {
	grants := grantsOut(n.Grants, k)
	for i, g := range n.Grants {
		grants[i].RequestId = ids.request(g.RequestID, g.Sealed)
	}
	return &lockpb.Reply{Answer: &lockpb.Reply_Granted{Granted: &lockpb.Granted{
		Session: ids.secret[:], Grants: grants, Ticket: n.Ticket,
	}}}
}

// reasonsOut has no reason for holds that another client released by the request id, and for waits that new rules
// deny: their clients repeat the request, and get the answer.
var reasonsOut = map[machine.Cause]lockpb.Reason{
	machine.CauseExpired: lockpb.Reason_REASON_SESSION_ENDED,
	machine.CauseClosed:  lockpb.Reason_REASON_SESSION_ENDED,
	machine.CauseForced:  lockpb.Reason_REASON_FORCE_RELEASED,
	machine.CauseMoved:   lockpb.Reason_REASON_MOVED,
	machine.CauseMaxHold: lockpb.Reason_REASON_MAX_HOLD,
}

func lostPush(n *machine.Notice, ids clientIDs) *lockpb.Reply {
	return &lockpb.Reply{Answer: &lockpb.Reply_Lost{Lost: &lockpb.Lost{
		Session: ids.secret[:], Name: n.Name, RequestId: ids.request(n.RequestID, n.Sealed), Token: uint64(n.Token),
		Reason: reasonsOut[n.Cause], Message: n.Detail, By: n.By, Principal: n.Principal,
	}}}
}

// nameState returns the public state of a name. k is nil in a member that does not lead, which knows no deadlines.
func nameState(info *machine.Info, k *lead.Timekeeper) *lockpb.NameState {
	out := &lockpb.NameState{Name: info.Name, Waiters: uint32(info.Waiters), Revision: info.Revision}
	for i := range info.Holders {
		h := &info.Holders[i]
		left := k.Left(h.Session)
		switch {
		case h.Lingering:
			left = k.Closed(h.Token)
		case h.MaxHold > 0 && k != nil:
			left = min(left, k.Last(h.Token, h.MaxHold))
		}
		out.Holders = append(out.Holders, &lockpb.Holder{
			Owner: h.Owner, HoldId: h.HoldID, Kind: kindsOut[h.Kind], Permits: h.Permits, Limit: h.Limit,
			Token: uint64(h.Token), SinceUnixNanos: h.Since, ExpiresInNanos: int64(left), Metadata: h.Metadata,
			Lingering: h.Lingering, Nonce: nonceOut(h.Nonce),
		})
	}
	for i := range info.Queue {
		w := &info.Queue[i]
		out.Queue = append(out.Queue, &lockpb.Waiter{
			Owner: w.Owner, HoldId: w.HoldID, Kind: kindsOut[w.Kind], Permits: w.Permits, Limit: w.Limit,
			SinceUnixNanos: w.Since,
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
		Principal: e.Principal,
	}
}

// watchError returns the error of a watch that cannot go on.
func watchError(err error) *lockpb.Error {
	var compacted *machine.CompactedError
	if errors.As(err, &compacted) {
		return &lockpb.Error{
			Code: lockpb.Code_CODE_COMPACTED, Message: err.Error(), CompactRevision: compacted.Revision,
		}
	}
	return &lockpb.Error{Code: lockpb.Code_CODE_INVALID, Field: "since", Message: err.Error()}
}
