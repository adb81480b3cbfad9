package machine

import (
	"fmt"
	"slices"
	"unicode"
	"unicode/utf8"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/principal"
)

const (
	maxNameBytes   = 512
	maxOwnerBytes  = 256
	maxHoldIDBytes = 64
	maxReasonBytes = 1024
	minIDBytes     = 16
	maxIDBytes     = 128

	// MaxUnder bounds Command.Under.
	MaxUnder = 64

	// maxRevision stops grants long before tokens reach the mark of fencing.Token.NotExclusive. Holds can still end.
	maxRevision = 1 << 62
)

func invalid(field, format string, args ...any) *Result {
	return &Result{Code: CodeInvalid, Field: field, Detail: fmt.Sprintf(format, args...)}
}

func limited(field string) *Result {
	return &Result{Code: CodeLimit, Field: field, Detail: LimitReached}
}

// LimitReached is the Detail of a CodeLimit by Limits. A CodeLimit by a policy has another Detail.
const LimitReached = "the limit is reached"

// checkCall makes the checks that do not depend on the state. It returns nil if c can be carried out.
func checkCall(c *Command) *Result {
	known := c.Op >= OpOpenSession && c.Op <= OpSetPolicies
	none := c.Session == SessionID{}
	switch {
	case !known:
		return &Result{Code: CodeUnknown, Field: "Op", Detail: fmt.Sprintf("operation %d", c.Op)}
	case c.Op == OpRaiseLevel && c.Level > MaxLevel:
		return &Result{Code: CodeUnknown, Field: "Level", Detail: fmt.Sprintf("level %d", c.Level)}
	case none && (c.Op <= OpAcquire || c.Op == OpMove || c.Op == OpRenew):
		return invalid("Session", "it is zero")
	case (c.Op <= OpExpire || c.Op == OpRenew) && c.Seq != 0:
		return invalid("Seq", "sessions are opened, renewed and ended without a number")
	case none && c.Seq != 0:
		return invalid("Seq", "it needs a session")
	case none && c.Target != 0:
		return invalid("Target", "it needs a session")
	case c.Target != 0 && c.Target == c.Seq:
		return invalid("Target", "it is the command's own number")
	case c.Target != 0 && c.Op != OpCancelWait && c.Op != OpRelease:
		return invalid("Target", "only a cancellation or a release has one")
	case c.Own && (none || c.Op != OpRelease):
		return invalid("Own", "only a release with a session has it")
	case c.Acked != 0 && c.Acked >= c.Seq:
		return invalid("Acked", "it is not below the command's own number")
	case c.Clock < 0:
		return invalid("Clock", "%v is negative", c.Clock)
	}
	return nil
}

// checkRequests checks the requests of an acquire, regardless of the holders.
func (m *Machine) checkRequests(requests []Request) *Result {
	switch n := len(requests); {
	case n == 0:
		return invalid("Requests", "there is none")
	case n > m.limits.Requests:
		return limited("Requests")
	}
	for i := range requests {
		r := &requests[i]
		if bad := m.checkRequest(r); bad != nil {
			return bad
		}
	}
	return nil
}

func (m *Machine) checkRequest(r *Request) *Result {
	if bad := checkText("Name", r.Name, maxNameBytes); bad != nil {
		return bad
	}
	size := 0
	for k, v := range r.Metadata { // the order does not matter: a sum, and one answer for all
		size += len(k) + len(v)
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return invalid("Metadata", "it is not valid UTF-8")
		}
	}
	if r.Name == "" {
		return invalid("Name", "it is empty")
	}
	if bad := checkRequestID(r.ID); bad != nil {
		return bad
	}
	inRange := 1 <= r.Permits && r.Permits <= r.Limit
	switch {
	case len(r.Name) > m.limits.NameBytes:
		return limited("NameBytes")
	case !validID(r.HoldID, 0, maxHoldIDBytes):
		return invalid("HoldID", "want up to %d of A-Z a-z 0-9 - _", maxHoldIDBytes)
	case r.Nonce != fencing.Nonce{} && m.level < LevelNonces:
		return invalid("Nonce", "the level is %d", m.level)
	case r.HeedsMaxHold && m.level < LevelRules:
		return invalid("HeedsMaxHold", "the level is %d", m.level)
	case r.For != "" && m.level < LevelRules:
		return invalid("For", "the level is %d", m.level)
	case r.For == principal.Process:
		return invalid("For", "nobody asks for %s", r.For)
	case r.Kind > Permits:
		return invalid("Kind", "%d", r.Kind)
	case r.Kind == Permits && !inRange:
		return invalid("Permits", "%d of %d", r.Permits, r.Limit)
	case r.Kind != Permits && (r.Permits != 0 || r.Limit != 0):
		return invalid("Permits", "only holds of permits have them")
	case r.Kind == Permits && r.Hierarchical:
		return invalid("Hierarchical", "permits have no hierarchy")
	case r.levels() > m.limits.Levels:
		return limited("Levels")
	case r.MinHold < 0:
		return invalid("MinHold", "it is negative")
	case size > m.limits.MetadataBytes:
		return limited("MetadataBytes")
	}
	if bad := m.checkSealed(r.Sealed); bad != nil {
		return bad
	}
	if bad := checkText("For", string(r.For), maxOwnerBytes); bad != nil {
		return bad
	}
	return checkText("Owner", r.Owner, maxOwnerBytes)
}

func checkRequestID(id string) *Result {
	if !validID(id, minIDBytes, maxIDBytes) {
		return invalid("RequestID", "want %d to %d of A-Z a-z 0-9 - _", minIDBytes, maxIDBytes)
	}
	return nil
}

func (m *Machine) checkSealed(sealed string) *Result {
	if len(sealed) > maxIDBytes || sealed != "" && m.level < LevelHiddenIDs {
		return invalid("Sealed", "%d bytes at level %d", len(sealed), m.level)
	}
	return nil
}

// checkText accepts up to most bytes of valid UTF-8 without control characters.
func checkText(field, s string, most int) *Result {
	switch {
	case len(s) > most:
		return invalid(field, "%d bytes, more than %d", len(s), most)
	case !utf8.ValidString(s):
		return invalid(field, "it is not valid UTF-8")
	}
	for i, r := range s {
		if unicode.IsControl(r) {
			return invalid(field, "it has the control character %U at byte %d", r, i)
		}
	}
	return nil
}

// checkUnder checks the ids of Command.Under. Their holds need not exist any more.
func checkUnder(under []string) *Result {
	if len(under) > MaxUnder {
		return invalid("Under", "%d holds, more than %d", len(under), MaxUnder)
	}
	for i, id := range under {
		if !validID(id, minIDBytes, maxIDBytes) {
			return invalid("Under", "number %d: want %d to %d of A-Z a-z 0-9 - _", i, minIDBytes, maxIDBytes)
		}
		if slices.Contains(under[:i], id) {
			return invalid("Under", "number %d is there twice", i)
		}
	}
	return nil
}

func validID(id string, least, most int) bool {
	if len(id) < least || len(id) > most {
		return false
	}
	for i := 0; i < len(id); i++ {
		c := id[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_') {
			return false
		}
	}
	return true
}
