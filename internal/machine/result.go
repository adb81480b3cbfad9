package machine

import (
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Code is the answer to a command. The numbers are part of the snapshot format.
type Code uint8

const (
	// CodeOK: done.
	CodeOK Code = 1
	// CodeGranted: held now. Result.Grants.
	CodeGranted Code = 2
	// CodeQueued: waits now. Result.Ticket. A NoticeGranted follows, unless the wait ends otherwise.
	CodeQueued Code = 3
	// CodeHeld: another request holds the name or waits for it. Result.Holder.
	CodeHeld Code = 4
	// CodeNotHeld: there is no such hold or wait, or no longer.
	CodeNotHeld Code = 5
	// CodeCancelled: the acquire was abandoned before it was carried out: see Command.Target.
	CodeCancelled Code = 6
	// CodeDeadlock: waiting would close a cycle. Result.Cycle.
	CodeDeadlock Code = 7
	// CodeMismatch: the name is in use with another kind, another limit of permits, or another Hierarchical.
	CodeMismatch Code = 8
	// CodeConflict: an id is in use for something else.
	CodeConflict Code = 9
	// CodeInvalid: a value is out of its bounds. Result.Field.
	CodeInvalid Code = 10
	// CodeLimit: one of Limits is reached. Result.Field.
	CodeLimit Code = 11
	// CodeNoSession: the session is not open. Not remembered.
	CodeNoSession Code = 12
	// CodeStale: Command.Acked has acknowledged the answer. Not remembered.
	CodeStale Code = 13
	// CodeUnknown: this build does not know the operation or the level. Not remembered. The replica must stop before it
	// drifts apart from others, unless Command.Ignorable is set.
	CodeUnknown Code = 14
	// CodeDenied: the session, or the session of the hold or the wait, belongs to another principal; or the rules deny
	// the request, with Field Name.
	CodeDenied Code = 15
)

// Result is the answer to one command.
type Result struct {
	Code Code
	// Grants, one per request of the acquire, in their order. Only with CodeGranted.
	Grants []Grant
	// Ticket of the wait. Only with CodeQueued.
	Ticket uint64
	// Holder is the blocker: a holder, or a waiter if there is no such holder. Only with CodeHeld.
	Holder *Blocker
	// Cycle of blockers, the newcomer first, with the name that it would wait for; each later blocker has the name that
	// its predecessor waits for, and the last one is a hold of the newcomer's Under. Only with CodeDeadlock.
	Cycle []Blocker
	// Field is the refused field, by its name in Command, Request or Limits; Detail is the reason, for people. Only with
	// CodeInvalid, CodeLimit, CodeMismatch, CodeConflict and CodeUnknown.
	Field, Detail string
}

// Grant is one granted hold.
type Grant struct {
	Name      string
	RequestID string
	Sealed    string // see Request.Sealed
	Token     fencing.Token
	Nonce     fencing.Nonce
	MinHold   time.Duration
	// MaxHold is the maximum hold time, by the policy of the name; zero: none. The leader measures it, and ends the hold
	// with OpFree.
	MaxHold time.Duration
}

// Blocker is a holder or waiter that blocks another request.
type Blocker struct {
	Name    string // wanted and in use, possibly by a hierarchical hold or wait below it
	Session SessionID
	Owner   string
	HoldID  string
	Waits   bool // it waits for the name and does not hold it
}

// Cause is the reason why a hold, a wait or a session ended.
type Cause uint8

const (
	// CauseExpired: the session expired.
	CauseExpired Cause = 1
	// CauseClosed: the session was closed.
	CauseClosed Cause = 2
	// CauseForced: an administrator force-released the hold.
	CauseForced Cause = 3
	// CauseGivenBack: a client outside the session released the hold or cancelled the wait, by the request id.
	CauseGivenBack Cause = 4
	// CauseMoved: another session took it over, by OpMove.
	CauseMoved Cause = 5
	// CauseMaxHold: the maximum hold time was over.
	CauseMaxHold Cause = 6
	// CauseDenied: new rules do not allow the wait.
	CauseDenied Cause = 7
)

// NoticeType is the type of a Notice.
type NoticeType uint8

const (
	// NoticeGranted: the wait with Ticket of Session is over, and all of Grants are held, in the order of its requests.
	NoticeGranted NoticeType = 1
	// NoticeLost: the hold with Name, RequestID and Token of Session was ended, or the wait with Name, RequestID and
	// Ticket. Cause, Detail.
	NoticeLost NoticeType = 2
	// NoticeSessionEnded: Session ended with all its holds and waits. Cause. One notice for all of them.
	NoticeSessionEnded NoticeType = 3
	// NoticeLingering: the hold with Name, RequestID and Token lingers from now on; the leader frees it when its
	// MinHold is over. It has no Session any more.
	NoticeLingering NoticeType = 4
	// NoticeUntimed: the hold with Token, which had a maximum, has ended. It is for the leader, and has no Session.
	NoticeUntimed NoticeType = 5
)

// Notice is an effect of a command on another session than its sender's.
type Notice struct {
	Type      NoticeType
	Session   SessionID
	Ticket    uint64
	Grants    []Grant
	Name      string
	RequestID string
	Sealed    string // see Request.Sealed; for Session
	Token     fencing.Token
	MinHold   time.Duration
	Cause     Cause
	Detail    string

	By, Principal string // of CauseForced: see Command
}
